"""Meshes of chips and layouts of tensors over them, and how both are written.

A layout says for each axis of a mesh one of three things: it cuts a dim, values are partial sums
over it, or it is not named and values are replicated over it. Knows no tensors and no model.

    B L E_x F_zy {+w}

is a tensor of dims B, L, E and F: E is cut by the axis x, F by z and, within each part of that, by
y; values are partial sums over w. The order of axes is part of a layout: the first is outermost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations, product
from math import prod
from typing import Final

from freight.errors import InputError

__all__ = ["Layout", "Mesh", "all_layouts"]

_DIM: Final = re.compile(r"([A-Z][A-Za-z0-9]*)(?:_([a-z]+))?")
_PARTIAL: Final = re.compile(r"\{\+([a-z]+)\}")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Chips in a box: ``axes`` are (name, number of chips along it), names single small letters.

    Ranks are numbered with the last axis running fastest.
    """

    axes: tuple[tuple[str, int], ...]
    _sizes: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", dict(self.axes))
        wrong = [name for name, _ in self.axes if not re.fullmatch("[a-z]", name)]
        small = [f"{name} of {size}" for name, size in self.axes if size < 1]
        if wrong or small or len(set(self.names)) < len(self.axes):
            raise InputError(
                f"A mesh with the axes {self.axes} was described.",
                "Axes have different small letters as names, and at least one chip.",
                "Write them like x=4 y=4 z=4.",
            )

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """``Mesh.of(x=4, y=2)``"""
        return cls(tuple(sizes.items()))

    @property
    def names(self) -> str:
        return "".join(name for name, _ in self.axes)

    @property
    def num_chips(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, axes: Iterable[str]) -> int:
        """Chips that these axes have together."""
        found = 1
        for axis in axes:
            found *= self._sizes[axis]
        return found

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a chip is, by axis."""
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)


@dataclass(frozen=True, slots=True)
class Layout:
    """``cuts`` are the axes that cut each of ``dims``, outermost first; ``partial`` are those over
    which values are partial sums. Raises InputError where an axis or a dim is named twice."""

    dims: tuple[str, ...]
    cuts: tuple[str, ...]
    partial: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", "".join(sorted(self.partial)))
        axes = self.axes
        if len(set(axes)) < len(axes) or len(set(self.dims)) < len(self.dims):
            raise InputError(
                f"The layout {self} was described.",
                "An axis does one thing to a tensor, and a tensor has each dim once.",
                "Name each axis and each dim once.",
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """What ``str`` prints, as "B L E_x {+yz}". Raises InputError for anything else."""
        return _parsed(text)

    @property
    def axes(self) -> str:
        """Axes that are not replicated over."""
        return "".join(self.cuts) + self.partial

    def cut(self, dim: str) -> str:
        """The axes that cut a dim, outermost first."""
        return self.cuts[self.dims.index(dim)]

    def with_cut(self, dim: str, axes: str) -> Layout:
        place = self.dims.index(dim)
        return replace(self, cuts=(*self.cuts[:place], axes, *self.cuts[place + 1 :]))

    def shape(self, sizes: Mapping[str, float], mesh: Mesh) -> tuple[float, ...]:
        """What each chip has of a tensor; InputError where a dim does not divide. A dim that is not
        cut may be a mean, as tokens per expert are."""
        found = []
        for dim, axes in zip(self.dims, self.cuts, strict=True):
            parts = mesh.size(axes) if axes else 1
            if parts > 1 and sizes[dim] % parts:
                raise InputError(
                    f"The dim {dim} of {sizes[dim]} was to be cut over {parts} chips, {self}.",
                    f"{sizes[dim]} does not divide by {parts}.",
                    f"Pad it to {-(-sizes[dim] // parts) * parts}, or choose another mesh.",
                )
            found.append(sizes[dim] // parts if parts > 1 else sizes[dim])
        return tuple(found)

    def elements(self, sizes: Mapping[str, float], mesh: Mesh) -> float:
        """Elements that each chip has."""
        return prod(self.shape(sizes, mesh))

    def __str__(self) -> str:
        words = [
            f"{dim}_{axes}" if axes else dim for dim, axes in zip(self.dims, self.cuts, strict=True)
        ]
        return " ".join([*words, *([f"{{+{self.partial}}}"] if self.partial else [])])


@cache  # a planner writes the same layouts for every mesh
def _parsed(text: str) -> Layout:
    dims, cuts, partial = [], [], ""
    for word in text.split():
        dim, sums = _DIM.fullmatch(word), _PARTIAL.fullmatch(word)
        if dim is not None and not partial:
            dims.append(dim[1])
            cuts.append(dim[2] or "")
        elif sums is not None and not partial:
            partial = sums[1]
        else:
            raise InputError(
                f"The layout {text!r} was given.",
                f"{word!r} is neither a dim with the axes that cut it nor, at the end, the axes "
                "over which values are partial sums.",
                "Write it like 'B L E_x F_yz' or 'B L E {+x}'.",
            )
    return Layout(tuple(dims), tuple(cuts), partial)


def all_layouts(dims: tuple[str, ...], axes: str) -> Iterator[Layout]:
    """All layouts of some dims over some axes."""
    places = range(len(dims) + 2)  # a dim, partial, replicated
    for doing in product(places, repeat=len(axes)):
        own = ["".join(a for a, d in zip(axes, doing, strict=True) if d == own) for own in places]
        for cuts in product(*(permutations(own[place]) for place in range(len(dims)))):
            yield Layout(dims, tuple(map("".join, cuts)), own[len(dims)])
