"""Codes of 4 bits for the levels of a table: any bytes mean what the format says, by the reference
and by loops; products are those of the rows that were made plain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels import grouped, products
from freight.kernels.few_pairs import SeveralRows, few_codes_are_for_pairs, multiply_few
from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.level_loops import make_plain
from freight.kernels.levels import join_level_rows, make_levels_plain_reference
from freight.kernels.plain_rows import level_rows
from freight.kernels.products import Product, multiply, scratch_values
from freight.kernels.sums import PUTS
from freight.kernels.threads import find_loops
from freight.model.number_format import LevelFloats, find_compressed

NVFP4 = LevelFloats(levels="e2m1", group_size=16, in_bytes=True)
FORMATS = [
    NVFP4,
    LevelFloats(levels="nf4", group_size=64),
    LevelFloats(levels="fp4", group_size=64),
    LevelFloats(levels="nf4", group_size=128),
    LevelFloats(levels="e2m1", group_size=16),
    LevelFloats(levels="e2m1", group_size=32, in_bytes=True),
]
NAMES = [own.name for own in FORMATS]


def make_parts(
    own: LevelFloats, rows: int, columns: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """All codes, and scales of many sizes, of bytes all but the two that are no numbers."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=dice)
    groups = columns // own.group_size
    if not own.in_bytes:
        return codes, torch.randn(rows, groups, generator=dice) * 0.01, None
    scales = torch.randint(0, 256, (rows, groups), dtype=torch.uint8, generator=dice)
    scales[(scales & 0x7F) == 0x7F] = 3
    return codes, scales, torch.rand(rows, generator=dice) * 1e-3


def make_rows(own: LevelFloats, rows: int, columns: int, seed: int) -> CompressedRows:
    raw = join_level_rows(*make_parts(own, rows, columns, seed))
    assert raw.shape == (rows, own.row_bytes(columns))
    return CompressedRows(raw=raw, columns=columns, number_format=own)


def four(code: int) -> float:
    """A sign, two bits of exponent, biased by one, and one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def eight(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def by_hand(own: LevelFloats, rows: int, columns: int, seed: int) -> np.ndarray:
    """Number by number, each step rounded to float32 as it is made."""
    codes, scales, factors = make_parts(own, rows, columns, seed)
    levels = np.array([four(code) for code in range(16)], np.float32)
    if own.levels == "nf4":
        # As bitsandbytes has them: quantiles of a normal distribution, made to reach from -1 to 1.
        normal = torch.distributions.Normal(0.0, 1.0)
        most = 0.9677083
        above = normal.icdf(torch.linspace(most, 0.5, 9)[:-1]).tolist()
        below = (-normal.icdf(torch.linspace(most, 0.5, 8)[:-1])).tolist()
        found = np.array(sorted([*above, 0.0, *below]), np.float64)
        levels = (found / np.abs(found).max()).astype(np.float32)
    if own.levels == "fp4":
        sizes = np.array([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0], np.float32) / np.float32(12)
        levels = np.concatenate([sizes, -sizes])
    groups = scales.numpy().astype(np.float32)
    if factors is not None:
        bytes_ = np.array([eight(code) for code in range(256)], np.float32)
        groups = bytes_[scales.numpy()] * factors.numpy()[:, None]
    wide = np.repeat(groups, own.group_size, axis=1)
    return levels[codes.numpy()] * wide


@settings(deadline=None, max_examples=60)
@given(
    own=st.sampled_from(FORMATS),
    rows=st.integers(1, 70),
    times=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_what_any_bytes_mean(own: LevelFloats, rows: int, times: int, seed: int) -> None:
    columns = 128 * times
    kept, wanted = make_rows(own, rows, columns, seed), by_hand(own, rows, columns, seed)
    reference = torch.full((rows, columns), torch.nan)
    make_levels_plain_reference(kept.raw, own, reference)
    np.testing.assert_allclose(reference.numpy(), wanted, rtol=1e-6, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16):
        expected = torch.empty(rows, columns, dtype=dtype)
        make_levels_plain_reference(kept.raw, own, expected)
        found = torch.full((rows, columns), torch.nan, dtype=dtype)
        dequantise(kept, found)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("own", FORMATS, ids=NAMES)
def test_the_loop_of_any_processor(own: LevelFloats) -> None:
    """Also where another one is used here."""
    kept = make_rows(own, 37, 384, 5)
    rows = level_rows(kept.raw, 384, own)
    for dtype in (torch.float32, torch.bfloat16):
        expected, found = (torch.empty(37, 384, dtype=dtype) for _ in range(2))
        make_levels_plain_reference(kept.raw, own, expected)
        words = found.view(torch.uint16) if dtype is torch.bfloat16 else found
        make_plain(rows, 0, 37, words.numpy().reshape(-1))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 40, 300])
@pytest.mark.parametrize("own", FORMATS, ids=NAMES)
def test_products_are_those_of_plain_rows(
    own: LevelFloats, dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(tokens)
    kept = make_rows(own, 1030, 640, 7)
    x = torch.randn(tokens, 640).to(dtype)
    bias = torch.randn(1030).to(dtype)
    out = torch.empty(tokens, 1030, dtype=dtype)
    scratch = torch.empty(scratch_values(640, dtype), dtype=dtype)
    multiply(x, [Product(rows=kept, out=out, bias=bias)], lambda count: scratch[:count])
    plain = torch.from_numpy(by_hand(own, 1030, 640, 7)).double()
    wanted = x.double() @ plain.t() + bias.double()
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert error < (1e-6 if dtype is torch.float32 else 8e-3)


def test_without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "levels_on_cpu", lambda *_: False)
    monkeypatch.setattr(products, "find_loops", lambda: None)
    kept = make_rows(NVFP4, 70, 192, 3)
    out, x = torch.empty(4, 70), torch.randn(4, 192)
    scratch = torch.empty(scratch_values(192, torch.float32))
    multiply(x, [Product(rows=kept, out=out)], lambda count: scratch[:count])
    torch.testing.assert_close(out, x @ torch.from_numpy(by_hand(NVFP4, 70, 192, 3)).t())


def test_formats_are_known_by_their_names() -> None:
    for own in FORMATS:
        assert find_compressed(own.name) == own
    assert NVFP4.row_bytes(4096) == 4096 // 2 + 4096 // 16 + 4
    assert NVFP4.fits(64) and not NVFP4.fits(32) and not NVFP4.fits(72)
    assert FORMATS[1].fits(64) and not FORMATS[1].fits(96)
    assert not LevelFloats(levels="nf4", group_size=96).fits(192)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("own", FORMATS[:4], ids=NAMES[:4])
def test_few_tokens_meet_levels_that_are_not_rounded(own: LevelFloats, tokens: int) -> None:
    """Where processors multiply pairs: closer than rows in bfloat16 could be."""
    loops = find_loops()
    if loops is None or loops.few_pairs is None:
        pytest.skip("this processor multiplies no pairs")
    torch.manual_seed(tokens)
    kept = make_rows(own, 70, 1344 if own.group_size < 128 else 1408, 7)
    x = torch.randn(tokens, kept.columns).bfloat16()
    out = torch.empty(tokens, 70, dtype=torch.bfloat16)
    if not few_codes_are_for_pairs(x, [Product(rows=kept, out=out)]):
        pytest.skip("so many tokens are too many here")
    multiply_few(x, [Product(rows=kept, out=out)])
    plain = torch.from_numpy(by_hand(own, 70, kept.columns, 7)).double()
    wanted = x.double() @ plain.t()
    # What is left is that results are rounded, and sums in float32.
    limit = wanted.abs() * 2**-8 + wanted.abs().max() * 1e-5
    assert bool(((out.double() - wanted).abs() <= limit).all())


def test_several_matrices_in_one_call() -> None:
    """As experts of few tokens are computed."""
    loops = find_loops()
    if loops is None or loops.few_pairs is None:
        pytest.skip("this processor multiplies no pairs")
    for own in FORMATS[:2]:
        sets = [[(make_rows(own, 40, 192, seed), None)] for seed in (1, 2, 3)]
        several = SeveralRows.of(sets)
        assert several is not None
        x, out = torch.randn(4, 192).bfloat16(), torch.zeros(4, 40, dtype=torch.bfloat16)
        chosen, firsts, counts = (np.array(each) for each in ([2, 0], [0, 3], [3, 1]))
        several.multiply(x, chosen, firsts, counts, [out], [PUTS], are_few=True)
        for seed, rows in ((3, slice(0, 3)), (1, slice(3, 4))):
            plain = torch.from_numpy(by_hand(own, 40, 192, seed))
            torch.testing.assert_close(
                out[rows].float(), x[rows].float() @ plain.t(), rtol=1e-2, atol=1e-3
            )
