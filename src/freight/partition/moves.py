"""Moves between layouts: what each makes of a layout, and how many elements each chip sends.

All moves of several axes are joint: one collective on the flattened mesh of these axes. A chip
sends of D elements that are gathered, scattered or exchanged over K chips D (K - 1) / K, of D that
are reduced for all twice that (Pope et al., appendix A.1). Knows no links and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Literal

from freight.errors import InputError
from freight.partition.layout import Layout, Mesh

__all__ = ["Move", "MoveKind", "legal_moves", "move", "moved_elements"]

MoveKind = Literal["slice", "all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


@dataclass(frozen=True, slots=True)
class Move:
    """``source`` is the dim that the axes no longer cut, ``target`` the one that they cut now.

    ``axes`` are in the order in which they cut the target, or have cut the source where there is no
    target. They are the innermost axes of either dim: parts of a chip's own part.
    """

    kind: MoveKind
    axes: str
    source: str = ""
    target: str = ""

    def __str__(self) -> str:
        dims = " to ".join(filter(None, (self.source, self.target)))
        return f"{self.kind} over {self.axes}" + (f" ({dims})" if dims else "")


def move(layout: Layout, own: Move) -> Layout:
    """The layout after a move. Raises InputError where the move cannot be made."""
    return _moved(layout, own)


@cache  # of no size: a planner makes the same moves on every mesh
def _moved(layout: Layout, own: Move) -> Layout:
    problem = _problem(layout, own)
    if problem:
        raise InputError(
            f"The move {own} of a tensor laid out as {layout} was asked for.",
            problem,
            "Make another move first, or name the axes in their order.",
        )
    if own.kind in ("reduce-scatter", "all-reduce"):
        left = "".join(axis for axis in layout.partial if axis not in own.axes)
        layout = replace(layout, partial=left)
    if own.source:
        cut = layout.cut(own.source)
        layout = layout.with_cut(own.source, cut[: len(cut) - len(own.axes)])
    if own.target:
        layout = layout.with_cut(own.target, layout.cut(own.target) + own.axes)
    return layout


def _problem(layout: Layout, own: Move) -> str:
    """Why a move cannot be made; nothing if it can."""
    wants_source = own.kind in ("all-gather", "all-to-all")
    wants_target = own.kind in ("slice", "reduce-scatter", "all-to-all")
    for dim, wanted in ((own.source, wants_source), (own.target, wants_target)):
        if bool(dim) != wanted:
            return "It names a dim too many, or one too few."
        if dim and dim not in layout.dims:
            return f"The tensor has no dim {dim}."
    if not own.axes or len(set(own.axes)) < len(own.axes) or own.source == own.target != "":
        return "A move is over some axes, each once, from one dim to another."
    if own.kind == "slice" and set(own.axes) & set(layout.axes):
        return "Only what is replicated can be sliced."
    if own.kind in ("reduce-scatter", "all-reduce") and not set(own.axes) <= set(layout.partial):
        return "Only partial sums can be reduced."
    if own.source:
        cut = layout.cut(own.source)
        inner = cut[len(cut) - len(own.axes) :]
        if sorted(inner) != sorted(own.axes) or (not own.target and inner != own.axes):
            return f"The innermost axes of {own.source} are {cut or 'none'}, outermost first."
    return ""


def moved_elements(layout: Layout, own: Move, sizes: Mapping[str, float], mesh: Mesh) -> float:
    """Elements that each chip sends; exact where chips send equally many, otherwise their mean.

    Raises InputError where a dim does not divide into the parts that the move needs.
    """
    after = move(layout, own)
    before_elements, after_elements = layout.elements(sizes, mesh), after.elements(sizes, mesh)
    chips = mesh.size(own.axes)
    if own.kind == "slice":
        return 0.0
    if own.kind == "all-gather":
        return after_elements * (chips - 1) / chips
    times = 2 if own.kind == "all-reduce" else 1
    return times * before_elements * (chips - 1) / chips


def legal_moves(layout: Layout, axes: str) -> Iterator[Move]:
    """All moves of a tensor that can be made over some of a mesh's ``axes``."""
    for some in _orders(layout.partial):
        if list(some) == sorted(some):
            yield Move("all-reduce", some)
        for dim in layout.dims:
            yield Move("reduce-scatter", some, target=dim)
    for some in _orders("".join(axis for axis in axes if axis not in layout.axes)):
        for dim in layout.dims:
            yield Move("slice", some, target=dim)
    for source, cut in zip(layout.dims, layout.cuts, strict=True):
        for first in range(len(cut)):
            yield Move("all-gather", cut[first:], source=source)
            for order in map("".join, permutations(cut[first:])):
                for target in layout.dims:
                    if target != source:
                        yield Move("all-to-all", order, source=source, target=target)


def _orders(axes: str) -> Iterator[str]:
    """Some of the axes, at least one, in any order."""
    for count in range(1, len(axes) + 1):
        yield from map("".join, permutations(axes, count))
