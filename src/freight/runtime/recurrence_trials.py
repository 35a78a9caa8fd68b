"""What kernels of recurrences are tried with on a device, with the sizes of a model's own steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from freight.kernels.recurrence import convolve, recur
from freight.kernels.row_states import RowStates
from freight.model.recurrences import heads_of
from freight.model.recurrent_steps import Convolve, DeltaRule, Scan
from freight.runtime.trial_numbers import Trial, trial_numbers

__all__ = ["convolution_trial", "recurrence_trial"]


def _states() -> RowStates:
    """A row that goes on, and two that begin: of several tokens, and of one."""
    return RowStates(
        starts=np.array([0, 5, 6]),
        counts=np.array([5, 1, 1]),
        seats=np.array([2, 0, 3]),
        is_new=np.array([0, 1, 0]),
    )


def convolution_trial(step: Convolve, device: torch.device, dtype: torch.dtype) -> Trial:
    def trial() -> Iterator[torch.Tensor]:
        width = step.num_columns
        x = trial_numbers(7, width, device=device, dtype=dtype)
        weight = trial_numbers(width, step.width, device=device, dtype=dtype)
        columns = trial_numbers(4, step.width - 1, width, device=device, dtype=dtype)
        bias = None if step.bias is None else weight[:, 0].contiguous()
        convolve(x, weight, bias, columns, _states())
        yield from (x, columns)

    return trial


def recurrence_trial(step: DeltaRule | Scan, device: torch.device, dtype: torch.dtype) -> Trial:
    def trial() -> Iterator[torch.Tensor]:
        heads = heads_of(step)
        values = heads.num_heads * heads.value_width
        columns = 2 * heads.num_key_heads * heads.key_width + values
        x = trial_numbers(7, columns, device=device, dtype=dtype)
        rates = heads.num_heads * (heads.key_width if heads.by_row else 1)
        a = trial_numbers(7, rates, device=device, dtype=dtype)
        bias = trial_numbers(rates, device=device, dtype=torch.float32)
        decay = trial_numbers(heads.num_heads, device=device, dtype=torch.float32)
        shape = (4, heads.num_heads, heads.key_width, heads.value_width)
        memory = trial_numbers(*shape, device=device, dtype=torch.float32)
        out = torch.zeros(7, values, device=device, dtype=dtype)
        is_delta = isinstance(step, DeltaRule)
        recur(
            x,
            a,
            a[:, : heads.num_heads].flip(0) if is_delta else None,
            decay,
            bias.flip(0),
            None if is_delta else decay * 2,
            memory,
            out,
            heads=heads,
            rows=_states(),
        )
        yield from (out, memory)

    return trial
