"""Steps that change a value number by number, or head by head, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F

from freight.kernels.tokens import activate
from freight.model.expert_steps import Clear
from freight.model.frame import Frame
from freight.model.value_steps import (
    Activate,
    Add,
    AddPositions,
    Cap,
    Clip,
    Gate,
    Grow,
    GrowHeads,
    Level,
    Multiply,
    MultiplyColumns,
    Scale,
    ScaleBy,
    Xielu,
)

__all__ = ["VALUE_STEPS"]


def _level(step: Level, frame: Frame) -> None:
    x = frame.values[step.x].view(frame.values[step.x].shape[0], step.num_heads, -1)
    with frame.workspace.frame():
        wide = frame.workspace.take(*x.shape, dtype=torch.float32)
        sizes = torch.linalg.vector_norm(wide.copy_(x), dim=-1, keepdim=True)
        x.copy_(wide.mul_(sizes.square_().div_(x.shape[-1]).add_(step.eps).rsqrt_()))


def _activate(step: Activate, frame: Frame) -> None:
    activate(frame.values[step.x], step.function)


def _xielu(step: Xielu, frame: Frame) -> None:
    x = frame.values[step.x]
    positive, negative = (F.softplus(frame.vector(own)) for own in (step.positive, step.negative))
    with frame.workspace.frame():
        wide, high, low = (frame.workspace.take(*x.shape, dtype=torch.float32) for _ in range(3))
        above = frame.workspace.take(*x.shape, dtype=torch.bool)
        torch.gt(wide.copy_(x), 0.0, out=above)
        torch.square(wide, out=high).mul_(positive)
        torch.clamp(wide, max=-1e-6, out=low).expm1_().sub_(wide).mul_(negative.add_(0.5))
        x.copy_(torch.where(above, high, low, out=high).add_(wide, alpha=0.5))


def _gate(step: Gate, frame: Frame) -> None:
    x, y = frame.values[step.x], frame.values[step.y]
    with frame.workspace.frame():
        share = frame.workspace.take(*x.shape, dtype=x.dtype)
        torch.mul(x.clamp_(max=step.limit), step.slope, out=share)
        x.mul_(share.sigmoid_())
    x.mul_(y.clamp_(-step.limit, step.limit).add_(1.0))


def _multiply(step: Multiply, frame: Frame) -> None:
    frame.values[step.x].mul_(frame.values[step.y])


def _multiply_columns(step: MultiplyColumns, frame: Frame) -> None:
    x = frame.values[step.x]
    x.mul_(frame.values[step.y][:, step.first : step.first + x.shape[1]])


def _add(step: Add, frame: Frame) -> None:
    frame.values[step.x].add_(frame.values[step.y])


def _scale(step: Scale, frame: Frame) -> None:
    x = frame.values[step.x]
    end = None if step.num_columns is None else step.first + step.num_columns
    x[:, step.first : end].mul_(torch.tensor(step.factor, dtype=x.dtype).item())


def _scale_by(step: ScaleBy, frame: Frame) -> None:
    frame.values[step.x].mul_(frame.vector(step.weight))


def _grow(step: Grow, frame: Frame) -> None:
    x = frame.values[step.x]
    assert frame.positions is not None
    times = frame.positions.div(step.span, rounding_mode="floor").float().log1p_()
    x.mul_(times.mul_(step.rate).add_(1.0).to(x.dtype)[:, None])


def _grow_heads(step: GrowHeads, frame: Frame) -> None:
    x = frame.values[step.x]
    assert frame.positions is not None
    rate, bias = (frame.vector(own).to(x.dtype) for own in (step.rate, step.bias))
    times = frame.positions.float().log1p_().to(x.dtype)
    x.view(len(x), step.num_heads, -1).mul_(torch.outer(times, rate).add_(bias)[:, :, None])


def _clear(step: Clear, frame: Frame) -> None:
    frame.values[step.x].zero_()


def _add_positions(step: AddPositions, frame: Frame) -> None:
    x = frame.values[step.x]
    assert frame.positions is not None
    table = frame.weights[step.weight.name][0][1]
    assert isinstance(table, torch.Tensor)
    with frame.workspace.frame():
        rows = frame.workspace.take(*x.shape, dtype=x.dtype)
        torch.index_select(table, 0, frame.positions + step.offset, out=rows)
        x.add_(rows)


def _cap(step: Cap, frame: Frame) -> None:
    frame.values[step.x].div_(step.limit).tanh_().mul_(step.limit)


def _clip(step: Clip, frame: Frame) -> None:
    least = None if step.is_top else -step.limit
    frame.values[step.x].clamp_(least, step.limit)


VALUE_STEPS: Final[Mapping[type, Callable[[Any, Frame], None]]] = {
    Activate: _activate,
    Add: _add,
    AddPositions: _add_positions,
    Cap: _cap,
    Clear: _clear,
    Clip: _clip,
    Gate: _gate,
    Grow: _grow,
    GrowHeads: _grow_heads,
    Level: _level,
    Multiply: _multiply,
    MultiplyColumns: _multiply_columns,
    Scale: _scale,
    ScaleBy: _scale_by,
    Xielu: _xielu,
}
