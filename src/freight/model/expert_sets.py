"""Experts of a layer that are computed together: their weights by the same names, and tables of
these for loops that take several by one call.

A matrix may lie in parts, some of them where they stay and others in the ring that weights stream
through: a layer's experts are cut alike, but for one that reaches over the ring's end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np
import torch

from freight.kernels.device_rows import DeviceRows
from freight.kernels.few_pairs import SeveralRows
from freight.kernels.grouped import CompressedRows
from freight.kernels.integers import IntegerRows
from freight.model.frame import WeightParts
from freight.model.programme import Project, Unit
from freight.model.set_rows import Cut, SetRows

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
        found = [_cut(steps, own, gates=gates) for own in self.weights]
        known = Counter(own for own in found if own is not None)
        if not known:
            return None
        ((cuts, _),) = known.most_common(1)
        alike = [number for number, own in enumerate(found) if own == cuts]
        sets = [[_matrix(steps, self.weights[number], cut) for cut in cuts] for number in alike]
        rows = SeveralRows.of(sets) or (None if gates else DeviceRows.of(sets))
        if rows is None:
            return None
        places = np.full(len(found), -1)
        places[alike] = np.arange(len(alike))
        return SetRows(rows=rows, cuts=cuts, places=places)


def _cut(
    steps: Sequence[Project], weights: Mapping[str, WeightParts], *, gates: bool
) -> tuple[Cut, ...] | None:
    """How an expert's matrices are cut; None where no loop takes them like that."""
    borders: list[set[int]] = []
    for step in steps:
        parts = weights[step.weight.name]
        if any(isinstance(rows, IntegerRows) for _, rows in parts):
            return None  # met by tokens as these are
        borders.append({first for first, _ in parts} | {step.weight.num_rows})
    if not gates:
        ranges = [(step, itertools.pairwise(sorted(own))) for step, own in enumerate(borders)]
        return tuple((step, *own) for step, pairs in ranges for own in pairs)
    both = borders[0] | borders[1]
    if any(own != both for own in borders) and any(
        isinstance(rows, CompressedRows) and rows.number_format.rows_together > 1
        for step in steps
        for _, rows in weights[step.weight.name]
    ):
        return None
    pairs = itertools.pairwise(sorted(both))
    return tuple((step, *own) for own in pairs for step in range(len(steps)))


def _matrix(steps: Sequence[Project], weights: Mapping[str, WeightParts], cut: Cut) -> _Matrix:
    number, first, last = cut
    step = steps[number]
    parts = sorted(weights[step.weight.name], key=itemgetter(0))
    begin, rows = next(own for own in reversed(parts) if own[0] <= first)
    assert not isinstance(rows, IntegerRows)
    if (first - begin, last - begin) != (0, rows.shape[0]):
        low, high = first - begin, last - begin
        rows = rows[low:high] if isinstance(rows, torch.Tensor) else rows.rows(low, high)
    if step.bias is None:
        return rows, None
    bias = weights[step.bias.name][0][1]
    assert isinstance(bias, torch.Tensor)
    begin = step.weight.first_row
    return rows, bias.view(-1)[begin + first : begin + last]
