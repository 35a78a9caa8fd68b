"""A piece of a model over a mesh: computations, and the moves between them, legal by construction.

The one list that is counted, priced and run. A ``Writer`` follows the layout of every value and
refuses what the algebra does not allow. Knows no model, no chip and no link.

Dims: B rows, L new tokens of a row, E model width, F feed-forward width, G = 2 with a gate and 1
without, H query heads, K key/value heads, D head width, J = 2 (keys and values), V vocabulary, N
experts, T tokens that an expert gets of a row, Q width of the MLP beside experts. ``sizes`` has
them all, and two more that no tensor here has: S keys of a row once the new tokens are in, A keys
that a new token sees on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from freight.partition.einsum import attention, pointwise, product, square_sum
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move, MoveKind, move, moved_elements

__all__ = ["Compute", "ComputeKind", "Sharded", "Sizes", "Transfer", "Writer"]

ComputeKind = Literal[
    "product",
    "look up",
    "activate",
    "square sum",
    "norm",
    "attend",
    "add",
    "weigh",
    "copy",
    "dispatch",
    "combine",
]
Sizes = Mapping[str, float]
_Dims = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A move of one value. Each chip sends ``elements``; transfers of one ``group`` go at the same
    time, those of one value after each other. ``is_weight``: its elements are stored ones."""

    value: str
    move: Move
    before: Layout
    after: Layout
    elements: float
    is_weight: bool
    group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """A computation on what each chip has. ``flops`` are per chip, multiply-adds counted as two,
    of products and attention only; the rest is counted by no formula of the papers."""

    kind: ComputeKind
    out: str
    operands: tuple[str, ...]
    layouts: tuple[Layout, ...]
    out_layout: Layout
    flops: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """``inputs`` and ``outputs`` are layouts of values that come in and go on, ``weights`` those
    in which weights are stored, ``used`` those in which they are multiplied with."""

    mesh: Mesh
    sizes: Sizes
    steps: tuple[Transfer | Compute, ...]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    weights: Mapping[str, Layout]
    used: Mapping[str, Layout]

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(step for step in self.steps if isinstance(step, Transfer))

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(step for step in self.steps if isinstance(step, Compute))

    def moved(self, *, weights: bool) -> float:
        """Elements that each chip sends, of weights or of activations."""
        return sum(own.elements for own in self.transfers if own.is_weight == weights)

    @property
    def flops(self) -> float:
        """Per chip."""
        return sum(own.flops for own in self.computes)

    @property
    def stored_elements(self) -> float:
        """Weights that each chip keeps."""
        return sum(own.elements(self.sizes, self.mesh) for own in self.weights.values())

    @property
    def used_elements(self) -> float:
        """Weights that each chip reads, with what it has gathered."""
        return sum(own.elements(self.sizes, self.mesh) for own in self.used.values())


class Writer:
    """Writes a ``Sharded`` step by step. A move over no axes is none."""

    def __init__(
        self, mesh: Mesh, sizes: Sizes, values: Mapping[str, str], weights: Mapping[str, str]
    ) -> None:
        self.mesh, self.sizes = mesh, sizes
        self._inputs = {name: Layout.parse(text) for name, text in values.items()}
        self.weights = {name: Layout.parse(text) for name, text in weights.items()}
        self.layouts = {**self._inputs, **self.weights}
        self._steps: list[Transfer | Compute] = []
        self._group = 0
        for layout in self.layouts.values():
            layout.shape(sizes, mesh)

    def finish(self, *outputs: str) -> Sharded:
        return Sharded(
            mesh=self.mesh,
            sizes=self.sizes,
            steps=tuple(self._steps),
            inputs=self._inputs,
            outputs={name: self.layouts[name] for name in outputs},
            weights=self.weights,
            used={name: self.layouts[name] for name in self.weights},
        )

    def gather(self, value: str, dim: str, axes: str) -> None:
        self._move(value, "all-gather", axes, source=dim)

    def scatter(self, value: str, dim: str, axes: str) -> None:
        """Reduce partial sums over ``axes``, which cut ``dim`` then."""
        self._move(value, "reduce-scatter", axes, target=dim)

    def reduce(self, value: str, axes: str) -> None:
        """Reduce partial sums, for all chips."""
        self._move(value, "all-reduce", axes)

    def slice(self, value: str, dim: str, axes: str) -> None:
        self._move(value, "slice", axes, target=dim)

    def exchange(self, value: str, source: str, target: str, axes: str) -> None:
        self._move(value, "all-to-all", axes, source=source, target=target)

    def lay(self, value: str, used: Layout) -> None:
        """Gather what ``used`` cuts less: the innermost axes of dims."""
        for dim, axes in zip(used.dims, used.cuts, strict=True):
            self.gather(value, dim, self.layouts[value].cut(dim)[len(axes) :])

    def make(self, value: str, own: Move) -> None:
        """A move that was found elsewhere."""
        self._move(value, own.kind, own.axes, own.source, own.target)

    def together(self) -> None:
        """The next move goes at the same time as the last, or follows it at once."""
        self._group -= 1

    def _move(
        self, value: str, kind: MoveKind, axes: str, source: str = "", target: str = ""
    ) -> None:
        if not axes:
            self._group += 1
            return
        own, before = Move(kind, axes, source, target), self.layouts[value]
        after = move(before, own)
        self._steps.append(
            Transfer(
                value=value,
                move=own,
                before=before,
                after=after,
                elements=moved_elements(before, own, self.sizes, self.mesh),
                is_weight=value in self.weights,
                group=self._group,
            )
        )
        self._group += 1
        self.layouts[value] = after

    def product(self, out: str, left: str, right: str, dims: str) -> None:
        """An einsum; ``dims`` are those of the result, as "B L F"."""
        a, b = self.layouts[left], self.layouts[right]
        cuts = {**dict(zip(a.dims, a.cuts, strict=True)), **dict(zip(b.dims, b.cuts, strict=True))}
        local = prod(self.sizes[dim] / self.mesh.size(axes) for dim, axes in cuts.items())
        made = product(a, b, tuple(dims.split()))
        self._compute("product", out, (left, right), made, 2.0 * local)

    def look_up(self, out: str, tokens: str, table: str, dims: str) -> None:
        """The same without arithmetic: all but one number of each token are zero."""
        made = product(self.layouts[tokens], self.layouts[table], tuple(dims.split()))
        self._compute("look up", out, (tokens, table), made)

    def copy(self, out: str, value: str) -> None:
        """A value under another name, to be moved on its own."""
        self._compute("copy", out, (value,), self.layouts[value])

    def activate(self, out: str, value: str) -> None:
        """The activation function; it joins G, the gate and what it gates."""
        layout = self.layouts[value]
        kept = tuple(dim for dim in layout.dims if dim != "G")
        self._compute("activate", out, (value,), pointwise(layout, out_dims=kept))

    def add(self, out: str, one: str, other: str) -> None:
        """A sum of two, which may be partial over the same axes."""
        a, b = self.layouts[one], self.layouts[other]
        pointwise(Layout(a.dims, a.cuts), Layout(b.dims, b.cuts))
        if a.partial != b.partial:
            pointwise(a, b)
        self._compute("add", out, (one, other), a)

    def weigh(self, out: str, value: str, share: str) -> None:
        """Times the share of each token, [B, L]; partial sums stay such."""
        layout, own = self.layouts[value], self.layouts[share]
        pointwise(own, Layout(own.dims, tuple(map(layout.cut, own.dims))))
        self._compute("weigh", out, (value, share), layout)

    def norm(self, out: str, value: str, *, centred: bool = False) -> None:
        """Over E; where E is cut, chips add up their sums of squares, one number per token, and
        where the norm is ``centred`` their sums beside them, J = 2 numbers."""
        layout, sums = self.layouts[value], f"{out} sums"
        self._compute("square sum", sums, (value,), square_sum(layout, "E", centred=centred))
        self.reduce(sums, self.layouts[sums].partial)
        self._compute("norm", out, (value, sums), pointwise(layout))

    def norm_heads(self, value: str, heads: str) -> None:
        """Of queries, or of keys beside their values, over all heads of a token together."""
        layout, sums = self.layouts[value], f"{value} sums"
        axes = layout.cut(heads) + layout.cut("D")
        made = Layout(("B", "L"), (layout.cut("B"), layout.cut("L")), axes)
        self._compute("square sum", sums, (value,), made)
        self.reduce(sums, axes)
        self._compute("norm", value, (value, sums), pointwise(layout))

    def attend(self, out: str, queries: str, keys: str) -> None:
        """Of new tokens over all keys so far."""
        made = attention(self.layouts[queries], self.layouts[keys])
        local = made.elements(self.sizes, self.mesh)
        self._compute("attend", out, (queries, keys), made, 4.0 * local * self.sizes["A"])

    def dispatch(self, out: str, value: str) -> None:
        """[B, L, E] -> [N, B, T, E]: for each expert its tokens, of those that a chip has."""
        layout = pointwise(self.layouts[value])
        made = Layout(("N", "B", "T", "E"), ("", *layout.cuts))
        self._compute("dispatch", out, (value,), made)

    def combine(self, out: str, value: str, routes: str) -> None:
        """[N, B, T, E] -> [B, L, E]: each token's experts, weighted and summed."""
        layout = self.layouts[value]
        partial = layout.partial + layout.cut("N")
        made = Layout(("B", "L", "E"), layout.cuts[1:], partial)
        self._compute("combine", out, (value, routes), made)

    def _compute(
        self,
        kind: ComputeKind,
        out: str,
        operands: tuple[str, ...],
        made: Layout,
        flops: float = 0.0,
    ) -> None:
        layouts = tuple(self.layouts[name] for name in operands)
        step = Compute(
            kind=kind, out=out, operands=operands, layouts=layouts, out_layout=made, flops=flops
        )
        self._steps.append(step)
        self.layouts[out] = made
