"""The cheapest way of a whole block, put together from its halves and written down as a programme.

The stream goes on as it came in, whatever layouts it takes between. The programme is what is
counted, priced and run, like those of ``layers``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from freight.model.switches import ModelConfig
from freight.partition.block_search import BlockSearch, Half, Path
from freight.partition.moves import Move
from freight.partition.sharded import Sharded, Sizes, Writer
from freight.partition.shortest import Prices
from freight.partition.ways import Floats, Ways

__all__ = ["BlockRoute", "best_block"]

_PRODUCTS: Final = {
    "queries in": ("queries", "B L H D"),
    "keys in": ("keys", "B L J K D"),
    "mlp in": ("hidden", "B L G F"),
    "attention out": ("attention", "B L E"),
    "mlp out": ("mlp", "B L E"),
}
"""What each weight makes of its input."""
_FIRST: Final = ("queries in", "keys in", "mlp in")
_LAST: Final = {"attention out": "attended", "mlp out": "gated"}
"""Weights whose input is that of the part, and those with an input of their own."""


@dataclass(frozen=True, slots=True)
class BlockRoute:
    """``layer`` takes ``seconds``, which ``seconds_of`` says too."""

    seconds: float
    layer: Sharded


def best_block(config: ModelConfig, sizes: Sizes, prices: Prices) -> BlockRoute:
    """The fastest from any layout of the stream back to the same.

    The mesh has the axes x, y and z; weights are stored as in ``layers.Cut``. Memory is not looked
    at but for the time of reading it. InputError for experts, and where a stored dim does not
    divide.
    """
    return _Finder(config, BlockSearch(config, sizes, prices)).best()


@dataclass(frozen=True, slots=True)
class _Part:
    """Halves with one input and one output, and the seconds between them."""

    halves: tuple[Half, ...]
    inputs: list[int]
    outputs: list[int]
    seconds: Floats


class _Finder:
    """``norm_s`` is the time of a norm in each layout of the stream, which may lie in ``rows``."""

    def __init__(self, config: ModelConfig, search: BlockSearch) -> None:
        self._config, self._search = config, search
        self._norm_s = search.norm_seconds(2 if config.has_centred_norms else 1)
        self._rows = search.stream.whole()
        self._from_stream = Ways(search.stream, self._begin(np.zeros(len(self._rows))))
        self._moved_s = self._from_stream.settled(search.fixed)
        normed = self._moved_s + self._norm_s
        self._to_input = Ways(search.stream, normed)
        all_layouts = np.where(np.eye(len(search.stream.layouts), dtype=bool), 0.0, np.inf)
        self._from_output = Ways(search.stream, all_layouts)
        out_s = self._from_output.settled(search.fixed)
        self._to_stream = Ways(search.stream, out_s + self._norm_s)

    def _begin(self, seconds: Floats) -> Floats:
        found = np.full((len(self._rows), len(self._search.stream.layouts)), np.inf)
        found[range(len(self._rows)), self._rows] = seconds
        return found

    def best(self) -> BlockRoute:
        own = self._search
        if self._config.parallel:
            part = self._part(own.mlp, own.attention)
            seconds = self._residual_s(part).diagonal()
            row = int(np.argmin(seconds))
            return self._written(float(seconds[row]), [(part, row, row)])
        parts = [self._part(half) for half in (own.attention, own.mlp)]
        first, second = (self._residual_s(part) for part in parts)
        both = first + second.T
        row, other = (int(n) for n in np.unravel_index(np.argmin(both), both.shape))
        ways = [(parts[0], row, other), (parts[1], other, row)]
        return self._written(float(both[row, other]), ways)

    # -- what it takes -------------------------------------------------------------------------

    def _part(self, *halves: Half) -> _Part:
        """Between inputs and outputs that all halves have."""
        inputs = [n for n in halves[0].inputs if all(n in own.inputs for own in halves)]
        outputs = [n for n in halves[0].outputs if all(n in own.outputs for own in halves)]
        seconds = self._halves_s(halves, inputs, outputs).min(axis=(0, 2))
        return _Part(halves, inputs, outputs, seconds)

    def _halves_s(self, halves: tuple[Half, ...], inputs: list[int], outputs: list[int]) -> Floats:
        """[before, input, behind, output], their values moved at the same time."""
        fixed = self._search.fixed
        total = sum(own.seconds(inputs, outputs) for own in halves)
        return np.asarray(total + fixed[:, None, None, None] + fixed[:, None])

    def _residual_s(self, part: _Part) -> Floats:
        """From layouts of the stream to others: norm, part, residual."""
        into, out = self._into_s()[:, part.inputs], self._out_s()[part.outputs]
        middle = (into[:, :, None] + part.seconds).min(axis=1)
        whole = (middle[:, :, None] + out).min(axis=1)
        whole = whole + self._moved_s[:, self._rows]
        if self._config.norm_place == "after" and not self._config.parallel:
            whole = whole + self._norm_s[self._rows]
        return np.asarray(whole)

    @property
    def _norms_input(self) -> bool:
        return self._config.parallel or self._config.norm_place in ("before", "both")

    @property
    def _norms_output(self) -> bool:
        return not self._config.parallel and self._config.norm_place in ("both", "update")

    def _into_s(self) -> Floats:
        """[stream, input]"""
        return self._to_input.settled(self._search.fixed) if self._norms_input else self._moved_s

    def _out_s(self) -> Floats:
        """[output, stream]"""
        ways = self._to_stream if self._norms_output else self._from_output
        return ways.settled(self._search.fixed)[:, self._rows]

    # -- how it is written ---------------------------------------------------------------------

    def _written(self, seconds: float, parts: list[tuple[_Part, int, int]]) -> BlockRoute:
        own, row = self._search, parts[0][1]
        rows, columns = own.stream.layouts[self._rows[row]].cuts
        stream = f"{_text('B', rows)} L {_text('E', columns)}"
        weights = {name: str(layout) for name, layout in own.weights.items()}
        writer = Writer(own.mesh, own.sizes, {"x": stream}, weights)
        name = "x"
        for number, (part, start, end) in enumerate(parts):
            name = self._write(writer, part, start, end, name, number)
        return BlockRoute(seconds, writer.finish(name, "keys"))

    def _write(
        self, writer: Writer, part: _Part, start: int, end: int, stream: str, number: int
    ) -> str:
        """One residual; the name of the stream behind it."""
        into, out = self._into_s()[start, part.inputs], self._out_s()[part.outputs, end]
        both = into[:, None] + part.seconds + out
        place, last = (int(n) for n in np.unravel_index(np.argmin(both), both.shape))
        given, made = part.inputs[place], part.outputs[last]
        before, behind = self._bounds(part, place, last)
        paths = [own.path(before, given, behind, made) for own in part.halves]
        source = self._write_input(writer, start, given, stream, number)
        result = self._write_halves(writer, paths, source)
        result = self._write_output(writer, made, end, result)
        for own in self._moves(self._from_stream, start, self._rows[end])[1]:
            writer.make(stream, own)
        added = f"stream after {result}"
        writer.add(added, stream, result)
        if self._config.norm_place == "after" and not self._config.parallel:
            writer.norm(f"{added} normed", added, centred=self._centred)
            return f"{added} normed"
        return added

    def _bounds(self, part: _Part, place: int, last: int) -> tuple[int, int]:
        chosen = self._halves_s(part.halves, [part.inputs[place]], [part.outputs[last]])
        flat = chosen[:, 0, :, 0]
        before, behind = np.unravel_index(np.argmin(flat), flat.shape)
        return int(before), int(behind)

    def _moves(self, ways: Ways, row: int, end: int) -> tuple[int, list[Move]]:
        return ways.trace(ways.bound_of(row, end, self._search.fixed), row, end)

    def _write_input(self, writer: Writer, start: int, given: int, stream: str, number: int) -> str:
        ways = self._to_input if self._norms_input else self._from_stream
        begin, later = self._moves(ways, start, given)
        earlier = self._moves(self._from_stream, start, begin)[1] if self._norms_input else []
        source = f"input {number}"
        if earlier or not self._norms_input:
            writer.copy(source, stream)
        for own in earlier:
            writer.make(source, own)
        if self._norms_input:
            normed = f"normed {number}"
            writer.norm(normed, source if earlier else stream, centred=self._centred)
            source = normed
        for own in later:
            writer.make(source, own)
        return source

    def _write_halves(self, writer: Writer, paths: list[Path], source: str) -> str:
        used = {name: layout for path in paths for name, layout in path.used.items()}
        moves = {name: own for path in paths for name, own in path.moves.items()}
        for weight in _FIRST:
            if weight in used:
                writer.lay(weight, used[weight])
                writer.product(_PRODUCTS[weight][0], source, weight, _PRODUCTS[weight][1])
        _move_together(writer, moves, ("queries", "keys", "hidden"))
        if "queries in" in used:
            writer.attend("attended", "queries", "keys")
        if "mlp in" in used:
            writer.activate("gated", "hidden")
        _move_together(writer, moves, ("attended", "gated"))
        lasts = [weight for weight in _LAST if weight in used]
        for weight in lasts:
            writer.lay(weight, used[weight])
            writer.product(_PRODUCTS[weight][0], _LAST[weight], weight, _PRODUCTS[weight][1])
        if len(lasts) > 1:
            writer.add("both", "mlp", "attention")
        return "both" if len(lasts) > 1 else _PRODUCTS[lasts[0]][0]

    def _write_output(self, writer: Writer, made: int, end: int, result: str) -> str:
        ways = self._to_stream if self._norms_output else self._from_output
        begin, later = self._moves(ways, made, self._rows[end])
        if self._norms_output:
            for own in self._moves(self._from_output, made, begin)[1]:
                writer.make(result, own)
            writer.norm(f"{result} normed", result, centred=self._centred)
            result = f"{result} normed"
        for own in later:
            writer.make(result, own)
        return result

    @property
    def _centred(self) -> bool:
        return self._config.has_centred_norms


def _move_together(writer: Writer, moves: dict[str, list[Move]], names: tuple[str, ...]) -> None:
    """All moves of these values, at the same time."""
    is_first = True
    for name in names:
        for own in moves.get(name, []):
            if not is_first:
                writer.together()
            writer.make(name, own)
            is_first = False


def _text(dim: str, axes: str) -> str:
    return f"{dim}_{axes}" if axes else dim
