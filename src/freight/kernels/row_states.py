"""Which of the states that are kept for rows belong to the rows of some tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RowStates"]

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStates:
    """Of R rows each brings ``counts[i]`` tokens from ``starts[i]`` on; its state is in
    ``seats[i]``, and is nothing yet where ``is_new[i]`` is not 0."""

    starts: Places
    counts: Places
    seats: Places
    is_new: Places
