"""What several experts are multiplied by in some steps, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.few_pairs import SeveralRows

__all__ = ["Cut", "SetRows"]

Cut = tuple[int, int, int]
"""Some rows of what a step multiplies by: the number of the step, the first row, and behind the
last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetRows:
    """What experts are multiplied by in some steps: ``rows`` has the ``cuts`` of each of those that
    are cut alike. ``places`` [n] says which of its sets an expert is, or -1."""

    rows: SeveralRows
    cuts: Sequence[Cut]
    places: npt.NDArray[np.int64]

    def outs(self, outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of what steps make [T, rows], what each cut does."""
        return [outs[step][:, first:last] for step, first, last in self.cuts]
