"""The programme's steps as functions of tensors.

``run_unit`` interprets a unit for some rows of a micro-batch. Weights come as parts (rows of the
matrix) on the compute device; which tier brought them, and when, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F

from freight.model.attention import KVView, append, attend
from freight.model.programme import (
    Activate,
    Add,
    Attend,
    Embed,
    Multiply,
    Norm,
    Project,
    Rotate,
    Unit,
)
from freight.model.workspace import Workspace

__all__ = ["Frame", "WeightParts", "run_unit"]

WeightParts = Sequence[tuple[int, torch.Tensor]]
"""A weight on the compute device: (first row, rows [n, columns]), in order, without gaps."""


@dataclass(kw_only=True, slots=True)
class Frame:
    """What the steps of one unit see: values by name, and where the rows' keys are.

    ``values["x"]`` [T, D] is the residual stream and is updated in place. ``cos`` and ``sin``
    [T, rotary/2] are in the compute dtype. ``kv`` pairs pools with the views that index them.
    """

    weights: Mapping[str, WeightParts]
    workspace: Workspace
    values: dict[str, torch.Tensor]
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    kv: Sequence[tuple[torch.Tensor, KVView]] = field(default_factory=tuple)

    def new(self, name: str, num_columns: int) -> torch.Tensor:
        """A value of as many rows as x, in the workspace unless the caller has provided it."""
        if name not in self.values:
            x = self.values["x"]
            self.values[name] = self.workspace.take(x.shape[0], num_columns, dtype=x.dtype)
        return self.values[name]


def run_unit(unit: Unit, frame: Frame) -> None:
    """Run all steps of a unit; embedding rows are gathered by the caller, who knows the tiers."""
    with frame.workspace.frame():
        for step in unit.steps:
            _STEPS[type(step)](step, frame)


def _norm(step: Norm, frame: Frame) -> None:
    x = frame.values[step.x]
    out = frame.new(step.out, x.shape[1])
    gain = frame.weights[step.weight.name][0][1].view(-1)
    with frame.workspace.frame():
        wide = frame.workspace.take(*x.shape, dtype=torch.float32)
        wide.copy_(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[1]).add_(step.eps).rsqrt_()
        wide.mul_(scale)
        out.copy_(wide)
    out.mul_(gain)


def _project(step: Project, frame: Frame) -> None:
    x = frame.values[step.x]
    out = frame.new(step.out, step.weight.num_rows)
    bias = None if step.bias is None else frame.weights[step.bias.name][0][1].view(-1)
    for first, rows in frame.weights[step.weight.name]:
        columns = slice(first, first + rows.shape[0])
        if bias is None:
            torch.mm(x, rows.t(), out=out[:, columns])
        else:
            torch.addmm(bias[columns], x, rows.t(), out=out[:, columns])


def _rotate(step: Rotate, frame: Frame) -> None:
    x = frame.values[step.x]
    assert frame.cos is not None and frame.sin is not None
    half = frame.cos.shape[1]
    cos, sin = frame.cos[:, None, :], frame.sin[:, None, :]
    heads = x.view(x.shape[0], step.num_heads, -1)
    low, high = heads[..., :half], heads[..., half : 2 * half]
    with frame.workspace.frame():
        turned = frame.workspace.take(*low.shape, dtype=x.dtype)
        product = frame.workspace.take(*low.shape, dtype=x.dtype)
        torch.mul(high, cos, out=turned)
        turned.add_(torch.mul(low, sin, out=product))
        low.mul_(cos).sub_(torch.mul(high, sin, out=product))
        high.copy_(turned)


def _attend(step: Attend, frame: Frame) -> None:
    q = frame.values[step.q].view(-1, step.num_heads, step.head_dim)
    k = frame.values[step.k].view(-1, step.num_kv_heads, step.head_dim)
    v = frame.values[step.v].view(-1, step.num_kv_heads, step.head_dim)
    out = frame.new(step.out, step.num_heads * step.head_dim).view(q.shape)
    for pool, view in frame.kv:
        append(pool, view, k, v)
        attend(step, q, pool, view, out, frame.workspace)


def _silu(x: torch.Tensor) -> None:
    F.silu(x, inplace=True)


def _relu(x: torch.Tensor) -> None:
    x.relu_()


def _gelu(x: torch.Tensor) -> None:
    torch.ops.aten.gelu_(x)


def _gelu_tanh(x: torch.Tensor) -> None:
    torch.ops.aten.gelu_(x, approximate="tanh")


_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], None]]] = {
    "silu": _silu,
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def _activate(step: Activate, frame: Frame) -> None:
    _ACTIVATIONS[step.function](frame.values[step.x])


def _multiply(step: Multiply, frame: Frame) -> None:
    frame.values[step.x].mul_(frame.values[step.y])


def _add(step: Add, frame: Frame) -> None:
    frame.values[step.x].add_(frame.values[step.y])


def _embed(step: Embed, frame: Frame) -> None:
    raise AssertionError(f"{step.weight.name} is gathered by rows, not run as a step")


_STEPS: Final[Mapping[type, Callable[[Any, Frame], None]]] = {
    Activate: _activate,
    Add: _add,
    Attend: _attend,
    Embed: _embed,
    Multiply: _multiply,
    Norm: _norm,
    Project: _project,
    Rotate: _rotate,
}
