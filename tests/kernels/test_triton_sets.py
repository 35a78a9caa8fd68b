"""Triton's kernel for several sets of tokens, each with rows of its own, against a product of each
by torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.cuda.choice import NO_KERNELS
from freight.kernels.device_rows import DeviceRows
from freight.kernels.sums import ADDS, PUTS
from freight.model.tiles import TOKENS_OF_A_LAUNCH

from .triton_bed import DEVICE, EXAMPLES, ON_DEVICE, in_use, loaded

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype, dice: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=dice).to(DEVICE, dtype)


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    heights=st.lists(st.integers(1, 150), min_size=1, max_size=2),
    columns=st.sampled_from([8, 64, 200]),
    counts=st.lists(st.integers(1, TOKENS_OF_A_LAUNCH), min_size=1, max_size=4),
    dtype=st.sampled_from(FLOATS),
    has_bias=st.booleans(),
    outcome=st.sampled_from([PUTS, ADDS]),
    seed=st.integers(0, 99),
)
def test_each_set_by_its_rows(
    heights: list[int],
    columns: int,
    counts: list[int],
    dtype: torch.dtype,
    has_bias: bool,
    outcome: int,
    seed: int,
) -> None:
    """Of some of the sets, in any order; tokens of nobody, and columns beside, are left alone."""
    dice = torch.Generator().manual_seed(seed)
    columns = 4 * columns if dtype is torch.float32 else columns
    sets = [
        [
            (
                numbers(height, columns, dtype=dtype, dice=dice),
                numbers(height, dtype=dtype, dice=dice) if has_bias else None,
            )
            for height in heights
        ]
        for _ in range(len(counts) + 1)
    ]
    chosen = torch.randperm(len(sets), generator=dice)[: len(counts)].numpy()
    num_tokens = np.array(counts)
    firsts = np.cumsum(num_tokens + 1) - num_tokens
    total = int(firsts[-1] + num_tokens[-1]) + 1
    x = numbers(total, columns + 8, dtype=dtype, dice=dice)[:, :columns]
    outs = [numbers(total, height + 3, dtype=dtype, dice=dice) for height in heights]
    before = [own.clone() for own in outs]
    with in_use(loaded()):
        rows = DeviceRows.of(sets)
        assert rows is not None
        targets = [own[:, :-3] for own in outs]
        assert rows.takes(x, targets) and not rows.takes(x.double(), targets)
        rows.multiply(x, chosen, firsts, num_tokens, targets, [outcome] * len(heights))
    for matrix, (found, own) in enumerate(zip(outs, before, strict=True)):
        for number, first, count in zip(chosen, firsts, counts, strict=True):
            weight, bias = sets[number][matrix]
            some, height = slice(first, first + count), len(weight)
            wanted = x[some].float() @ weight.float().t()
            if bias is not None:
                wanted += bias.float()
            if outcome == ADDS:
                wanted += own[some, :height].float()
            own[some, :height] = wanted.to(dtype)
        rtol = TOLERANCES[dtype]
        torch.testing.assert_close(found, own, rtol=rtol, atol=rtol * columns**0.5)


def test_only_rows_that_it_takes() -> None:
    dice = torch.Generator().manual_seed(0)
    rows = numbers(4, 64, dtype=torch.float32, dice=dice)
    bias = numbers(4, dtype=torch.float32, dice=dice)
    with in_use(loaded()):
        assert DeviceRows.of([[(rows, None)], [(rows, None)]]) is not None
        assert DeviceRows.of([[(rows, None)], [(rows[:2], None)]]) is None
        assert DeviceRows.of([[(rows, None)], [(rows, bias)]]) is None
        assert DeviceRows.of([[(rows, bias.double())]]) is None
        assert DeviceRows.of([[(rows, None)], [(rows.half(), None)]]) is None
        assert DeviceRows.of([[(rows[::2], None)]]) is None
        assert DeviceRows.of([[(rows.flatten()[2:-62].view(3, 64), None)]]) is None  # no 16 bytes
    with in_use(NO_KERNELS):
        assert DeviceRows.of([[(rows, None)]]) is None
    with in_use(replace(NO_KERNELS, multiply=loaded().multiply)):
        assert DeviceRows.of([[(rows, None)]]) is None


@pytest.mark.skipif(not ON_DEVICE, reason="an interpreter has no time to compare")
def test_on_a_device_wide_experts() -> None:
    """Rows of a model's own sizes."""
    dice = torch.Generator().manual_seed(0)
    sets = [[(numbers(768, 2048, dtype=torch.bfloat16, dice=dice), None)] for _ in range(32)]
    x = numbers(32 * 3, 2048, dtype=torch.bfloat16, dice=dice)
    out = torch.empty(32 * 3, 768, dtype=torch.bfloat16, device=DEVICE)
    with in_use(loaded()):
        rows = DeviceRows.of(sets)
        assert rows is not None
        which = np.arange(32)
        rows.multiply(x, which, 3 * which, np.full(32, 3), [out], [PUTS])
    wanted = torch.cat([x[3 * i : 3 * i + 3] @ own[0][0].t() for i, own in enumerate(sets)])
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-1)
