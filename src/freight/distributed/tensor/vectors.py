"""The small tensors of a layer that every rank has whole: gains and biases.

Each belongs to a value or a weight of the planner's programme by its name, and has some dims of the
value that it acts on; a rank uses the part that the value's layout gives it. Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from freight.distributed.tensor.moves import own_part
from freight.distributed.tensor.packed import PackedWeight
from freight.partition.layout import Layout, Mesh
from freight.partition.sharded import Compute

__all__ = ["Affine", "Beside", "HeadNorm", "Vector", "Vectors"]


class Beside(NamedTuple):
    """What a rank has of the vectors of a step, each as its values lie: ``gain`` and ``bias`` of a
    norm, or of what a product takes, whose weight may be ``packed``. A norm may not be
    ``is_wanted``; ``limit`` is that of gates and of what they gate, ``width`` that of all heads
    which are normalised together."""

    gain: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    packed: PackedWeight | None = None
    is_wanted: bool = True
    limit: float | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Vector:
    """``tensor`` has the dims ``dims``, as ("G", "F")."""

    dims: tuple[str, ...]
    tensor: torch.Tensor

    def along(self, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
        """A rank's part, with a dim of one for each dim of the layout that it has not."""
        part = own_part(self.tensor, self.dims, layout, mesh, rank)
        sizes = dict(zip(self.dims, part.shape, strict=True))
        return part.reshape([sizes.get(dim, 1) for dim in layout.dims])


@dataclass(frozen=True, slots=True)
class Affine:
    """x * gain + bias over E, of a norm; or over heads that are so wide together."""

    gain: Vector
    bias: Vector | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Of queries or keys, head by head: ``gain`` [D], or [heads, D] where each has its own, and
    what is added, [D]."""

    gain: torch.Tensor
    bias: torch.Tensor | None = None

    def of(self, heads: range) -> HeadNorm:
        """That of some heads."""
        if self.gain.dim() == 1:
            return self
        return HeadNorm(self.gain[heads.start : heads.stop], self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """``norms`` go by the norm's result, ``inputs`` act on what is multiplied by a weight of that
    name, where two norms differ by these only. ``biases`` go by the weight, as does what is known
    of those that are ``packed``. ``heads`` are norms of "queries" and "keys". ``sinks`` [H] are
    scores of each head that give nothing. ``no_norms`` name norms that the planner writes down and
    the model has not. ``corrections`` [N] are added where experts are chosen, ``expert_bias``
    [N, E] to what they make. ``limits`` are those of the MLP's gates and of the experts'."""

    norms: Mapping[str, Affine] = field(default_factory=dict)
    inputs: Mapping[str, Affine] = field(default_factory=dict)
    biases: Mapping[str, Vector] = field(default_factory=dict)
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)
    heads: Mapping[str, HeadNorm] = field(default_factory=dict)
    sinks: torch.Tensor | None = None
    no_norms: frozenset[str] = frozenset()
    corrections: torch.Tensor | None = None
    expert_bias: Vector | None = None
    limits: tuple[float | None, float | None] = (None, None)

    def beside(self, step: Compute, mesh: Mesh, rank: int) -> Beside:
        """Those of a product or a norm."""
        if step.kind == "norm":
            affine, packed, layout = self.norms.get(step.out), None, step.out_layout
        elif step.kind == "product":
            weight = step.operands[1]
            affine, packed = self.inputs.get(weight), self.packed.get(weight)
            layout = step.layouts[0]
        else:
            is_experts = step.kind == "activate" and "N" in step.out_layout.dims
            return Beside(limit=self.limits[is_experts])
        bias = None if affine is None else affine.bias
        return Beside(
            gain=None if affine is None else affine.gain.along(layout, mesh, rank),
            bias=None if bias is None else bias.along(layout, mesh, rank),
            packed=packed,
            is_wanted=step.out not in self.no_norms,
            width=None if affine is None else affine.width,
        )
