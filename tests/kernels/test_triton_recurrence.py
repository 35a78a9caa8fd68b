"""Triton's convolutions and gated delta rule against torch's steps: what is found, and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels import recurrence
from freight.kernels.cuda.choice import NO_KERNELS
from freight.kernels.recurrence import DeltaHeads, apply_delta_rule, convolve

from .test_recurrence import made, ragged, rows_of, tolerance
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
    columns = torch.randn(len(counts) + 2, taps - 1, num_columns, generator=dice).to(dtype)
    found = [own.to(DEVICE).clone() for own in (x, columns)]
    with in_use(loaded()):
        convolve(found[0], weight.to(DEVICE), found[1], rows)
    patch = without_loops()
    with in_use(NO_KERNELS):
        convolve(x, weight, columns, rows)
    patch.undo()
    torch.testing.assert_close(found[0].cpu(), x, **tolerance(dtype))
    assert torch.equal(found[1].cpu(), columns)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    case=ragged(),
    shape=st.sampled_from([(1, 1, 16, 16), (2, 4, 16, 32), (2, 2, 24, 40), (1, 3, 8, 80)]),
    dtype=dtypes,
)
def test_the_gated_delta_rule(
    case: Any, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    counts, is_new, seats, seed = case
    K, N, W, U = shape
    heads = DeltaHeads(num_key_heads=K, num_heads=N, key_width=W, value_width=U)
    rows = rows_of(counts, is_new, seats)
    x, a, b, decay, bias, memory = made(counts, heads, dtype, seed)
    out = torch.zeros(len(x), N * U, dtype=dtype)
    on_device = [own.to(DEVICE).clone() for own in (x, a, b, decay, bias, memory, out)]
    with in_use(loaded()):
        apply_delta_rule(*on_device, heads=heads, rows=rows)
    patch = without_loops()
    with in_use(NO_KERNELS):
        apply_delta_rule(x, a, b, decay, bias, memory, out, heads=heads, rows=rows)
    patch.undo()
    torch.testing.assert_close(on_device[6].cpu(), out, **tolerance(dtype))
    torch.testing.assert_close(on_device[5].cpu(), memory, atol=1e-4, rtol=1e-4)
