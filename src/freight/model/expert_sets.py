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
            parts = [own[name] for own in self.weights for name in key]
            self._tables[key] = None
            if all(map(_is_whole, parts)):
                sets = [[_matrix(step, own) for step in steps] for own in self.weights]
                self._tables[key] = SeveralRows.of(sets)
        return self._tables[key]


def _is_whole(parts: WeightParts) -> bool:
    """Whether rows lie together, and are met by tokens as these are."""
    return len(parts) == 1 and not isinstance(parts[0][1], IntegerRows)


def _matrix(step: Project, weights: Mapping[str, WeightParts]) -> _Matrix:
    rows = weights[step.weight.name][0][1]
    assert not isinstance(rows, IntegerRows)
    if step.bias is None:
        return rows, None
    bias = weights[step.bias.name][0][1]
    assert isinstance(bias, torch.Tensor)
    first = step.weight.first_row
    return rows, bias.view(-1)[first : first + rows.shape[0]]
