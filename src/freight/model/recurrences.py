"""The steps of layers that keep a state, as functions of tensors."""

from __future__ import annotations

from freight.kernels.recurrence import DeltaHeads, apply_delta_rule
from freight.kernels.recurrence import convolve as convolve_rows
from freight.model.frame import Frame
from freight.model.recurrent_steps import Convolve, Deal, DeltaRule

__all__ = ["apply_delta", "convolve", "deal"]


def deal(step: Deal, frame: Frame) -> None:
    x = frame.values[step.x]
    groups = x.view(len(x), step.num_groups, -1)
    for part in step.parts:
        own = frame.new(part.out, x, part.num_columns)
        columns = slice(part.first, part.first + step.num_groups * part.width)
        target = own[:, columns].view(len(x), step.num_groups, part.width)
        target.copy_(groups[..., part.begin : part.begin + part.width])


def convolve(step: Convolve, frame: Frame) -> None:
    weight = frame.vector(step.weight).view(-1, step.width)
    for states in frame.states:
        for seat, columns, _ in states.beginnings:
            states.columns[seat].copy_(columns)
        convolve_rows(frame.values[step.x], weight, states.columns, states.rows)


def apply_delta(step: DeltaRule, frame: Frame) -> None:
    x = frame.values[step.x]
    out = frame.new(step.out, x, step.num_heads * step.value_width)
    heads = DeltaHeads(
        num_key_heads=step.num_key_heads,
        num_heads=step.num_heads,
        key_width=step.key_width,
        value_width=step.value_width,
    )
    for states in frame.states:
        for seat, _, memory in states.beginnings:
            states.memory[seat].copy_(memory)
        apply_delta_rule(
            x,
            frame.values[step.a],
            frame.values[step.b],
            frame.vector(step.decay),
            frame.vector(step.bias),
            states.memory,
            out,
            heads=heads,
            rows=states.rows,
        )
