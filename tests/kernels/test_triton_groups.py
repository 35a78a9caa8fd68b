"""Triton's kernels for compressed rows against their references: plain values to the bit, products
within rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.eights import join_eight_rows
from freight.kernels.grouped import (
    CompressedRows,
    dequantise,
    dequantise_reference,
    join_rows,
    small_product,
)
from freight.model.number_format import EightFloats, Grouped, LevelFloats

from .test_exponents import KINDS, make_numbers, shortened
from .test_levels import FORMATS as LEVELS
from .test_levels import make_rows as make_level_rows
from .test_micro import make_rows as make_micro_rows
from .triton_bed import DEVICE, EXAMPLES, ON_DEVICE, in_use, loaded

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = [
    Grouped(bits=bits, group_size=size, wide=wide)
    for bits in (3, 4, 8)
    for size in (16, 32, 64, 128)
    for wide in (False, True)
]
ACROSS = [
    Grouped(bits=bits, group_size=size, across=True)
    for bits in (3, 4, 8)
    for size in (16, 32, 64, 128)
]
HEADS = [Grouped(bits=bits, group_size=size) for bits in (4, 8) for size in (4, 20, 40, 48)]


def make_rows(own: Grouped, rows: int, groups: int, seed: int, first: int = 0) -> CompressedRows:
    """Any codes, scales and minima; rows begin ``first`` rows into their buffer. Across rows, of
    as many times as many of them, in ``groups`` times as many columns."""
    dice = torch.Generator().manual_seed(seed)
    shape = (rows + first, groups * (own.group_size if own.across else 1))
    places = (shape[0], own.group_size, shape[1]) if own.across else (*shape, own.group_size)
    codes = torch.randint(0, own.levels + 1, places, generator=dice)
    kind = torch.float32 if own.wide else torch.float16
    scale, lowest = (torch.randn(shape, generator=dice).to(kind) for _ in range(2))
    raw = join_rows(codes.to(torch.uint8), scale.abs(), lowest, own).to(DEVICE)
    raw = raw[first * own.rows_together :]
    return CompressedRows(raw=raw, columns=groups * own.group_size, number_format=own)


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    own=st.sampled_from(WEIGHTS + ACROSS + HEADS),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    first=st.integers(0, 2),
    spare=st.sampled_from([0, 8]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_plain_values_are_the_reference_s(
    own: Grouped, rows: int, groups: int, first: int, spare: int, dtype: torch.dtype, seed: int
) -> None:
    compressed = make_rows(own, 1 + rows // 35 if own.across else rows, groups, seed, first)
    rows = len(compressed.raw)
    wanted = torch.empty(rows, compressed.columns, dtype=dtype, device=DEVICE)
    dequantise_reference(compressed, wanted)
    held = torch.full((rows, compressed.columns + spare), 7.0, dtype=dtype, device=DEVICE)
    found = held[:, : compressed.columns]
    with in_use(loaded()):
        dequantise(compressed, found)
    if dtype is torch.bfloat16 and not ON_DEVICE:
        # The interpreter cuts off instead of rounding.
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, wanted)
    assert (held[:, compressed.columns :] == 7.0).all()


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 9),
    columns=st.sampled_from([64, 256, 320, 576]),
    first=st.integers(0, 2),
    spare=st.sampled_from([0, 8]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_short_exponents(
    kind: str, rows: int, columns: int, first: int, spare: int, dtype: torch.dtype, seed: int
) -> None:
    if dtype is torch.float16:
        kind = "normal"  # what has no room there overflows, of which the interpreter warns
    x = make_numbers(kind, rows + first, columns, seed)
    own = shortened(x, spare).rows(first, first + rows)
    own = replace(own, raw=own.raw.to(DEVICE))
    held = torch.full((rows, columns + spare), 7.0, dtype=dtype, device=DEVICE)
    found = held[:, :columns]
    with in_use(loaded()):
        dequantise(own, found)
    wanted = x[first:].to(DEVICE).to(dtype)
    is_number = ~wanted.isnan()
    assert torch.equal(found[is_number], wanted[is_number])
    assert bool(found[~is_number].isnan().all())
    assert (held[:, columns:] == 7.0).all()


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    rows=st.integers(1, 70),
    columns=st.sampled_from([32, 96, 320]),
    first=st.integers(0, 2),
    spare=st.sampled_from([0, 8]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_mxfp4(
    rows: int, columns: int, first: int, spare: int, dtype: torch.dtype, seed: int
) -> None:
    whole = make_micro_rows(rows + first, columns, seed, near_one=dtype is torch.float16)
    own = whole.rows(first, first + rows)
    own = replace(own, raw=own.raw.to(DEVICE))
    wanted = torch.empty(rows, columns, dtype=dtype)
    dequantise_reference(replace(own, raw=own.raw.cpu()), wanted)
    held = torch.full((rows, columns + spare), 7.0, dtype=dtype, device=DEVICE)
    with in_use(loaded()):
        dequantise(own, held[:, :columns])
    # The interpreter rounds what has no exponent of its own in bfloat16 otherwise.
    is_tiny = (wanted.abs() < torch.finfo(dtype).tiny) & (dtype is torch.bfloat16)
    found = held[:, :columns].cpu()
    assert torch.equal(found[~is_tiny], wanted[~is_tiny])
    assert (held[:, columns:] == 7.0).all()


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    own=st.sampled_from(LEVELS),
    rows=st.integers(1, 70),
    columns=st.sampled_from([128, 384]),
    spare=st.sampled_from([0, 8]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_levels(
    own: LevelFloats, rows: int, columns: int, spare: int, dtype: torch.dtype, seed: int
) -> None:
    kept = make_level_rows(own, rows, columns, seed)
    wanted = torch.empty(rows, columns, dtype=dtype)
    dequantise_reference(kept, wanted)
    held = torch.full((rows, columns + spare), 7.0, dtype=dtype, device=DEVICE)
    with in_use(loaded()):
        dequantise(replace(kept, raw=kept.raw.to(DEVICE)), held[:, :columns])
    found = held[:, :columns].cpu()
    if dtype is not torch.float32 and not ON_DEVICE:
        # The interpreter cuts off instead of rounding, and tiny numbers of float16 are coarse.
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-24)
    else:
        assert torch.equal(found, wanted)
    assert (held[:, columns:] == 7.0).all()


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    rows=st.integers(1, 70),
    columns=st.sampled_from([4, 128, 132, 320]),
    spare=st.sampled_from([0, 8]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_fp8(rows: int, columns: int, spare: int, dtype: torch.dtype, seed: int) -> None:
    """All floats of 8 bits, the tiny ones too, and scales that keep them in float16."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=dice)
    codes[(codes & 127) == 127] = 0
    scales = torch.rand(rows, -(-columns // 128), generator=dice) + 0.5
    raw = join_eight_rows(codes, scales)
    own = CompressedRows(raw=raw, columns=columns, number_format=EightFloats())
    wanted = torch.empty(rows, columns, dtype=dtype)
    dequantise_reference(own, wanted)
    held = torch.full((rows, columns + spare), 7.0, dtype=dtype, device=DEVICE)
    with in_use(loaded()):
        dequantise(replace(own, raw=raw.to(DEVICE)), held[:, :columns])
    found = held[:, :columns].cpu()
    if dtype is torch.bfloat16 and not ON_DEVICE:
        # The interpreter cuts off instead of rounding.
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, wanted)
    assert (held[:, columns:] == 7.0).all()


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    own=st.sampled_from([w for w in WEIGHTS if w.code_bytes(w.group_size) >= 16]),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    tokens=st.integers(1, 16),
    spare=st.sampled_from([0, 8]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_small_products_are_those_of_the_plain_rows(
    own: Grouped, rows: int, groups: int, tokens: int, spare: int, dtype: torch.dtype, seed: int
) -> None:
    weights = make_rows(own, rows, groups, seed)
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, weights.columns + spare, generator=dice).to(DEVICE, dtype)
    x = x[:, : weights.columns]
    plain = torch.empty(rows, weights.columns, device=DEVICE)
    dequantise_reference(weights, plain)
    with in_use(loaded()):
        found = small_product(x, weights)
    assert found is not None
    wanted = x.double() @ plain.double().t()
    # Relative to the sums of magnitudes: what was added may cancel.
    size = x.double().abs() @ plain.double().abs().t()
    assert ((found.double() - wanted).abs() <= 1e-5 * size + 1e-6).all()


@pytest.mark.parametrize(("size", "tokens", "across"), [(64, 17, 0), (16, 3, 0), (64, 3, 1)])
def test_what_does_not_pay_is_left_to_the_caller(size: int, tokens: int, across: int) -> None:
    """Many tokens, groups shorter than a tensor core's sums, and groups across rows."""
    rows = make_rows(Grouped(bits=4, group_size=size, across=bool(across)), 4, 2, 0)
    with in_use(loaded()):
        assert small_product(torch.ones(tokens, rows.columns, device=DEVICE), rows) is None
