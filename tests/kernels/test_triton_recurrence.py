"""Triton's convolutions, gated delta rule and scans against torch's steps: what is found, and
states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels import recurrence
from freight.kernels.cuda.choice import NO_KERNELS
from freight.kernels.recurrence import convolve, recur

from .test_recurrence import KINDS, heads_of, made, ragged, rows_of, tolerance
from .triton_bed import DEVICE, EXAMPLES, in_use, loaded

dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def without_loops() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(recurrence, "find_loops", lambda: None)
    return patch


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    case=ragged(),
    taps=st.sampled_from([2, 3, 4, 5]),
    num_columns=st.sampled_from([1, 48, 130]),
    dtype=dtypes,
)
def test_convolutions(case: Any, taps: int, num_columns: int, dtype: torch.dtype) -> None:
    counts, is_new, seats, seed = case
    dice = torch.Generator().manual_seed(seed)
    rows = rows_of(counts, is_new, seats)
    x = torch.randn(sum(counts), num_columns, generator=dice).to(dtype)
    weight = torch.randn(num_columns, taps, generator=dice).to(dtype)
    bias = torch.randn(num_columns, generator=dice).to(dtype) if seed % 2 else None
    columns = torch.randn(len(counts) + 2, taps - 1, num_columns, generator=dice).to(dtype)
    found = [own.to(DEVICE).clone() for own in (x, columns)]
    with in_use(loaded()):
        own = None if bias is None else bias.to(DEVICE)
        convolve(found[0], weight.to(DEVICE), own, found[1], rows)
    patch = without_loops()
    with in_use(NO_KERNELS):
        convolve(x, weight, bias, columns, rows)
    patch.undo()
    torch.testing.assert_close(found[0].cpu(), x, **tolerance(dtype))
    assert torch.equal(found[1].cpu(), columns)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    case=ragged(),
    shape=st.sampled_from([(1, 1, 16, 16), (2, 4, 16, 32), (2, 2, 24, 40), (1, 3, 8, 80)]),
    dtype=dtypes,
    kind=KINDS,
)
def test_states(case: Any, shape: tuple[int, int, int, int], dtype: torch.dtype, kind: str) -> None:
    counts, is_new, seats, seed = case
    _, N, _, U = shape
    heads, is_scan = heads_of(kind, shape), kind == "scan"
    rows = rows_of(counts, is_new, seats)
    x, a, strength, decay, bias, memory = made(counts, heads, dtype, seed)
    b, skip = (None, decay * 2) if is_scan else (strength, None)
    out = torch.zeros(len(x), N * U, dtype=dtype)
    given = (x, a, b, decay, bias, skip, memory, out)
    on_device = [None if own is None else own.to(DEVICE).clone() for own in given]
    with in_use(loaded()):
        recur(*on_device, heads=heads, rows=rows)
    patch = without_loops()
    with in_use(NO_KERNELS):
        recur(*given, heads=heads, rows=rows)
    patch.undo()
    found, states = on_device[7], on_device[6]
    assert found is not None and states is not None
    close = tolerance(dtype)
    close["atol"] *= max(1.0, float(out.abs().max()))
    torch.testing.assert_close(found.cpu(), out, **close)
    torch.testing.assert_close(states.cpu(), memory, atol=1e-4, rtol=1e-4)
