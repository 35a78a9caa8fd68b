"""All ways of cutting a layer over one axis, and of these the ones that can be best.

Ong & Kwon's search: tensors of s tokens lie whole, cut by rows, cut by columns, or as partial sums;
weights are stored whole or cut, and may be gathered before they are used. Every legal sequence is
followed through the layer. A scheme that is no better in any coefficient than another is dropped,
as soon as both have come to the same layouts: what follows adds the same to both. The stream leaves
a layer as it came in, whole or cut, for the next layer to go on.

Queries, keys and values are one matrix, and so are the MLP's gate and what it gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.partition.einsum import product
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move, legal_moves, move, moved_elements
from freight.partition.schemes import Choice, Rules, Scheme, beaten

__all__ = ["find_schemes", "widths_of"]

_WHOLE: Final = Layout.parse("S W")
_ROWS: Final = Layout.parse("S_x W")
_COLUMNS: Final = Layout.parse("S W_x")
_STREAMS: Final = (_WHOLE, _ROWS, _COLUMNS)
_OF_ROWS: Final = (_WHOLE, _ROWS)
_STORED: Final = tuple(map(Layout.parse, ("W U", "W_x U", "W U_x")))
_CHIPS: Final = 6
"""Any number above 1 gives the rules; shares of p are put in when p is known."""

_State = tuple[Layout, ...]
_Path = tuple[Choice, ...]
_Found = dict[_State, list[Scheme]]


def widths_of(config: ModelConfig) -> dict[str, int]:
    """Letters of terms. InputError for layers that the search does not know."""
    if config.experts is not None or config.parallel:
        kind = "experts" if config.experts is not None else "attention and MLP side by side"
        raise InputError(
            f"Schemes were asked for of a {config.family} model.",
            f"Its layers have {kind}, and the search is over serial layers with one MLP.",
            "Use freight partition plan, which knows them.",
        )
    return {
        "h": config.hidden_size,
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
        "f": config.intermediate_size,
        "g": 2 if config.gated_mlp else 1,
    }


def find_schemes(config: ModelConfig, num_chips: int, rules: Rules) -> list[Scheme]:
    """Schemes that no other beats, those with the least communication per token last.

    InputError where heads, key heads or the MLP do not divide by the number of chips.
    """
    widths = widths_of(config)
    counts = {
        "query heads": config.num_heads,
        "key heads": config.num_kv_heads,
        "columns of the MLP": config.intermediate_size,
        "columns of the stream": config.hidden_size,
    }
    wrong = [f"{count} {name}" for name, count in counts.items() if count % num_chips]
    if num_chips < 2 or wrong:
        raise InputError(
            f"Schemes for {num_chips} chips were asked for.",
            f"{', '.join(wrong)} do not divide by {num_chips}."
            if num_chips > 1
            else "A layer is cut over two chips at least.",
            "Choose another number of chips, as 2, 4 or 8.",
        )
    search = _Search(widths, num_chips, rules)
    return sorted(search.run(), key=lambda own: (-own.moved.linear, own.costs))


@dataclass(frozen=True, slots=True)
class _Search:
    widths: dict[str, int]
    num_chips: int
    rules: Rules

    def run(self) -> list[Scheme]:
        every: list[Scheme] = []
        for stream in _STREAMS:
            found: _Found = {(stream, stream): [Scheme((), self.num_chips, self.widths, stream)]}
            for stage in self._stages():
                found = self._advance(found, stage)
            every += found.get((stream, stream), [])
        return _undominated(every)

    def _stages(self) -> Iterator[Callable[[_State], Iterable[tuple[_State, _Path]]]]:
        """States are the stream's layout and that of the value at hand."""
        g, q, k = self.widths["g"], self.widths["q"], self.widths["k"]
        assert q % k == 0
        yield lambda state: self._normed(state)
        yield lambda state: self._projected(state, "qkv", {"h": 1}, {"q": 1, "k": 2})
        yield lambda state: self._core(state)
        yield lambda state: self._projected(state, "projection", {"q": 1}, {"h": 1})
        yield lambda state: self._added(state)
        yield lambda state: self._normed(state)
        yield lambda state: self._projected(state, "MLP in", {"h": 1}, {"f": g})
        yield lambda state: self._laid(state, "hidden", {"f": g}, _STREAMS)
        yield lambda state: self._projected(state, "MLP out", {"f": 1}, {"h": 1})
        yield lambda state: self._added(state)

    def _advance(
        self, found: _Found, stage: Callable[[_State], Iterable[tuple[_State, _Path]]]
    ) -> _Found:
        reached: _Found = {}
        for state, schemes in found.items():
            for after, path in stage(state):
                own = reached.setdefault(after, [])
                more = Scheme(path, self.num_chips, self.widths)
                own += [scheme.followed_by(more) for scheme in schemes]
        return {state: _undominated(schemes) for state, schemes in reached.items()}

    def _moved(
        self, name: str, width: dict[str, float], before: Layout, after: Layout, value: str = ""
    ) -> Iterator[_Path]:
        """All cheapest ways of laying a value out otherwise: none, or one."""
        way = _way(before, after, self.rules.all_to_all)
        if way is None:
            return
        moves, share, shrunk = way
        if not moves:
            yield ()
            return
        count = share + shrunk / self.num_chips
        terms = {f"s{letter}": count * times for letter, times in width.items()} if count else {}
        text = " and ".join(f"{own.kind} of {name}" for own in moves)
        collectives = sum(own.kind != "slice" for own in moves)
        yield (
            Choice(
                text=text,
                moved=terms,
                num_collectives=collectives,
                value=value or name,
                moves=moves,
            ),
        )

    def _laid(
        self, state: _State, name: str, width: dict[str, float], layouts: Iterable[Layout]
    ) -> Iterator[tuple[_State, _Path]]:
        stream, value = state
        for after in layouts:
            for path in self._moved(name, width, value, after):
                yield (stream, after), path

    def _normed(self, state: _State) -> Iterator[tuple[_State, _Path]]:
        """Of the stream, where whole rows are."""
        stream, _ = state
        for after in _OF_ROWS:
            for path in self._moved("stream", {"h": 1}, stream, after, "normed"):
                yield (stream, after), path

    def _projected(
        self, state: _State, name: str, source: dict[str, float], target: dict[str, float]
    ) -> Iterator[tuple[_State, _Path]]:
        """A product, with the value laid out as it can be and the weight stored as it may be."""
        weight = {a + b: x * y for a, x in source.items() for b, y in target.items()}
        for (stream, value), path in self._laid(state, f"{name}'s input", source, _STREAMS):
            for stored in _STORED:
                for used in {stored, _STORED[0]}:
                    made = _made(value, used)
                    if made is not None and self._may(name, value, stored, used):
                        own = self._weight(name, weight, stored, used, is_cut=bool(made.axes))
                        yield (stream, made), (*path, own)

    def _may(self, name: str, value: Layout, stored: Layout, used: Layout) -> bool:
        if self.rules.only_projection_whole and not stored.axes and name != "projection":
            return False
        return not self.rules.gathered_for_rows or stored == used or value == _ROWS

    def _weight(
        self, name: str, terms: dict[str, float], stored: Layout, used: Layout, *, is_cut: bool
    ) -> Choice:
        part = 1.0 / self.num_chips
        is_gathered = stored != used
        return Choice(
            text=f"all-gather of {name}" if is_gathered else f"{name} stored as {stored}",
            flops={f"s{own}": 2.0 * x * (part if is_cut else 1.0) for own, x in terms.items()},
            gathered=terms if is_gathered else {},
            kept={own: x * (part if stored.axes else 1.0) for own, x in terms.items()},
            num_collectives=int(is_gathered),
            value=name,
            stored=stored,
            used=used,
        )

    def _core(self, state: _State) -> Iterator[tuple[_State, _Path]]:
        """Attention by heads, on every chip, or by rows of queries with all keys."""
        stream, value = state
        wide: dict[str, float] = {"q": 1.0, "k": 2.0}
        by_heads = [_COLUMNS] if self.rules.core_by_heads else [_COLUMNS, _WHOLE]
        for layout in by_heads:
            for path in self._moved("queries, keys and values", wide, value, layout):
                share = 1.0 if layout == _WHOLE else 1.0 / self.num_chips
                yield (
                    (stream, layout),
                    (*path, Choice(text="core", flops={"ssq": 2.0 * share}, value="core")),
                )
        if self.rules.gathered_keys and value == _ROWS:
            for path in self._moved("keys and values", {"k": 2.0}, value, _WHOLE):
                flops = {"ssq": 2.0 / self.num_chips}
                core = Choice(text="core by rows", flops=flops, value="core")
                yield (stream, _ROWS), (*path, core)

    def _added(self, state: _State) -> Iterator[tuple[_State, _Path]]:
        """The residual: both laid out alike; the stream goes on as that."""
        stream, value = state
        for after in _STREAMS:
            for path in self._moved("output", {"h": 1}, value, after):
                for other in self._moved("stream", {"h": 1}, stream, after):
                    yield (after, after), (*path, *other)


def _made(value: Layout, weight: Layout) -> Layout | None:
    """The layout of a product, if it can be made as its operands lie."""
    try:
        made = product(value, weight, ("S", "U"))
    except InputError:
        return None
    return Layout(("S", "W"), made.cuts, made.partial)


@cache
def _way(
    before: Layout, after: Layout, all_to_all: bool
) -> tuple[tuple[Move, ...], float, float] | None:
    """The cheapest moves, and what they move as (a + b / p) (p - 1) / p of the tensor."""
    kinds = {"all-gather", "reduce-scatter", "all-reduce", "slice"}
    kinds |= {"all-to-all"} if all_to_all else set()
    ways: list[tuple[tuple[Move, ...], Layout, float, float]] = [((), before, 0.0, 0.0)]
    for moves, layout, whole, part in [*ways]:
        for one in _followed(moves, layout, whole, part, kinds):
            ways += [one, *_followed(*one, kinds)]
    found = [way for way in ways if way[1] == after]
    if not found:
        return None
    moves, _, whole, part = min(found, key=lambda way: (way[2], way[3], len(way[0])))
    return moves, whole, part


def _followed(
    moves: tuple[Move, ...], layout: Layout, whole: float, part: float, kinds: set[str]
) -> Iterator[tuple[tuple[Move, ...], Layout, float, float]]:
    sizes = {"S": float(_CHIPS), "W": float(_CHIPS)}
    for own in legal_moves(layout, "x"):
        if own.kind in kinds:
            elements = moved_elements(layout, own, sizes, Mesh.of(x=_CHIPS))
            share = elements / (_CHIPS * (_CHIPS - 1))
            is_part = own.kind == "all-to-all"
            grown = (whole, part + share * _CHIPS) if is_part else (whole + share, part)
            yield ((*moves, own), move(layout, own), *grown)


def _undominated(schemes: list[Scheme]) -> list[Scheme]:
    """Of schemes that cost the same, one."""
    ordered = sorted(schemes, key=lambda scheme: (scheme.costs, scheme.num_collectives))
    if len(ordered) < 2:
        return ordered
    kept: list[Scheme] = []
    for own in (ordered[n] for n in np.flatnonzero(~beaten(ordered).any(axis=0))):
        if not any(_equal(other, own) for other in kept):
            kept.append(own)
    return kept


def _equal(one: Scheme, other: Scheme) -> bool:
    return one.num_collectives == other.num_collectives and all(
        abs(a - b) <= 1e-9 * max(abs(a), abs(b))
        for a, b in zip(one.costs, other.costs, strict=True)
    )
