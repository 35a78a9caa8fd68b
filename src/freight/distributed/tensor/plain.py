"""What one rank computes from tensors alone: products, norms, activations, sums.

The planner writes down which values meet; what a norm or an activation is stands in the model's
switches. Gains and biases come in as the rank's parts of them. Knows no mesh and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import torch.nn.functional as F

from freight.distributed.tensor.products import multiply_narrow, multiply_packed
from freight.distributed.tensor.vectors import Beside
from freight.model.switches import ModelConfig
from freight.partition.sharded import Compute, ComputeKind

__all__ = ["PLAIN", "compute_plain", "wide"]

PLAIN: Final[frozenset[ComputeKind]] = frozenset(
    ("product", "copy", "add", "activate", "square sum", "norm")
)

_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def compute_plain(
    config: ModelConfig, step: Compute, operands: Sequence[torch.Tensor], beside: Beside
) -> torch.Tensor:
    """The result of a step of one of the kinds ``PLAIN``."""
    x, *others = operands
    match step.kind:
        case "product":
            return _product(step, x, others[0], beside)
        case "add":
            return x + others[0]
        case "activate":
            return _activate(config, x)
        case "square sum":
            return _square_sum(step, x)
        case "norm":
            return _norm(config, x, others[0], beside)
    assert step.kind == "copy"
    return x


def _product(step: Compute, x: torch.Tensor, weight: torch.Tensor, beside: Beside) -> torch.Tensor:
    """An einsum, as one matrix product where no dim is in all three."""
    if beside.gain is not None:
        x = x * beside.gain
    if beside.bias is not None:
        x = x + beside.bias
    if beside.packed is not None:
        return multiply_packed(step, x, weight, beside.packed)
    if weight.dtype != x.dtype:
        found = None if torch.compiler.is_compiling() else multiply_narrow(step, x, weight)
        if found is not None:
            return found
        weight = weight.to(x.dtype)
    first, second, made = (layout.dims for layout in (*step.layouts, step.out_layout))
    summed = [dim for dim in first if dim not in made]
    rest = [dim for dim in (*first, *second) if dim not in summed]
    if len(set(rest)) == len(rest) and set(summed) <= set(second):
        along = [[dims.index(dim) for dim in summed] for dims in (first, second)]
        out: torch.Tensor = torch.tensordot(x, weight, along)
        return out.permute([*map(rest.index, made)])
    text = f"{''.join(first)},{''.join(second)}->{''.join(made)}"
    return torch.einsum(text, x, weight)


def _activate(config: ModelConfig, hidden: torch.Tensor) -> torch.Tensor:
    """[..., G, F], of two the gate first."""
    gate = _ACTIVATIONS[config.activation](hidden[..., 0, :])
    return gate * hidden[..., 1, :] if hidden.shape[-2] == 2 else gate


def _square_sum(step: Compute, x: torch.Tensor) -> torch.Tensor:
    """Of squares; where the norm centres, of plain numbers before them. In 32 bits at least."""
    numbers = wide(x)
    squares = numbers.square().sum(dim=-1)
    if "J" not in step.out_layout.dims:
        return squares
    return torch.stack((numbers.sum(dim=-1), squares), dim=-1)


def _norm(config: ModelConfig, x: torch.Tensor, sums: torch.Tensor, beside: Beside) -> torch.Tensor:
    """Rounded once, at the end."""
    if not beside.is_wanted:
        return x
    numbers, width = wide(x), config.hidden_size
    if sums.dim() == x.dim():
        mean = sums[..., :1] / width
        variance = sums[..., 1:] / width - mean.square()
        numbers = numbers - mean
    else:
        variance = sums[..., None] / width
    numbers = numbers * torch.rsqrt(variance + config.norm_eps)
    if beside.gain is not None:
        numbers = numbers * beside.gain
    if beside.bias is not None:
        numbers = numbers + beside.bias
    return numbers.to(x.dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """In 32 bits at least."""
    return x if x.dtype == torch.float64 else x.float()
