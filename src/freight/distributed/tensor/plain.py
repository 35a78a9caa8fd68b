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
    ("product", "copy", "add", "weigh", "activate", "square sum", "norm")
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
            factor = _factor(config, step)
            return x + (others[0] if factor is None else others[0] * factor)
        case "weigh":
            return x * torch.sigmoid(others[0])[..., None]
        case "activate":
            return _activate(config, x, beside.limit)
        case "square sum":
            return _square_sum(step, x)
        case "norm" if "D" in step.out_layout.dims:
            return _norm_heads(config, x, others[0], beside)
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
    # Of numbers of 16 bits ours may be the faster products on a CPU; it is known by trial.
    is_short = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    if weight.dtype != x.dtype or is_short:
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


def _factor(config: ModelConfig, step: Compute) -> float | None:
    """Of what is added to the stream, where that of experts is among their weights, or to what
    these make."""
    if step.out == "experts" and config.experts is not None:
        if config.experts.shared_gate or config.norms_sum:
            return None
        own = config.experts.shared_scale
        return own if own != 1 else config.residual_scale
    if step.out.startswith("experts ") or not step.out.endswith(("added", "with attention", "out")):
        return None
    return config.residual_scale


def _activate(config: ModelConfig, hidden: torch.Tensor, limit: float | None) -> torch.Tensor:
    """[..., G, F], of two the gate first."""
    gate, up = hidden[..., 0, :], hidden[..., -1, :]
    is_gated = hidden.shape[-2] == 2
    if is_gated and config.gate_limit is not None:
        gate = gate.clamp(max=config.gate_limit)
        most = config.gate_limit
        return gate * torch.sigmoid(gate * config.gate_slope) * (up.clamp(-most, most) + 1)
    if limit is not None and config.limits_first:
        gate = gate.clamp(max=limit)
    gate = _ACTIVATIONS[config.activation](gate)
    if limit is not None:
        gate = gate if config.limits_first else gate.clamp(-limit, limit)
        up = up.clamp(-limit, limit)
    return gate * up if is_gated else gate


def _square_sum(step: Compute, x: torch.Tensor) -> torch.Tensor:
    """Of squares; where the norm centres, of plain numbers before them. In 32 bits at least."""
    numbers = wide(x)
    if "D" in step.layouts[0].dims:  # heads
        numbers = (numbers[:, :, 0] if "J" in step.layouts[0].dims else numbers).flatten(-2)
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


def _norm_heads(
    config: ModelConfig, x: torch.Tensor, sums: torch.Tensor, beside: Beside
) -> torch.Tensor:
    """Queries [B, L, H, D] as a whole, or keys [B, L, J, K, D] beside their values."""
    assert beside.gain is not None and beside.width is not None
    is_keys = x.dim() == beside.gain.dim() == 5
    numbers = wide(x[:, :, :1] if is_keys else x)
    factor = torch.rsqrt(sums / beside.width + config.norm_eps)
    numbers = (numbers * factor.view(*sums.shape, *[1] * (x.dim() - 2)) * beside.gain).to(x.dtype)
    return torch.cat((numbers, x[:, :, 1:]), dim=2) if is_keys else numbers


def wide(x: torch.Tensor) -> torch.Tensor:
    """In 32 bits at least."""
    return x if x.dtype == torch.float64 else x.float()
