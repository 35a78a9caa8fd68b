"""What searches have found, written down as programmes that can be counted and run.

A ``Route`` is a feed-forward layer over a mesh x, y, z; a ``Scheme`` is a serial layer over one
axis. Both searches speak of tensors of tokens by columns; here these have their dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from freight.errors import InputError
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move
from freight.partition.schemes import Choice, Scheme
from freight.partition.sharded import Sharded, Sizes, Writer
from freight.partition.shortest import Route

__all__ = ["route_layer", "scheme_layer"]

_PLACES: Final = (("x", "E"), ("hidden", "F"), ("gated", "F"), ("mlp", "E"))
_PRODUCTS: Final = {0: ("mlp in", "E", "F", "B L G F"), 2: ("mlp out", "F", "E", "B L E")}


def route_layer(route: Route, mesh: Mesh, sizes: Sizes) -> Sharded:
    """The MLP alone, from the stream to the stream, as ``layers.feed_forward``."""
    rows, columns = route.stream.cuts
    stream = f"{_text('B', rows)} L {_text('E', columns)}"
    weights = {"mlp in": "E_x G F_zy", "mlp out": "F_zy E_x"}
    writer = Writer(mesh, sizes, {"x": stream}, weights)
    place = 0
    for own in route.moves:
        value, wide = _PLACES[place]
        if isinstance(own, Move):
            writer.make(value, _named(own, {"W": wide}))
            continue
        if own is None:
            writer.activate("gated", "hidden")
        else:
            weight, *dims, out = _PRODUCTS[place]
            for dim, used in zip(dims, own, strict=True):
                writer.gather(weight, dim, writer.layouts[weight].cut(dim)[len(used) :])
            writer.product(_PLACES[place + 1][0], value, weight, out)
        place += 1
    return writer.finish("mlp")


_WEIGHTS: Final[Mapping[str, Mapping[str, str]]] = {
    "qkv": {"queries in": "E H D", "keys in": "E J K D"},
    "projection": {"attention out": "H D E"},
    "MLP in": {"mlp in": "E G F"},
    "MLP out": {"mlp out": "F E"},
}
_RESULTS: Final[Mapping[str, tuple[str, str]]] = {
    "queries in": ("queries", "B L H D"),
    "keys in": ("keys", "B L J K D"),
    "attention out": ("attention", "B L E"),
    "mlp in": ("hidden", "B L G F"),
    "mlp out": ("mlp", "B L E"),
}
_WIDE: Final = {"queries": "H", "keys": "K", "attended": "H", "hidden": "F", "gated": "F"}
"""The dim that stands for all columns of a value; of others it is E."""


def scheme_layer(scheme: Scheme, mesh: Mesh, sizes: Sizes) -> Sharded:
    """A layer with norms before its parts. The tokens of a scheme are those of one row. InputError
    where attention's core is not cut by heads."""
    return _SchemeWriter(scheme, mesh, sizes).written()


class _SchemeWriter:
    """Follows a scheme's choices, which stand in the order of the layer."""

    def __init__(self, scheme: Scheme, mesh: Mesh, sizes: Sizes) -> None:
        if any(choice.text == "core by rows" for choice in scheme.choices):
            raise InputError(
                "A scheme whose queries are cut by rows of one text was to be written down.",
                "Attention is run by heads, or by rows of the batch.",
                "Search without gathered keys.",
            )
        weights = {}
        for choice in scheme.choices:
            if choice.stored is not None:
                for name, dims in _WEIGHTS[choice.value].items():
                    weights[name] = _weight_text(dims, choice.stored)
        s, w = scheme.stream.cuts
        self._writer = Writer(mesh, sizes, {"x": f"B {_text('L', s)} {_text('E', w)}"}, weights)
        self._left = list(scheme.choices)
        self._stream = "x"

    def written(self) -> Sharded:
        writer = self._writer
        self._multiplied("qkv", self._normed("attention"))
        self._moved("queries, keys and values", "queries", "keys")
        self._taken("core")
        writer.attend("attended", "queries", "keys")
        self._multiplied("projection", "attended")
        self._added("attention", "with attention")
        self._multiplied("MLP in", self._normed("mlp"))
        self._moved("hidden", "hidden")
        writer.activate("gated", "hidden")
        self._multiplied("MLP out", "gated")
        self._added("mlp", "out")
        assert not self._left
        return writer.finish("out")

    def _taken(self, value: str) -> Choice | None:
        """The next choice, if it is one of this value."""
        return self._left.pop(0) if self._left and self._left[0].value == value else None

    def _moved(self, choice: str, *values: str) -> None:
        own = self._taken(choice)
        for number, move in enumerate([] if own is None else own.moves):
            for place, value in enumerate(values):
                if place or number:
                    self._writer.together()
                self._writer.make(value, _named(move, {"S": "L", "W": _WIDE.get(value, "E")}))

    def _normed(self, part: str) -> str:
        """Whole rows of the stream, normalised."""
        self._writer.copy(f"{part} input", self._stream)
        self._moved("normed", f"{part} input")
        self._writer.norm(f"{part} normed", f"{part} input")
        return f"{part} normed"

    def _multiplied(self, choice: str, value: str) -> None:
        self._moved(f"{choice}'s input", value)
        own = self._taken(choice)
        assert own is not None and own.used is not None
        for name, dims in _WEIGHTS[choice].items():
            self._writer.lay(name, Layout.parse(_weight_text(dims, own.used)))
            self._writer.product(_RESULTS[name][0], value, name, _RESULTS[name][1])

    def _added(self, part: str, out: str) -> None:
        self._moved("output", part)
        self._moved("stream", self._stream)
        self._writer.add(out, self._stream, part)
        self._stream = out


def _weight_text(dims: str, layout: Layout) -> str:
    """Of a weight that lies as W U: rows are its first dim, of columns the one that is cut is heads
    or the MLP's width."""
    rows, columns = layout.cuts
    words = dims.split()
    outer = next((dim for dim in "HKF" if dim in words[1:]), words[-1])
    words = [_text(dim, columns) if dim == outer else dim for dim in words]
    return " ".join([_text(words[0], rows), *words[1:]])


def _named(own: Move, dims: Mapping[str, str]) -> Move:
    source, target = (dims.get(dim, dim) for dim in (own.source, own.target))
    return replace(own, source=source, target=target)


def _text(dim: str, axes: str) -> str:
    return f"{dim}_{axes}" if axes else dim
