"""Experts of a layer that are computed together: their weights by the same names, and tables of
these for loops that take several by one call.

A matrix may lie in parts, some of them where they stay and others in the ring that weights stream
through: a layer's experts are cut alike, but for one that reaches over the ring's end.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from freight.kernels.device_rows import DeviceRows
from freight.kernels.few_pairs import SeveralRows
from freight.kernels.grouped import CompressedRows
from freight.kernels.integers import IntegerRows
from freight.model.frame import WeightParts
from freight.model.programme import Project, Unit
from freight.model.set_rows import Cut, SetRows, cut_rows, lie_together

__all__ = ["ExpertSets"]

_Matrix = tuple[torch.Tensor | CompressedRows, torch.Tensor | None]


class ExpertSets:
    """With their ``weights``, by the names of the first one's."""

    def __init__(self, units: Sequence[Unit], weights: Sequence[Mapping[str, WeightParts]]) -> None:
        self.first = units[0]
        names = [own.name for own in self.first.weights]
        self.weights: list[Mapping[str, WeightParts]] = [
            {name: parts[own.name] for name, own in zip(names, unit.weights, strict=True)}
            for unit, parts in zip(units, weights, strict=True)
        ]
        self._tables: dict[tuple[bool, tuple[str, ...]], SetRows | None] = {}

    def find_rows(self, steps: Sequence[Project], *, gates: bool = False) -> SetRows | None:
        """What these steps of the first one multiply by, in all; None where no loop takes them.
        Where the second step ``gates`` the first one both are cut alike."""
        key = gates, tuple(step.weight.name for step in steps)
        if key not in self._tables:
            self._tables[key] = self._make(steps, gates=gates)
        return self._tables[key]

    def _make(self, steps: Sequence[Project], *, gates: bool) -> SetRows | None:
        found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for number, own in enumerate(self.weights):
            parts = [own[step.weight.name] for step in steps]
            if not any(isinstance(rows, IntegerRows) for some in parts for _, rows in some):
                key = tuple(tuple(first for first, _ in some) for some in parts)
                found.setdefault(key, []).append(number)
        if not found:
            return None
        firsts, alike = max(found.items(), key=lambda own: len(own[1]))
        if gates and len({*firsts}) > 1:
            parts = [self.weights[alike[0]][step.weight.name] for step in steps]
            if any(lie_together(rows) for some in parts for _, rows in some):
                return None
        cuts = _cuts(steps, firsts, gates=gates)
        sets = [_matrices(steps, self.weights[number], cuts) for number in alike]
        rows = SeveralRows.of(sets) or (None if gates else DeviceRows.of(sets))
        if rows is None:
            return None
        places = np.full(len(self.weights), -1)
        places[alike] = np.arange(len(alike))
        return SetRows(rows=rows, cuts=[cut.rows for cut in cuts], places=places)


class _OwnCut(NamedTuple):
    """Rows of a step's matrix, and the number of the part in which they are, from ``low`` on."""

    rows: Cut
    part: int
    low: int
    is_whole: bool


def _cuts(
    steps: Sequence[Project], firsts: Sequence[tuple[int, ...]], *, gates: bool
) -> list[_OwnCut]:
    """How matrices are cut whose parts, in any order, have these first rows: in step after step, or
    where one gates the other by turns."""
    borders = [{*own, step.weight.num_rows} for step, own in zip(steps, firsts, strict=True)]
    if gates:
        pairs = itertools.pairwise(sorted(set().union(*borders)))
        found = [(step, *own) for own in pairs for step in range(len(steps))]
    else:
        ranges = enumerate(itertools.pairwise(sorted(own)) for own in borders)
        found = [(step, *own) for step, pairs in ranges for own in pairs]
    cuts = []
    for step, first, last in found:
        begin = max(own for own in firsts[step] if own <= first)
        end = min(own for own in borders[step] if own > begin)
        cuts.append(
            _OwnCut(
                rows=(step, first, last),
                part=firsts[step].index(begin),
                low=first - begin,
                is_whole=(begin, end) == (first, last),
            )
        )
    return cuts


def _matrices(
    steps: Sequence[Project], weights: Mapping[str, WeightParts], cuts: Sequence[_OwnCut]
) -> list[_Matrix]:
    found: list[_Matrix] = []
    for (number, first, last), part, low, is_whole in cuts:
        step = steps[number]
        rows, bias = weights[step.weight.name][part][1], None
        assert not isinstance(rows, IntegerRows)
        if not is_whole:
            rows = cut_rows(rows, low, low + last - first)
        if step.bias is not None:
            own = weights[step.bias.name][0][1]
            assert isinstance(own, torch.Tensor)
            bias = own.view(-1)[step.weight.first_row + first : step.weight.first_row + last]
        found.append((rows, bias))
    return found
