"""Weights that ranks keep and move as integers in groups.

A rank's part of one is the bytes of its rows, [stack, rows' dims, row bytes]: of the rank's columns
codes, scales and minima, as ``model.number_format`` has them, so that products take a part as it
lies. Rows move as those of any tensor; where columns are put together or cut, their codes, scales
and minima are so each. A weight of which a rank's columns are no whole groups is kept plain. Knows
layouts, no checkpoint's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

import numpy as np
import torch

from freight.distributed.tensor.blueprint import Blueprint
from freight.distributed.tensor.groups import place
from freight.distributed.tensor.moves import make_move, own_part
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.ways import Ways
from freight.kernels.products import scratch_values
from freight.model.number_format import DTYPE_BYTES, Grouped, find_compressed
from freight.model.sources import TensorSource
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move

__all__ = [
    "PackedWeight",
    "PackedWeights",
    "make_packed_move",
    "mean_bytes",
    "mlp_group",
    "own_weight_part",
]

_NEVER: Final = ("embedding", "router", "share")
"""Of the first rows are looked up; the others are small, and choose or weigh experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """How the parts of a weight lie: ``dims`` are those before the bytes, ``columns`` those that a
    product sums over, of which the last one's whole width is ``width``."""

    number_format: Grouped
    dims: tuple[str, ...]
    columns: tuple[str, ...]
    width: int

    @property
    def element_bytes(self) -> float:
        """Of a number, with its part of its group's scale and minimum."""
        own = self.number_format
        return own.row_bytes(own.group_size) / own.group_size

    def num_columns(self, raw: torch.Tensor) -> int:
        """Of the rows of a part."""
        return round(raw.shape[-1] / self.element_bytes)

    def fields(self, raw: torch.Tensor, stretches: int) -> list[torch.Tensor]:
        """Codes, scales and minima of a part's rows, as bytes [.., stretches, bytes]."""
        own, columns = self.number_format, self.num_columns(raw)
        codes = own.code_bytes(columns)
        factors = own.factor_bytes * columns // own.group_size
        found = torch.split(raw, [codes, factors, factors], dim=-1)
        return [own.reshape(*own.shape[:-1], stretches, -1) for own in found]

    def columns_here(self, layout: Layout, mesh: Mesh) -> int:
        """Neighbouring columns of the last of their dims that a rank has."""
        return self.width // mesh.size(layout.cut(self.columns[-1]))


class PackedWeights:
    """Which of a model's weights stay integers when they are cut in these ``ways``."""

    def __init__(
        self, blueprint: Blueprint, ways: Ways, sources: Mapping[str, TensorSource]
    ) -> None:
        self._blueprint = blueprint
        self._ways = ways
        self._sources = sources
        self._known: dict[tuple[str, bool, str], PackedWeight | None] = {}
        self._has_integers = any(find_compressed(own.dtype) for own in sources.values())

    def find(self, name: str, layer: int | None) -> PackedWeight | None:
        """A planner's weight of a layer, or of an end; None: its numbers are kept plain."""
        if name in _NEVER or not self._has_integers:
            return None
        names = [*self._matrices(name, layer)]
        if any(own not in self._sources for own in names):
            return None  # one with the embedding
        dtype, *others = {self._sources[own].dtype for own in names}
        if others:
            return None
        key = name, self._has_experts(layer), dtype
        if key not in self._known:
            self._known[key] = self._fit(name, layer, dtype)
        return self._known[key]

    def stored_bytes(self, layer: int | None, plain: int) -> dict[str, float]:
        """What a rank keeps of each weight of a layer, or of the ends, where ``plain`` bytes of a
        number are computed with."""
        sizes, mesh = self._ways.sizes(1, 1, self._has_experts(layer)), self._ways.mesh
        layouts = self._ways.ends()
        if layer is not None:
            layouts = self._ways.stored(with_experts=self._has_experts(layer))
        return {
            name: layout.elements(sizes, mesh) * self.element_bytes(name, layer, plain)
            for name, layout in layouts.items()
        }

    def element_bytes(self, name: str, layer: int | None, plain: int) -> float:
        """Of a number of a weight, of ``plain`` bytes where it is computed with."""
        found = self.find(name, layer)
        if found is not None:
            return found.element_bytes
        names = [own for own in self._matrices(name, layer) if own in self._sources]
        if name in ("router", "share") or not names:
            return plain
        return max(_kept_bytes(self._sources[own].dtype, plain) for own in names)

    def kept_plain(self) -> list[str]:
        """Weights that are integers in the checkpoint, and numbers here."""
        found: dict[str, None] = {}
        for layer in range(self._blueprint.config.num_layers):
            for name in self.stored_bytes(layer, 1):
                dtypes = {self._sources[own].dtype for own in self._matrices(name, layer)}
                if name not in _NEVER and any(map(find_compressed, dtypes)):
                    found |= {} if self.find(name, layer) else {name: None}
        return [*found]

    def first_layer(self, *, with_experts: bool) -> int:
        """The first one with experts, or without."""
        config = self._blueprint.config
        layers = range(config.num_layers)
        return next(layer for layer in layers if config.has_experts(layer) == with_experts)

    def scratch_bytes(self, plain: int) -> int:
        """What a product wants beside its result where weights are not kept as they are computed
        with, or in 16 bits."""
        if mean_bytes(self._sources, plain) == plain != torch.bfloat16.itemsize:
            return 0
        c = self._ways.config
        columns = max(c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim)
        kinds = torch.float32, torch.bfloat16
        return max(scratch_values(columns, kind) * kind.itemsize for kind in kinds)

    def _matrices(self, name: str, layer: int | None) -> Iterator[str]:
        sizes = self._ways.sizes(1, 1, self._has_experts(layer))
        ranges = [range(int(sizes[dim])) for dim in self._blueprint.stack(name)]
        for chosen in product(*ranges):
            yield self._blueprint.matrix(name, layer, chosen).name

    def _has_experts(self, layer: int | None) -> bool:
        return layer is not None and self._blueprint.config.has_experts(layer)

    def _fit(self, name: str, layer: int | None, dtype: str) -> PackedWeight | None:
        """The weight in groups that no cut of its columns splits; None where one would."""
        own, has_experts = find_compressed(dtype), self._has_experts(layer)
        if not isinstance(own, Grouped) or own.across:
            return None
        sizes = self._ways.sizes(1, 1, has_experts)
        stack = self._blueprint.stack(name)
        matrix = self._blueprint.matrix(name, layer, [0] * len(stack))
        found = PackedWeight(
            number_format=own,
            dims=tuple(stack + matrix.row_dims),
            columns=tuple(matrix.column_dims),
            width=int(sizes[matrix.column_dims[-1]]),
        )
        mesh, ranges = self._ways.mesh, {dim: range(int(size)) for dim, size in sizes.items()}
        numbers = self._blueprint.numbers(matrix, matrix.column_dims, ranges)
        for layout in self._ways.layouts_of(name, with_experts=has_experts):
            here = found.columns_here(layout, mesh)
            if not layout.cut(found.columns[-1]):
                count = prod(int(sizes[dim]) for dim in found.columns)
                here = count // mesh.size("".join(map(layout.cut, found.columns)))
            if here % own.group_size:
                return None
        groups = numbers.reshape(-1, own.group_size)
        firsts = groups[:, :1]
        is_padding = (groups == -1).all(axis=1)
        is_whole = (groups - firsts == np.arange(own.group_size)).all(axis=1)
        is_whole &= firsts[:, 0] % own.group_size == 0
        return found if bool((is_padding | is_whole).all()) else None


def mlp_group(sources: Mapping[str, TensorSource]) -> int:
    """Columns of the widest group of the MLP's last matrices; 1: they are no integers."""
    found = 1
    for name, source in sources.items():
        own = find_compressed(source.dtype)
        if isinstance(own, Grouped) and name.endswith(".down") and not own.across:
            found = max(found, own.group_size)
    return found


def mean_bytes(sources: Mapping[str, TensorSource], plain: int) -> float:
    """Of a number of the layers' matrices as they are kept, where ``plain`` bytes are computed
    with."""
    held = elements = 0.0
    for name, source in sources.items():
        if name.startswith("layers.") and len(source.shape) > 1:
            count = prod(source.shape)
            is_kept = isinstance(find_compressed(source.dtype), Grouped)
            held += source.num_bytes if is_kept else count * _kept_bytes(source.dtype, plain)
            elements += count
    return held / elements if elements else plain


def _kept_bytes(dtype: str, plain: int) -> int:
    """Of a number of this type, of ``plain`` bytes where it is computed with: in 32 bits fewer are
    kept as they are."""
    return min(plain, DTYPE_BYTES.get(dtype, plain)) if plain == DTYPE_BYTES["float32"] else plain


def make_packed_move(
    ranks: Ranks, parts: Parts, layout: Layout, own: Move, packed: PackedWeight
) -> Parts:
    """As ``make_move``, of a weight's parts: they are put together, or sliced."""
    dim = own.source if own.kind == "all-gather" else own.target
    places = Layout((*packed.dims, "bytes"), ("",) * (len(packed.dims) + 1))
    if dim in packed.dims:
        # Rows are cut and joined as any tensor's; by which axes, the move says.
        return make_move(ranks, parts, places, own)
    if own.kind == "slice":
        count = ranks.mesh.size(own.axes)
        after = layout.with_cut(dim, layout.cut(dim) + own.axes)
        pairs = zip(ranks.places(own.axes), parts, strict=True)
        return [_chunk(part, packed, count, here, after, dim, ranks.mesh) for here, part in pairs]
    assert own.kind == "all-gather", own
    gathered = ranks.all_gather(parts, own.axes)
    return [_joined(pieces, packed, layout, dim, ranks.mesh) for pieces in gathered]


def own_weight_part(
    raw: torch.Tensor,
    packed: PackedWeight | None,
    before: Layout,
    wanted: Layout,
    mesh: Mesh,
    rank: int,
) -> torch.Tensor:
    """A rank's part of a weight that it has whole where it is to be cut, or with fewer cuts if it
    is ``packed``: ``before`` becomes ``wanted``."""
    if packed is None:
        return own_part(raw, wanted.dims, wanted, mesh, rank)
    for dim in wanted.dims:
        axes = wanted.cut(dim)[len(before.cut(dim)) :]
        if not axes:
            continue
        count = mesh.size(axes)
        here = place(mesh, rank, axes)
        if dim in packed.dims:
            raw = raw.chunk(count, packed.dims.index(dim))[here]
        else:
            raw = _chunk(raw, packed, count, here, wanted, dim, mesh)
    return raw


def _chunk(
    raw: torch.Tensor,
    packed: PackedWeight,
    count: int,
    here: int,
    after: Layout,
    dim: str,
    mesh: Mesh,
) -> torch.Tensor:
    """One of so many equal parts of the columns' dim."""
    outer = _outer(raw, packed, packed.columns_here(after, mesh) * count, dim)
    fields = packed.fields(raw, outer)
    return torch.cat([own.chunk(count, -1)[here].flatten(-2) for own in fields], -1)


def _joined(
    pieces: Sequence[torch.Tensor], packed: PackedWeight, layout: Layout, dim: str, mesh: Mesh
) -> torch.Tensor:
    """Parts of the columns' dim side by side."""
    outer = _outer(pieces[0], packed, packed.columns_here(layout, mesh), dim)
    fields = zip(*(packed.fields(piece, outer) for piece in pieces), strict=True)
    return torch.cat([torch.cat(own, -1).flatten(-2) for own in fields], -1)


def _outer(raw: torch.Tensor, packed: PackedWeight, columns: int, dim: str) -> int:
    """Stretches of a row that are cut, or joined, each: those outside of the dim."""
    return 1 if dim == packed.columns[0] else packed.num_columns(raw) // columns
