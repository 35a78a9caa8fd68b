"""Quantising and back against numpy bit for bit, within the bound, on all extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freight.kernels import threads
from freight.kernels.grouped import (
    CompressedRows,
    dequantise,
    dequantise_reference,
    quantise,
    small_product,
)
from freight.model.number_format import BITS, GROUP_SIZES, Grouped
from freight.quantities import align_up

FORMATS = [
    Grouped(bits=bits, group_size=size, across=across)
    for bits in BITS
    for size in GROUP_SIZES
    for across in (False, True)
]


def shape(own: Grouped, groups: int, others: int) -> tuple[int, int]:
    """Of a matrix with so many groups along their dim, and about so much of the other one."""
    if not own.across:
        return others, groups * own.group_size
    # A row's part of the scales and minima, in whole bytes.
    return groups * own.group_size, align_up(others, own.group_size // 4)


def oracle(x: np.ndarray, own: Grouped) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, minima), [rows, groups, ...]; across rows of the turned matrix."""
    x = x.T if own.across else x
    wide = np.nan_to_num(x.astype(np.float32), nan=0.0, posinf=65504.0, neginf=-65504.0)
    groups = wide.clip(-65504, 65504).reshape(x.shape[0], -1, own.group_size)
    lowest = groups.min(-1, keepdims=True).astype(np.float16)
    span = np.maximum(groups.max(-1, keepdims=True) - lowest.astype(np.float32), 0)
    scale = (span / np.float32(own.levels)).astype(np.float16)
    step = scale.astype(np.float32)
    codes = np.rint((groups - lowest.astype(np.float32)) / np.where(step > 0, step, 1))
    return np.where(step > 0, codes.clip(0, own.levels), 0), scale, lowest


def unpack(raw: np.ndarray, columns: int, own: Grouped) -> tuple[np.ndarray, ...]:
    """The same by the format's own words: byte j has values j and j + half."""
    if own.across:
        lines = raw.reshape(raw.shape[0] // own.group_size, -1)
        border = columns * own.group_size * own.code_bits // 8
        packed = lines[:, :border].reshape(len(lines), -1, columns).transpose(2, 0, 1)
        codes = np.concatenate([packed & 15, packed >> 4], -1) if own.bits < 8 else packed
        halves = lines[:, border:].copy().view(np.float16).T
        return codes, halves[:columns, :, None], halves[columns:, :, None]
    border, groups = own.code_bytes(columns), columns // own.group_size
    packed = raw[:, :border].reshape(raw.shape[0], groups, -1)
    codes = np.concatenate([packed & 15, packed >> 4], -1) if own.bits < 8 else packed
    halves = raw[:, border:].copy().view(np.float16)
    return codes, halves[:, :groups, None], halves[:, groups:, None]


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), own=st.sampled_from(FORMATS))
def test_codes_are_those_of_numpy(data: st.DataObject, own: Grouped) -> None:
    rows, columns = shape(own, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)))
    x = data.draw(arrays(np.float32, (rows, columns), elements=FLOATS))
    raw = quantise(torch.from_numpy(x), own).numpy()
    assert raw.shape == (rows, own.row_bytes(columns))
    for found, wanted in zip(unpack(raw, columns, own), oracle(x, own), strict=True):
        assert np.array_equal(found.astype(np.float32), wanted.astype(np.float32))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), own=st.sampled_from(FORMATS))
def test_no_value_is_further_off_than_half_a_step(data: st.DataObject, own: Grouped) -> None:
    elements = st.floats(-1000, 1000, width=32)
    x = data.draw(arrays(np.float32, shape(own, 2, 3), elements=elements))
    rows = CompressedRows(
        raw=quantise(torch.from_numpy(x), own), columns=x.shape[1], number_format=own
    )
    out = torch.empty(x.shape)
    dequantise_reference(rows, out)
    found = out.numpy()
    x, found = (x.T, found.T) if own.across else (x, found)
    groups = x.reshape(len(x), -1, own.group_size)
    lowest, highest = groups.min(-1), groups.max(-1)
    step = (highest - lowest) / own.levels
    # Scale and minimum are rounded to float16, relatively by 2^-11, or absolutely near 0.
    rounding = own.levels * (step * 2**-11 + 2**-25) + np.abs(lowest) * 2**-11 + 2**-25
    error = np.abs(found.reshape(groups.shape) - groups).max(-1)
    assert (error <= step / 2 + 1.5 * rounding + 1e-6).all()


@settings(deadline=None, max_examples=60)
@given(
    own=st.sampled_from(FORMATS),
    others=st.integers(1, 70),
    groups=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 3e4]),
)
def test_fast_loops_are_the_reference(
    own: Grouped, others: int, groups: int, dtype: torch.dtype, seed: int, spread: float
) -> None:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(shape(own, groups, others), generator=dice) * spread
    before = own.rows_together  # rows need not begin where a buffer does
    raw = torch.empty(len(x) + before, own.row_bytes(x.shape[1]), dtype=torch.uint8)
    raw[before:] = quantise(x, own)
    compressed = CompressedRows(raw=raw[before:], columns=x.shape[1], number_format=own)
    wanted, found = torch.empty(x.shape, dtype=dtype), torch.zeros(x.shape, dtype=dtype)
    dequantise_reference(compressed, wanted)
    dequantise(compressed, found)
    assert torch.equal(found, wanted)


def test_constant_groups_keep_their_value() -> None:
    own = Grouped(bits=4, group_size=64)
    x = torch.full((2, 128), 0.75)
    out = torch.empty(x.shape)
    dequantise(CompressedRows(raw=quantise(x, own), columns=128, number_format=own), out)
    assert torch.equal(out, x)


def test_without_numba_the_reference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Grouped(bits=4, group_size=32)
    rows = CompressedRows(raw=quantise(torch.randn(4, 64), own), columns=64, number_format=own)
    fast, slow = torch.empty(4, 64), torch.empty(4, 64)
    dequantise(rows, fast)
    assert threads.find_loops() is not None
    calls: list[Any] = []
    monkeypatch.setattr(threads, "find_loops", lambda: calls.append(1))
    dequantise(rows, slow)
    assert calls and torch.equal(fast, slow)


@settings(deadline=None, max_examples=60)
@given(
    own=st.sampled_from([own for own in FORMATS if own.across]),
    others=st.integers(1, 70),
    groups=st.integers(1, 5),
    tokens=st.integers(1, 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_small_products_are_those_of_the_plain_rows(
    own: Grouped, others: int, groups: int, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    dice = torch.Generator().manual_seed(seed)
    rows, columns = shape(own, groups, align_up(others, 16) if own.across else others)
    weights = CompressedRows(
        raw=quantise(torch.randn(rows, columns, generator=dice), own),
        columns=columns,
        number_format=own,
    )
    x = torch.randn(tokens, columns, generator=dice).to(dtype)
    plain = torch.empty(rows, columns)
    dequantise_reference(weights, plain)
    found = small_product(x, weights)
    assert found is not None
    torch.testing.assert_close(found, x.float() @ plain.t(), rtol=1e-4, atol=1e-4)
    assert small_product(torch.randn(17, columns), weights) is None
