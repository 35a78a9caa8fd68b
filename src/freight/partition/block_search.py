"""The cheapest way of a whole block over a mesh: a shortest path over layouts of all its values.

The stream, what is normalised, queries, keys, what was attended and the MLP's hidden values may lie
in any layout; each product may gather its weight over any of the innermost axes. Values that a
product's input splits into are moved at the same time. Weights are stored as in ``layers.Cut``.
Knows none of the papers' layouts: it finds them, or better ones. Experts are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product as choices

import numpy as np

from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.partition.einsum import product
from freight.partition.layers import Cut, attention_weights, mlp_weights
from freight.partition.layout import Layout
from freight.partition.moves import Move
from freight.partition.sharded import Sizes
from freight.partition.shortest import Prices
from freight.partition.ways import Floats, Value, Ways, fixed_seconds

__all__ = ["BlockSearch", "Half", "Path", "Product"]


@dataclass(frozen=True, slots=True)
class Product:
    """Of a value with a stored weight, gathered to ``used`` first, between layouts by numbers."""

    start: int
    end: int
    used: Layout
    seconds: float


@dataclass(frozen=True, slots=True)
class Path:
    """What a part does: moves of its input, then of each of its values, with the products that
    ``used`` weights make. ``moves`` and ``used`` are by names of values and of weights."""

    moves: dict[str, list[Move]]
    used: dict[str, Layout]


class Half:
    """A part of a block from the normalised stream [B, W] to its output [B, W]: ``seconds`` by the
    bounds on what is moved before and behind its middle, input and output. The middle is attention
    or the activation function; ``before`` are ways to it, by value, ``behind`` those from it."""

    def __init__(
        self,
        before: dict[str, tuple[Ways, str, list[Product]]],
        middle: Sequence[tuple[dict[str, int], int, float]],
        behind: tuple[str, Ways, str, list[Product]],
        num_layouts: int,
    ) -> None:
        self._before, self._behind = before, behind
        self._middle = middle
        first = sum(
            own.seconds[:, :, [ends[name] for ends, _, _ in middle]]
            for name, (own, _, _) in before.items()
        )
        self._first = first + np.array([seconds for _, _, seconds in middle])
        _, ways, _, products = behind
        last = np.full((*ways.seconds.shape[:2], num_layouts), np.inf)
        for own in products:
            made = ways.seconds[:, :, own.start] + own.seconds
            last[:, :, own.end] = np.minimum(last[:, :, own.end], made)
        self._last = last[:, [row for _, row, _ in middle]]

    @cached_property
    def inputs(self) -> list[int]:
        return np.flatnonzero(np.isfinite(self._first).any(axis=(0, 2))).tolist()

    @cached_property
    def outputs(self) -> list[int]:
        return np.flatnonzero(np.isfinite(self._last).any(axis=(0, 1))).tolist()

    def seconds(self, inputs: list[int], outputs: list[int]) -> Floats:
        """[before, input, behind, output], without fixed times."""
        first, last = self._first[:, inputs], self._last[:, :, outputs]
        found = np.full((first.shape[0] * len(inputs), last.shape[0] * len(outputs)), np.inf)
        left = first.reshape(-1, first.shape[2])
        right = last.transpose(1, 0, 2).reshape(last.shape[1], -1)
        for place in range(left.shape[1]):
            np.minimum(found, left[:, place, None] + right[place], out=found)
        return found.reshape(first.shape[0], len(inputs), last.shape[0], len(outputs))

    def path(self, before: int, given: int, behind: int, made: int) -> Path:
        """What is done within these bounds, from an input to an output."""
        place = int(np.argmin(self._first[before, given] + self._last[behind, :, made]))
        ends, row, _ = self._middle[place]
        moves: dict[str, list[Move]] = {}
        used: dict[str, Layout] = {}
        for name, (ways, weight, products) in self._before.items():
            begin, moves[name] = ways.trace(before, given, ends[name])
            used[weight] = _cheapest(products, given, begin).used
        name, ways, weight, products = self._behind
        own = min(
            (own for own in products if own.end == made),
            key=lambda own: ways.seconds[behind, row, own.start] + own.seconds,
        )
        _, moves[name] = ways.trace(behind, row, own.start)
        return Path(moves, {**used, weight: own.used})


def _cheapest(products: Iterable[Product], start: int, end: int) -> Product:
    found = (own for own in products if (own.start, own.end) == (start, end))
    return min(found, key=lambda own: own.seconds)


class BlockSearch:
    """Of one model, mesh and sizes: its values, its products, and both halves of a block."""

    def __init__(self, config: ModelConfig, sizes: Sizes, prices: Prices) -> None:
        if config.experts is not None:
            raise InputError(
                f"The shortest path was asked for of a {config.family} model.",
                "Its layers have experts, and the path is through layers with one MLP.",
                "Use the plan, whose cuts know experts.",
            )
        mesh = prices.fabric.mesh
        self.sizes, self.prices, self.mesh = sizes, prices, mesh
        self.axes = "".join(axis for axis in "xyz" if mesh.size(axis) > 1)
        self.fixed = fixed_seconds(prices.fabric, self.axes)
        cut = Cut(width=self._active("x"), inner=self._active("zy"))
        texts = attention_weights(mesh, sizes, cut) | mlp_weights(cut)
        self.weights = {name: Layout.parse(text) for name, text in texts.items()}
        for layout in self.weights.values():
            layout.shape(sizes, mesh)
        each = sizes["L"] * prices.activation_bytes
        self.stream = self._value("BE", each)
        self._hidden = self._value("BF", each * sizes["G"])
        self._gated = self._value("BF", each)
        self._queries = self._value("BHD", each)
        self._keys = self._value("BKD", each * sizes["J"])
        self.mlp, self.attention = self._mlp(), self._attention()

    def _active(self, axes: str) -> str:
        return "".join(axis for axis in axes if axis in self.axes)

    def _value(self, dims: str, element_bytes: float) -> Value:
        return Value({d: self.sizes[d] for d in dims}, element_bytes, self.axes, self.prices.fabric)

    def norm_seconds(self, numbers: int) -> Floats:
        """Of a norm of the stream in each layout, with so many sums for each token; partial values
        have none."""
        found = np.full(len(self.stream.layouts), np.inf)
        for number in self.stream.whole():
            rows, columns = self.stream.layouts[number].cuts
            held = numbers * self.sizes["B"] * self.sizes["L"] / self.mesh.size(rows)
            held *= self.prices.activation_bytes
            found[number] = self.prices.fabric.seconds("all-reduce", held, columns)
        return found

    def _mlp(self) -> Half:
        into = self._products("mlp in", self.stream, self._hidden, "EGF", "F")
        out = self._products("mlp out", self._gated, self.stream, "FE", "E")
        before = {"hidden": (self._ways(self._hidden, into), "mlp in", into)}
        rows = self._hidden.whole()
        middle = [({"hidden": number}, row, 0.0) for row, number in enumerate(rows)]
        behind = "gated", Ways(self._gated, _each(rows, len(self._gated.layouts))), "mlp out", out
        return Half(before, middle, behind, len(self.stream.layouts))

    def _attention(self) -> Half:
        queries = self._products("queries in", self.stream, self._queries, "EHD", "HD")
        keys = self._products("keys in", self.stream, self._keys, "EJKD", "KD")
        out = self._products("attention out", self._queries, self.stream, "HDE", "E")
        before = {
            "queries": (self._ways(self._queries, queries), "queries in", queries),
            "keys": (self._ways(self._keys, keys), "keys in", keys),
        }
        rows = [n for n in self._queries.whole() if not self._queries.layouts[n].cut("D")]
        middle = [
            ({"queries": number, "keys": other}, row, self._core_seconds(number, other))
            for row, number in enumerate(rows)
            for other in self._keys_for(self._queries.layouts[number])
        ]
        ways = Ways(self._queries, _each(rows, len(self._queries.layouts)))
        return Half(
            before, middle, ("attended", ways, "attention out", out), len(self.stream.layouts)
        )

    def _keys_for(self, queries: Layout) -> Iterator[int]:
        """Layouts of keys that such queries can attend to."""
        b, h, _ = queries.cuts
        for count in range(len(h) + 1):
            number = self._keys.number(Layout(("B", "K", "D"), (b, h[:count], "")))
            if self._keys.divides[number]:
                yield number

    def _core_seconds(self, queries: int, keys: int) -> float:
        """Arithmetic, and reading of the keys and values so far."""
        sizes, mesh, prices = self.sizes, self.mesh, self.prices
        rows, heads, _ = self._queries.layouts[queries].cuts
        local = sizes["B"] * sizes["L"] * sizes["H"] * sizes["D"] / mesh.size(rows + heads)
        kept = sizes["B"] * sizes["J"] * sizes["K"] * sizes["D"] * sizes["S"]
        kept /= mesh.size(rows + self._keys.layouts[keys].cut("K"))
        read_s = kept * prices.kv_bytes / prices.memory_bytes_per_s
        return 4.0 * local * sizes["A"] / prices.flops + read_s

    def _ways(self, value: Value, products: Iterable[Product]) -> Ways:
        """Of a product's result, by layouts of its input."""
        begin = np.full((len(self.stream.layouts), len(value.layouts)), np.inf)
        for own in products:
            begin[own.start, own.end] = min(begin[own.start, own.end], own.seconds)
        return Ways(value, begin)

    def _products(
        self, weight: str, source: Value, target: Value, dims: str, kept: str
    ) -> list[Product]:
        """With all layouts that the stored weight can be gathered into, and that fit."""
        stored = self.weights[weight]
        found = []
        for counts in choices(*(range(len(axes) + 1) for axes in stored.cuts)):
            cuts = tuple(axes[:count] for axes, count in zip(stored.cuts, counts, strict=True))
            used = Layout(stored.dims, cuts)
            gathered_s = self._gathering_seconds(stored, used)
            for start in source.whole():
                value = source.layouts[start]
                try:
                    made = product(value, used, ("B", *kept))
                except InputError:
                    continue
                end = target.number(made)
                if target.divides[end]:
                    done_s = self._product_seconds(dims, value, used)
                    found.append(Product(start, end, used, gathered_s + done_s))
        return found

    def _gathering_seconds(self, stored: Layout, used: Layout) -> float:
        """Dim by dim, and reading the whole of what is used."""
        fabric, size, layout, seconds = self.prices.fabric, self.prices.weight_bytes, stored, 0.0
        for dim, axes in zip(used.dims, used.cuts, strict=True):
            gathered = layout.cut(dim)[len(axes) :]
            layout = layout.with_cut(dim, axes)
            if gathered:
                held = layout.elements(self.sizes, self.mesh) * size
                seconds += fabric.seconds("all-gather", held, gathered)
        read = used.elements(self.sizes, self.mesh) * size
        return seconds + read / self.prices.memory_bytes_per_s

    def _product_seconds(self, dims: str, value: Layout, used: Layout) -> float:
        total = 2.0 * self.sizes["B"] * self.sizes["L"]
        for dim in dims:
            total *= self.sizes[dim]
        return total / self.mesh.size({*value.axes, *used.axes}) / self.prices.flops


def _each(rows: Sequence[int], num_layouts: int) -> Floats:
    """A way from each of some layouts."""
    begin = np.full((len(rows), num_layouts), np.inf)
    begin[range(len(rows)), rows] = 0.0
    return begin
