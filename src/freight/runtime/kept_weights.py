"""Weights that stay in memory between runs of one model.

Each run plans anew. Where the next plan has the same rows of weights stay in memory as the last
one, they are still there; else they are let go, and what it wants is loaded.
"""

from __future__ import annotations

import torch

from freight.memory.tier import Arena, host_arena
from freight.plan.layout import WeightLayout
from freight.plan.parts import Part

__all__ = ["InPlace", "WeightKeeper"]


class WeightKeeper:
    """Keeps the memory of such weights while nobody runs the model. Of runs side by side one has
    it, the others load their own."""

    def __init__(self) -> None:
        self._kept: tuple[Arena, WeightLayout] | None = None

    @property
    def held_bytes(self) -> int:
        """Of this process's memory: what a plan may count as free."""
        return 0 if self._kept is None else self._kept[0].num_bytes

    def lend(self, layout: WeightLayout) -> tuple[Arena, bool]:
        """Memory for the weights that stay, and whether they are in it already. It is the
        caller's."""
        kept, self._kept = self._kept, None
        if kept is not None and _staying(kept[1]) == _staying(layout):
            kept[0].rewind()
            return kept[0], True
        del kept  # before as much is taken again
        return host_arena(layout.held_bytes[layout.compute_tier]), False

    def take_back(self, arena: Arena, layout: WeightLayout) -> None:
        """What was lent, with all of the layout's weights in their places."""
        self._kept = arena, layout

    def close(self) -> None:
        """Give the memory back."""
        self._kept = None


class InPlace:
    """A ``RowLoader`` of weights that are where they are to be."""

    def fill(self, name: str, first_row: int, out: torch.Tensor) -> None:
        """There is nothing to do."""


def _staying(layout: WeightLayout) -> list[tuple[Part, ...]]:
    """The rows of each unit that stay in memory, and those of tables, in the order in which they
    are placed."""
    tables = [part for table in layout.tables for part in table.parts]
    near = tuple(part for part in tables if part.tier == layout.compute_tier)
    return [near, *(tuple(unit.resident) for unit in layout.all_units)]
