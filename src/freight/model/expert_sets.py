"""Experts of a layer whose weights all lie where they are computed, and what of them is known once
for all: their weights by the same names, and tables of these for loops that take several by one
call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from freight.kernels.few_pairs import SeveralRows
from freight.kernels.grouped import CompressedRows
from freight.kernels.integers import IntegerRows
from freight.model.frame import WeightParts
from freight.model.programme import Project, Unit

__all__ = ["ExpertSets"]

_Matrix = tuple[torch.Tensor | CompressedRows, torch.Tensor | None]


class ExpertSets:
    """Neighbours in their layer, with their ``weights``; names are those of the first one's."""

    def __init__(self, units: Sequence[Unit], weights: Sequence[Mapping[str, WeightParts]]) -> None:
        self.first = units[0]
        self.count = len(units)
        names = [own.name for own in self.first.weights]
        self.weights: list[Mapping[str, WeightParts]] = [
            {name: parts[own.name] for name, own in zip(names, unit.weights, strict=True)}
            for unit, parts in zip(units, weights, strict=True)
        ]
        self._tables: dict[tuple[str, ...], SeveralRows | None] = {}

    def find_rows(self, steps: Sequence[Project]) -> SeveralRows | None:
        """What these steps of the first one multiply by, in all; None where no loop takes them."""
        key = tuple(step.weight.name for step in steps)
        if key not in self._tables:
            sets = [[_matrix(step, own) for step in steps] for own in self.weights]
            whole = [[each for each in own if each is not None] for own in sets]
            are_whole = all(None not in own for own in sets)
            self._tables[key] = SeveralRows.of(whole) if are_whole else None
        return self._tables[key]


def _matrix(step: Project, weights: Mapping[str, WeightParts]) -> _Matrix | None:
    """None where it is in several parts, or met by integers."""
    parts = weights[step.weight.name]
    rows = parts[0][1]
    if len(parts) > 1 or isinstance(rows, IntegerRows):
        return None
    if step.bias is None:
        return rows, None
    bias = weights[step.bias.name][0][1]
    assert isinstance(bias, torch.Tensor)
    first = step.weight.first_row
    return rows, bias.view(-1)[first : first + rows.shape[0]]
