"""What several experts are multiplied by in some steps, as one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.device_rows import DeviceRows
from freight.kernels.few_pairs import SeveralRows
from freight.kernels.grouped import CompressedRows
from freight.kernels.pairs import most_of_each, most_one_by_one
from freight.model.tiles import TOKENS_OF_A_LAUNCH

__all__ = ["Cut", "SetRows", "cut_rows", "lie_together"]

Cut = tuple[int, int, int]
"""Some rows of what a step multiplies by: the number of the step, the first row, and behind the
last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetRows:
    """What experts are multiplied by in some steps: ``rows`` has the ``cuts`` of each of those that
    are cut alike. ``places`` [n] says which of its sets an expert is, or -1."""

    rows: SeveralRows | DeviceRows
    cuts: Sequence[Cut]
    places: npt.NDArray[np.int64]

    def calls(
        self, numbers: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> list[tuple[npt.NDArray[np.bool_], Callable[..., None]]]:
        """Which of the experts ``numbers`` [n], that have so many tokens each, are multiplied by
        one call, and what is called."""
        is_known, rows = self.places[numbers] >= 0, self.rows
        if isinstance(rows, DeviceRows):
            return [(is_known & (counts <= TOKENS_OF_A_LAUNCH), rows.multiply)]
        few = is_known & (counts <= most_one_by_one(rows))
        more = is_known & ~few & (counts <= most_of_each(rows))
        return [
            (few, partial(rows.multiply, are_few=True)),
            (more, partial(rows.multiply, are_few=False)),
        ]

    def outs(self, outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of what steps make [T, rows], what each cut does."""
        return [outs[step][:, first:last] for step, first, last in self.cuts]


def lie_together(rows: object) -> bool:
    """Whether they can only be cut where several end."""
    return isinstance(rows, CompressedRows) and rows.number_format.rows_together > 1


def cut_rows(
    rows: torch.Tensor | CompressedRows, low: int, high: int
) -> torch.Tensor | CompressedRows:
    """Those between two."""
    return rows[low:high] if isinstance(rows, torch.Tensor) else rows.rows(low, high)
