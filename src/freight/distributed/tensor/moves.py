"""The planner's moves, made of tensors: which part of a tensor goes where.

Knows layouts and collectives, no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freight.distributed.tensor.groups import place, reordered
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move

__all__ = ["make_move", "own_part", "own_range"]


def make_move(ranks: Ranks, parts: Parts, layout: Layout, own: Move) -> Parts:
    """The parts of a tensor laid out as ``layout`` after a move that the algebra allows."""
    count = ranks.mesh.size(own.axes)
    source = layout.dims.index(own.source) if own.source else 0
    target = layout.dims.index(own.target) if own.target else 0
    match own.kind:
        case "slice" if target == parts[0].dim():
            return parts  # numbers stand for single ones along the last dim
        case "slice":
            places = ranks.places(own.axes)
            return [
                part.chunk(count, target)[here] for part, here in zip(parts, places, strict=True)
            ]
        case "all-gather":
            gathered = ranks.all_gather(parts, own.axes)
            return [torch.cat(pieces, source) for pieces in gathered]
        case "reduce-scatter":
            return ranks.reduce_scatter(_chunks(parts, count, target), own.axes)
        case "all-reduce":
            return ranks.all_reduce(parts, own.axes)
        case "all-to-all":
            come = ranks.all_to_all(_chunks(parts, count, target), own.axes)
            cut = layout.cut(own.source)
            order = reordered(ranks.mesh, own.axes, cut[len(cut) - len(own.axes) :])
            return [torch.cat([pieces[here] for here in order], source) for pieces in come]


def own_range(mesh: Mesh, rank: int, size: int, axes: str) -> range:
    """What a rank has of a dim of this size that some axes cut."""
    count = size // mesh.size(axes)
    first = place(mesh, rank, axes) * count
    return range(first, first + count)


def own_part(
    tensor: torch.Tensor, dims: Sequence[str], layout: Layout, mesh: Mesh, rank: int
) -> torch.Tensor:
    """A rank's part of a tensor that is there whole, with some ``dims`` of a layout."""
    for index, dim in enumerate(dims):
        mine = own_range(mesh, rank, tensor.shape[index], layout.cut(dim))
        tensor = tensor.narrow(index, mine.start, len(mine))
    return tensor


def _chunks(parts: Parts, count: int, dim: int) -> list[Parts]:
    return [[*part.chunk(count, dim)] for part in parts]
