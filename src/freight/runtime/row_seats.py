"""Where rows keep what layers without keys know of them: seats, as many as rows are in the block.

Knows rows by their names; what lies in a seat is another file's business.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from freight.kernels.row_states import RowStates
from freight.model.batch import RowKey, RowSpan

__all__ = ["ChunkStates", "RowSeats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStates:
    """The seats of the rows of some tokens, and (from, to) of siblings that get the same state."""

    rows: RowStates
    copies: tuple[tuple[int, int], ...]


class RowSeats:
    """A seat for each row that is known: ``alive`` has those that are, whoever lets them go."""

    def __init__(self, num_seats: int, alive: Collection[Hashable]) -> None:
        self._free = list(range(num_seats))
        self._alive = alive
        self._taken: dict[RowKey, int] = {}

    def of(self, row: RowKey) -> int:
        """The seat of a row, which it keeps for as long as it is alive."""
        if row not in self._taken:
            if not self._free:
                self._take_back()
            self._taken[row] = heappop(self._free)
        return self._taken[row]

    def _take_back(self) -> None:
        for row in [row for row in self._taken if row not in self._alive]:
            heappush(self._free, self._taken.pop(row))
        heapify(self._free)
        assert self._free, "more rows are alive than there are seats"

    def index(self, spans: Sequence[RowSpan], start: int) -> ChunkStates:
        """Of rows whose tokens begin at ``start``."""
        seats = [self.of(span.row) for span in spans]
        return ChunkStates(
            rows=RowStates(
                starts=np.array([span.start - start for span in spans], np.int64),
                counts=np.array([span.num_new for span in spans], np.int64),
                seats=np.array(seats, np.int64),
                is_new=np.array([span.kv_len == 0 for span in spans], np.int64),
            ),
            copies=tuple(
                (seat, self.of(sibling))
                for span, seat in zip(spans, seats, strict=True)
                for sibling in span.siblings
            ),
        )
