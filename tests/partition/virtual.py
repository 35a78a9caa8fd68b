"""Chips in one process: tensors as one numpy array per rank, moves that count what is sent.

The oracle of the algebra. It knows collectives only as what they must do to arrays, and finds who
has which part from coordinates, not from the algebra's formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move, move

Array = NDArray[np.float64]


@dataclass
class Spread:
    """A tensor over the chips."""

    mesh: Mesh
    layout: Layout
    parts: list[Array]
    sent: list[int] = field(default_factory=list)


def index(mesh: Mesh, rank: int, axes: str) -> int:
    """A rank's place along some axes, the first outermost."""
    where, place = mesh.coordinates(rank), 0
    for axis in axes:
        place = place * mesh.size(axis) + where[axis]
    return place


def own_part(mesh: Mesh, layout: Layout, rank: int, array: Array) -> tuple[slice, ...]:
    slices = []
    for size, axes in zip(array.shape, layout.cuts, strict=True):
        width, rest = divmod(size, mesh.size(axes))
        assert not rest
        first = index(mesh, rank, axes) * width
        slices.append(slice(first, first + width))
    return tuple(slices)


def spread(array: Array, layout: Layout, mesh: Mesh, seed: int = 0) -> Spread:
    """Laid out; partial sums are random numbers that add up to the array."""
    rng = np.random.default_rng(seed)
    count = mesh.size(layout.partial)
    shares = rng.normal(size=(count, *array.shape))
    shares[-1] = array - shares[:-1].sum(axis=0)
    parts = [
        shares[index(mesh, rank, layout.partial)][own_part(mesh, layout, rank, array)].copy()
        for rank in range(mesh.num_chips)
    ]
    return Spread(mesh, layout, parts)


def whole(tensor: Spread, sizes: Mapping[str, int]) -> Array:
    """The tensor that the chips hold together; copies that should be alike must be."""
    mesh, layout = tensor.mesh, tensor.layout
    shape = tuple(sizes[dim] for dim in layout.dims)
    rest = "".join(axis for axis in mesh.names if axis not in layout.axes)
    copies = [np.zeros(shape) for _ in range(mesh.size(rest))]
    for rank, part in enumerate(tensor.parts):
        copy = copies[index(mesh, rank, rest)]
        copy[own_part(mesh, layout, rank, copy)] += part
    for copy in copies[1:]:
        np.testing.assert_allclose(copy, copies[0], rtol=0, atol=1e-11)
    return copies[0]


def groups(mesh: Mesh, axes: str) -> list[list[int]]:
    """Ranks that a collective over some axes joins, in their order along these axes."""
    others = "".join(axis for axis in mesh.names if axis not in axes)
    ranks = sorted(
        range(mesh.num_chips), key=lambda r: (index(mesh, r, others), index(mesh, r, axes))
    )
    return [list(own) for _, own in groupby(ranks, key=lambda rank: index(mesh, rank, others))]


def run(tensor: Spread, own: Move) -> Spread:
    """A collective, chunk by chunk; ``sent`` counts elements that leave each rank."""
    mesh, layout = tensor.mesh, tensor.layout
    after = move(layout, own)
    parts: list[Array] = [np.empty(0)] * mesh.num_chips
    sent = [0] * mesh.num_chips

    def chunk(rank: int, place: int, dim: str, count: int) -> Array:
        chunks = np.split(tensor.parts[rank], count, axis=layout.dims.index(dim))
        return chunks[place]

    def send(origin: int, to: int, data: Array) -> Array:
        if origin != to:
            sent[origin] += data.size
        return data

    for ranks in groups(mesh, own.axes):
        count = len(ranks)
        if own.kind == "all-reduce":
            flat = [np.array_split(tensor.parts[rank].ravel(), count) for rank in ranks]
            sums = []
            for place, owner in enumerate(ranks):
                got = [send(r, owner, flat[n][place]) for n, r in enumerate(ranks)]
                sums.append(np.sum(got, axis=0))
            for rank in ranks:
                got = [send(owner, rank, sums[place]) for place, owner in enumerate(ranks)]
                parts[rank] = np.concatenate(got).reshape(tensor.parts[rank].shape)
            continue
        # The order of a group along the axes as they cut the source.
        source = layout.cut(own.source)[-len(own.axes) :] if own.source else ""
        giving = sorted(ranks, key=lambda rank: index(mesh, rank, source))
        for place, rank in enumerate(ranks):
            match own.kind:
                case "slice":
                    parts[rank] = chunk(rank, place, own.target, count)
                case "all-gather":
                    got = [send(r, rank, tensor.parts[r]) for r in giving]
                    parts[rank] = np.concatenate(got, axis=layout.dims.index(own.source))
                case "reduce-scatter":
                    got = [send(r, rank, chunk(r, place, own.target, count)) for r in ranks]
                    parts[rank] = np.sum(got, axis=0)
                case "all-to-all":
                    got = [send(r, rank, chunk(r, place, own.target, count)) for r in giving]
                    parts[rank] = np.concatenate(got, axis=layout.dims.index(own.source))
    return Spread(mesh, after, parts, sent)
