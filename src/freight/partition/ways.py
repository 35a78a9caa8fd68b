"""The cheapest ways of laying one value out otherwise: over all its layouts, for all bounds on how
often each axis is crossed.

The fixed time of a collective is shared by values that are moved at the same time, that of their
bytes is not. So a way has two prices, what its bytes take and how often it crosses each axis, and
for every bound on the latter the least of the former is found. Values that go together then need
only the same bound. Which layouts and moves there are depends on no size, and is found once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from freight.partition.fabric import Fabric
from freight.partition.layout import Layout, all_layouts
from freight.partition.moves import Move, legal_moves, move

__all__ = ["Floats", "Value", "Ways", "bounds", "fixed_seconds"]

Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_MOST_CROSSED = 2
"""An axis that is to cut another dim is crossed once; of partial sums, to end whole, twice."""


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Moves that cross the axes equally often, from ``starts`` to ``ends``, by the latter."""

    crossed: tuple[int, ...]
    numbers: _Ints
    starts: _Ints
    firsts: _Ints
    """Of the moves to each layout, the place of the first; ``targets`` are these layouts."""
    targets: _Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """All layouts of some dims over some axes, and all moves between them."""

    layouts: tuple[Layout, ...]
    numbers: Mapping[Layout, int]
    moves: tuple[Move, ...]
    starts: _Ints
    ends: _Ints
    groups: tuple[_Moves, ...]


@cache
def _graph(dims: tuple[str, ...], axes: str) -> _Graph:
    layouts = tuple(all_layouts(dims, axes))
    numbers = {layout: number for number, layout in enumerate(layouts)}
    moves, starts, ends = [], [], []
    for layout, number in numbers.items():
        for own in legal_moves(layout, axes):
            moves.append(own)
            starts.append(number)
            ends.append(numbers[move(layout, own)])
    crossed = [_crossed(own, axes) for own in moves]
    groups = []
    for kind in sorted(set(crossed)):
        some = np.array([number for number, times in enumerate(crossed) if times == kind])
        some = some[np.argsort(np.array(ends)[some], kind="stable")]
        targets, firsts = np.unique(np.array(ends)[some], return_index=True)
        groups.append(_Moves(kind, some, np.array(starts)[some], firsts, targets))
    return _Graph(
        layouts, numbers, tuple(moves), np.array(starts, int), np.array(ends, int), tuple(groups)
    )


def _crossed(own: Move, axes: str) -> tuple[int, ...]:
    times = {"slice": 0, "all-reduce": 2}.get(own.kind, 1)
    return tuple(times * (axis in own.axes) for axis in axes)


def bounds(axes: str) -> list[tuple[int, ...]]:
    """How often each axis may be crossed, those that allow less first."""
    return [*product(range(_MOST_CROSSED + 1), repeat=len(axes))]


def fixed_seconds(fabric: Fabric, axes: str) -> Floats:
    """Of collectives that cross each axis as often as each of the bounds says."""
    each = np.array([fabric.latency(axis) for axis in axes])
    return np.array([float(np.dot(each, own)) for own in bounds(axes)])


class Value:
    """What is moved: its ``sizes`` by dims that may be cut, the bytes of one element of these (all
    that belongs to it in dims that are not cut), and the ``axes`` that have more than one chip."""

    def __init__(
        self, sizes: Mapping[str, float], element_bytes: float, axes: str, fabric: Fabric
    ) -> None:
        self.axes = axes
        self.dims = tuple(sizes)
        self._graph = _graph(self.dims, axes)
        mesh = fabric.mesh
        self.divides = np.array(
            [
                not any(
                    sizes[dim] % mesh.size(cut)
                    for dim, cut in zip(layout.dims, layout.cuts, strict=True)
                )
                for layout in self._graph.layouts
            ]
        )
        whole = element_bytes * float(np.prod([*sizes.values()]))
        held = np.array([whole / mesh.size("".join(own.cuts)) for own in self._graph.layouts])
        ends = zip(self._graph.moves, self._graph.starts, self._graph.ends, strict=True)
        seconds = [
            fabric.sending_s(own.kind, held[end if own.kind == "all-gather" else start], own.axes)
            for own, start, end in ends
        ]
        possible = self.divides[self._graph.starts] & self.divides[self._graph.ends]
        self._seconds = np.where(possible, seconds, np.inf)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return self._graph.layouts

    def number(self, layout: Layout) -> int:
        return self._graph.numbers[layout]

    def whole(self) -> list[int]:
        """Layouts without partial sums."""
        layouts = self._graph.layouts
        return [n for n, own in enumerate(layouts) if not own.partial and self.divides[n]]

    def steps(self, crossed: tuple[int, ...]) -> Iterator[tuple[_Moves, tuple[int, ...], Floats]]:
        """Moves that ``crossed`` allows, how often axes may be crossed before them, their time."""
        for group in self._graph.groups:
            left = tuple(a - b for a, b in zip(crossed, group.crossed, strict=True))
            if min(left, default=0) >= 0:
                yield group, left, self._seconds[group.numbers]

    def move(self, number: int) -> tuple[Move, int]:
        """A move by its number, and where it begins."""
        return self._graph.moves[number], int(self._graph.starts[number])


class Ways:
    """``seconds[bound, row, layout]`` of a value that begins in each layout at the price
    ``begin[row, layout]``, without the fixed time of collectives."""

    def __init__(self, value: Value, begin: Floats) -> None:
        self.value = value
        self._begin = begin
        self._bounds = bounds(value.axes)
        self._numbers = {own: number for number, own in enumerate(self._bounds)}
        self.seconds = np.empty((len(self._bounds), *begin.shape))
        for number, bound in enumerate(self._bounds):
            own = begin.copy()
            slices = []
            for group, left, seconds in value.steps(bound):
                if left == bound:
                    slices.append((group, seconds))
                    continue
                _improve(own, self.seconds[self._numbers[left]], group, seconds)
            for less in self._less(bound):
                np.minimum(own, self.seconds[less], out=own)
            for group, seconds in slices * len(value.axes):
                _improve(own, own, group, seconds)
            self.seconds[number] = own

    def _less(self, bound: tuple[int, ...]) -> Iterator[int]:
        """Bounds that allow one crossing less."""
        for place, times in enumerate(bound):
            if times:
                yield self._numbers[(*bound[:place], times - 1, *bound[place + 1 :])]

    def settled(self, fixed: Floats) -> Floats:
        """With the fixed time of its own collectives."""
        return np.asarray((self.seconds + fixed[:, None, None]).min(axis=0))

    def bound_of(self, row: int, end: int, fixed: Floats) -> int:
        """Of the cheapest way, the bound that it keeps to."""
        return int(np.argmin(self.seconds[:, row, end] + fixed))

    def trace(self, bound: int, row: int, end: int) -> tuple[int, list[Move]]:
        """Where the cheapest way to a layout begins, and its moves."""
        moves: list[Move] = []
        while self.seconds[bound, row, end] != self._begin[row, end]:
            bound, step = self._before(bound, row, end)
            if step is not None:
                own, end = self.value.move(step)
                moves.append(own)
        return end, moves[::-1]

    def _before(self, bound: int, row: int, end: int) -> tuple[int, int | None]:
        wanted = self.seconds[bound, row, end]
        for less in self._less(self._bounds[bound]):
            if self.seconds[less, row, end] == wanted:
                return less, None
        for group, left, seconds in self.value.steps(self._bounds[bound]):
            place = np.searchsorted(group.targets, end)
            if place == len(group.targets) or group.targets[place] != end:
                continue
            before = self._numbers[left]
            stop = [*group.firsts, len(group.starts)][place + 1]
            for edge in range(group.firsts[place], stop):
                if self.seconds[before, row, group.starts[edge]] + seconds[edge] == wanted:
                    return before, int(group.numbers[edge])
        raise AssertionError("a way has a last move")


def _improve(own: Floats, before: Floats, group: _Moves, seconds: Floats) -> None:
    """In place, by one move more."""
    made = np.minimum.reduceat(before[:, group.starts] + seconds, group.firsts, axis=1)
    own[:, group.targets] = np.minimum(own[:, group.targets], made)
