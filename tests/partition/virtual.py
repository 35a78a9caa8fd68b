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
from freight.partition.sharded import Sharded, Transfer

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


@dataclass
class Run:
    """What a run of a ``Sharded`` has left: all values, elements sent and FLOPs of all chips."""

    values: dict[str, Spread]
    sent: dict[str, int]
    flops: float


def execute(own: Sharded, arrays: Mapping[str, Array], heads: tuple[int, int] = (1, 1)) -> Run:
    """Run on numpy arrays, given whole. ``heads`` are those of queries and of keys."""
    layouts = {**own.inputs, **own.weights}
    values = {name: spread(arrays[name], layout, own.mesh) for name, layout in layouts.items()}
    sent, flops = {"weights": 0, "activations": 0}, 0.0
    for step in own.steps:
        if isinstance(step, Transfer):
            assert values[step.value].layout == step.before
            moved = run(values[step.value], step.move)
            values[step.value] = moved
            sent["weights" if step.is_weight else "activations"] += sum(moved.sent)
            continue
        operands = [values[name] for name in step.operands]
        assert tuple(operand.layout for operand in operands) == step.layouts
        parts = []
        for rank in range(own.mesh.num_chips):
            mine = [operand.parts[rank] for operand in operands]
            if step.kind in ("product", "look up"):
                dims = ["".join(operand.layout.dims) for operand in operands]
                text = f"{','.join(dims)}->{''.join(step.out_layout.dims)}"
                parts.append(np.einsum(text, *mine))
                sizes = dict(zip("".join(dims), mine[0].shape + mine[1].shape, strict=True))
                flops += 2.0 * np.prod([*sizes.values()]) if step.kind == "product" else 0.0
            elif step.kind == "attend":
                starts = [
                    index(own.mesh, rank, operand.layout.cut(dim)) * part.shape[axis]
                    for operand, part, dim, axis in zip(operands, mine, "HK", (2, 3), strict=True)
                ]
                parts.append(attend(*mine, *starts, heads[0] // heads[1]))
            elif step.kind == "combine":
                first = index(own.mesh, rank, operands[0].layout.cut("N")) * mine[0].shape[0]
                routes = mine[1][..., first : first + mine[0].shape[0]]
                parts.append(np.einsum("nble,bln->ble", mine[0], routes))
            else:
                parts.append(FUNCTIONS[step.kind](*mine, own.sizes))
        values[step.out] = Spread(own.mesh, step.out_layout, parts)
    return Run(values, sent, flops)


def attend(q: Array, kv: Array, first: int, first_key: int, shared: int) -> Array:
    """Causal attention of [B, L, H, D] over [B, L, J, K, D]; heads are numbered in the model."""
    out = np.empty_like(q)
    length = q.shape[1]
    later = np.triu(np.full((length, length), -np.inf), 1)
    for head in range(q.shape[2]):
        keys, values = np.moveaxis(kv[:, :, :, (first + head) // shared - first_key], 2, 0)
        scores = np.einsum("bld,bsd->bls", q[:, :, head], keys) + later
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, :, head] = np.einsum("bls,bsd->bld", weights, values)
    return out


def activate(hidden: Array) -> Array:
    """[B, L, G, F] or [N, B, T, G, F], the gate first."""
    gate = hidden[..., 0, :] / (1 + np.exp(-hidden[..., 0, :]))
    return gate * hidden[..., 1, :] if hidden.shape[-2] == 2 else gate


FUNCTIONS = {
    "activate": lambda hidden, sizes: activate(hidden),
    "square sum": lambda x, sizes: (x**2).sum(axis=-1),
    "norm": lambda x, sums, sizes: x / np.sqrt(sums / sizes["E"] + 1e-6)[..., None],
    "add": lambda x, y, sizes: x + y,
    "copy": lambda x, sizes: x,
    "dispatch": lambda x, sizes: np.broadcast_to(x, (int(sizes["N"]), *x.shape)).copy(),
}
