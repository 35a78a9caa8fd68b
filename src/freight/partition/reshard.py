"""The cheapest moves from one layout of a tensor to another: keys and values between phases.

A cache that prefill has left must lie as decoding wants it, in the same order of axes. Where every
chip has all keys, the part that it needs is a slice of them. Knows no model.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from freight.errors import InputError
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move, legal_moves, move, moved_elements
from freight.partition.sharded import Sizes

__all__ = ["reshard"]


def reshard(
    before: Layout, after: Layout, sizes: Sizes, mesh: Mesh
) -> tuple[tuple[Move, ...], float]:
    """Moves and the elements that each chip sends for them, as few as can be; a tensor without
    partial sums stays without. Moves stay among dims that either layout cuts.

    InputError where a dim does not divide.
    """
    for layout in (before, after):
        layout.shape(sizes, mesh)
    dims = {dim for own in (before, after) for dim in own.dims if own.cut(dim)}
    order = count()
    open_: list[tuple[float, int, int, Layout, tuple[Move, ...]]] = [(0.0, 0, 0, before, ())]
    done: set[Layout] = set()
    while open_:
        sent, length, _, layout, moves = heappop(open_)
        if layout == after:
            return moves, sent
        if layout in done:
            continue
        done.add(layout)
        for own in legal_moves(layout, mesh.names):
            if {own.source, own.target} - {""} <= dims:
                reached = move(layout, own)
                try:
                    reached.shape(sizes, mesh)
                except InputError:
                    continue
                more = sent + moved_elements(layout, own, sizes, mesh)
                heappush(open_, (more, length + 1, next(order), reached, (*moves, own)))
    raise AssertionError(f"no moves lead from {before} to {after}")  # gathering all always does
