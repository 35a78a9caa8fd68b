"""Integer products against numpy bit for bit: codes, exact sums, scales; extremes and shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freight.kernels import integers, threads
from freight.kernels.integers import (
    IntegerRows,
    IntegerTokens,
    integer_product,
    quantise_rows,
    quantise_tokens,
)
from freight.model.number_format import Compression, PerRow, integer_scratch
from freight.quantities import align_up

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["fast", "blocks", "reference"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything with the compiled loops, with those that lay rows in blocks, and without."""
    loops = threads.find_loops()
    assert loops is not None
    with monkeypatch.context() as patch:
        if request.param == "blocks":
            if loops.tile_blocks is None:
                pytest.skip("the processor has no instruction for it")
            patch.setattr(loops.tile_blocks, "FEWEST_TOKENS_OF_INTEGERS", 1)
        if request.param == "reference":
            patch.setattr(threads, "find_loops", lambda: None)
        yield request.param


def oracle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows, by the words of the format."""
    most = np.abs(x).max(1)
    with np.errstate(all="ignore"):
        scale = (most / np.float32(127)).astype(np.float32)
        codes = np.rint(x / np.where(scale > 0, scale, 1)[:, None])
    has_codes = np.isfinite(most) & (most >= 2.0**-119)
    scale = np.where(has_codes, scale, np.where(most < 2.0**-119, 0, np.nan))
    return np.where(has_codes[:, None], codes, 0), scale.astype(np.float32)


def as_integers(x: torch.Tensor) -> IntegerTokens:
    tokens = IntegerTokens(
        codes=torch.full(x.shape, 99, dtype=torch.int8), scales=torch.full((x.shape[0],), 99.0)
    )
    quantise_tokens(x, tokens)
    return tokens


def multiply(
    x: torch.Tensor,
    rows: IntegerRows,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A product, or its sum with what was in ``out``."""
    adds = out is not None
    if out is None:
        out = torch.full((x.shape[0], rows.shape[0]), 99.0, dtype=x.dtype)
    sums = torch.empty(integer_scratch(*out.shape, rows.columns), dtype=torch.int32)
    integer_product(as_integers(x), rows, bias, out, sums, adds=adds)
    return out


def as_rows(w: torch.Tensor) -> IntegerRows:
    return IntegerRows(raw=quantise_rows(w), columns=w.shape[1])


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_codes_and_scales_are_those_of_numpy(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 9)))
    x = torch.from_numpy(data.draw(arrays(np.float32, shape, elements=FLOATS))).to(dtype)
    codes, scales = oracle(x.float().numpy())
    found = as_integers(x)
    assert np.array_equal(found.codes.numpy(), codes)
    assert np.array_equal(found.scales.numpy(), scales, equal_nan=True)
    if shape[1] % 4 == 0:
        rows = as_rows(x)
        assert rows.raw.shape[1] == PerRow().row_bytes(shape[1])
        assert np.array_equal(rows.codes.numpy(), codes)
        assert np.array_equal(rows.scales.numpy(), scales, equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.one_of(st.integers(0, 40), st.sampled_from([100, 511, 700])),
    rows=st.integers(1, 140),
    columns=st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 48, 160, 272, 528])),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1e-30, 1.0, 1e4]),
    has_bias=st.booleans(),
    adds=st.booleans(),
    begin=st.sampled_from([0, 3]),
)
def test_products_are_those_of_numpy_bit_for_bit(
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    seed: int,
    spread: float,
    has_bias: bool,
    adds: bool,
    begin: int,
) -> None:
    """The sums exact in 32 bits, scaled in float32 in one order, rounded once at the end; rows and
    results may lie in larger buffers, where cache lines begin or elsewhere."""
    dice = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, 4 * columns + 3, generator=dice) * spread).to(dtype)[:, 2:-1]
    w = as_rows(torch.randn(rows, 4 * columns, generator=dice))
    larger = torch.full((rows + 1, 4 * columns + 4), 7, dtype=torch.uint8)
    larger[1:] = w.raw
    bias = torch.randn(rows, generator=dice).to(dtype) if has_bias else None
    before = torch.randn(tokens, align_up(rows + 5, 32), generator=dice).to(dtype)
    end = begin + rows
    out = before.clone()
    sums = torch.empty(integer_scratch(tokens, rows, 4 * columns), dtype=torch.int32)
    own = IntegerRows(raw=larger[1:], columns=4 * columns)
    integer_product(as_integers(x), own, bias, out[:, begin:end], sums, adds=adds)

    codes, scales = oracle(x.float().numpy()) if tokens else (np.zeros((0, 4 * columns)),) * 2
    w_codes, w_scales = w.codes.numpy().astype(np.int32), w.scales.numpy()
    values = (codes.astype(np.int32) @ w_codes.T).astype(np.float32)
    values = values * scales.reshape(-1, 1)[:tokens].astype(np.float32) * w_scales
    values = values if bias is None else values + bias.float().numpy()
    was = before[:, begin:end].float().numpy()
    wanted = torch.from_numpy(values + was if adds else values).to(dtype)
    assert torch.equal(out[:, begin:end], wanted)
    assert torch.equal(out[:, :begin], before[:, :begin])
    assert torch.equal(out[:, end:], before[:, end:])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_are_exact(sign: int) -> None:
    """Every code at its end, in the longest rows that there are."""
    columns = 133_144
    assert Compression(bits=8, group_size=None).fit(8, columns) == PerRow()
    assert Compression(bits=8, group_size=None).fit(8, columns + 4) is None
    x, w = torch.full((3, columns), 127.0), sign * torch.full((2, columns), 127.0)
    assert (
        multiply(x, as_rows(w)).tolist() == [[float(sign * np.float32(127**2 * columns))] * 2] * 3
    )


def test_many_tokens_and_rows_come_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator().manual_seed(0)
    x, w = torch.randn(70, 32, generator=dice), as_rows(torch.randn(90, 32, generator=dice))
    whole = multiply(x, w)
    monkeypatch.setattr(integers, "SUMS", 333)
    monkeypatch.setattr(integers, "_MOST_TOKENS", 23)
    assert len(list(integers._tiles(70, 90))) > 12
    assert torch.equal(multiply(x, w), whole)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES), cut=st.integers(1, 39))
def test_a_token_is_alone(seed: int, dtype: torch.dtype, cut: int) -> None:
    """Its results are the same bit for bit beside any others, and from rows cut anywhere."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 64, generator=dice).to(dtype)
    w = as_rows(torch.randn(50, 64, generator=dice))
    whole = multiply(x, w)
    x[cut] *= 1000
    assert torch.equal(multiply(x[:cut], w), whole[:cut])
    assert torch.equal(multiply(x, w)[:cut], whole[:cut])
    parts = [IntegerRows(raw=raw, columns=64) for raw in (w.raw[:cut], w.raw[cut:])]
    assert torch.equal(torch.cat([multiply(x[:cut], own) for own in parts], 1), whole[:cut])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_token(dtype: torch.dtype, value: float) -> None:
    x, w = torch.randn(33, 64).to(dtype), as_rows(torch.randn(5, 64))
    clean = multiply(x, w, out=torch.ones(33, 5, dtype=dtype))
    x[7, 3] = value
    found = multiply(x, w, out=torch.ones(33, 5, dtype=dtype))
    assert found[7].isnan().all()
    others = [i for i in range(33) if i != 7]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_tiny_values_are_zero(dtype: torch.dtype) -> None:
    x, w = torch.zeros(3, 8, dtype=dtype), as_rows(torch.eye(8))
    x[1], x[2] = 1e-38, 1e-35
    bias = torch.arange(8).to(dtype)
    assert torch.equal(multiply(x, w, bias)[:2], bias.expand(2, 8))
    assert multiply(x, w)[2].gt(0.9e-35).all()
    zeros = as_rows(torch.zeros(4, 8))
    assert torch.equal(multiply(torch.ones(2, 8, dtype=dtype), zeros), torch.zeros(2, 4).to(dtype))


def test_an_outlier_takes_the_others_with_it() -> None:
    """What the format can and cannot do: a value is off by half of its token's scale at most."""
    x = torch.randn(5, 64)
    x[2, 9] = 4000.0
    found = as_integers(x)
    error = (found.codes.float() * found.scales[:, None] - x).abs().amax(1)
    assert (error <= 0.5 * found.scales * (1 + 1e-5)).all()
    assert found.codes[2].abs().sum() == 127  # nothing is left of the others
