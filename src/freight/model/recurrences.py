"""The steps of layers that keep a state, as functions of tensors."""

from __future__ import annotations

import torch

from freight.kernels.recurrence import convolve as convolve_rows
from freight.kernels.recurrence import recur
from freight.kernels.state_heads import StateHeads
from freight.model.frame import Frame
from freight.model.recurrent_steps import Convolve, Deal, DeltaRule, Scan

__all__ = ["convolve", "deal", "heads_of", "recur_by_state"]


def deal(step: Deal, frame: Frame) -> None:
    x = frame.values[step.x]
    groups = x.view(len(x), step.num_groups, -1)
    for part in step.parts:
        own = frame.new(part.out, x, part.num_columns)
        columns = slice(part.first, part.first + step.num_groups * part.width)
        target = own[:, columns].view(len(x), step.num_groups, part.width)
        target.copy_(groups[..., part.begin : part.begin + part.width])


def convolve(step: Convolve, frame: Frame) -> None:
    parts = [frame.vector(own).view(-1, step.width) for own in step.weights]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    bias = None if step.bias is None else frame.vector(step.bias)
    for states in frame.states:
        for seat, columns, _ in states.beginnings:
            states.columns[seat].copy_(columns)
        convolve_rows(frame.values[step.x], weight, bias, states.columns, states.rows)


def heads_of(step: DeltaRule | Scan) -> StateHeads:
    return StateHeads(
        num_key_heads=step.num_key_heads,
        num_heads=step.num_heads,
        key_width=step.key_width,
        value_width=step.value_width,
        strength=step.strength if isinstance(step, DeltaRule) else 1.0,
        by_row=isinstance(step, DeltaRule) and step.by_row,
        bound=step.bound if isinstance(step, DeltaRule) else None,
    )


def recur_by_state(step: DeltaRule | Scan, frame: Frame) -> None:
    x = frame.values[step.x]
    out = frame.new(step.out, x, step.num_heads * step.value_width)
    for states in frame.states:
        for seat, _, memory in states.beginnings:
            states.memory[seat].copy_(memory)
        recur(
            x,
            frame.values[step.a],
            frame.values[step.b] if isinstance(step, DeltaRule) else None,
            frame.vector(step.decay),
            frame.vector(step.bias),
            None if isinstance(step, DeltaRule) else frame.vector(step.skip),
            states.memory,
            out,
            heads=heads_of(step),
            rows=states.rows,
        )
