"""Rows under way that change tiers: in a sweep each is brought from where it was, and left where it
will be.

Which rows, and when, is the admission's business. Knows rows, seats and pages, no sweeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from freight.memory.kv_cache import KVCache
from freight.memory.passage import Home
from freight.runtime.answers import Row

__all__ = ["RowMoves"]

_SPEED: Final = ("compute", "cpu", "disk")
"""Tiers, the fastest first."""


class RowMoves:
    """``seats`` of a micro-batch are (tier, whether the CPU attends its rows, how many there are);
    ``fast`` are the tiers that rows could leave, the fastest first.

    Rows that the CPU attends do not move: what it appends to their keys, no load waits for.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        seats: Sequence[tuple[Home, bool, int]],
        *,
        is_on: bool,
        shares_elsewhere: bool,
    ) -> None:
        self._kv = kv_cache
        self._seats = seats
        homes = {home for home, _, count in seats if count}
        self.fast: list[Home] = [home for home in _SPEED if home in homes][:-1] if is_on else []
        self._shares_elsewhere = shares_elsewhere
        self._under_way: list[tuple[Row, int]] = []

    def home(self, seat: int) -> Home:
        return self._seats[seat][0]

    def begin(self, row: Row, seat: int) -> int:
        """Move a row in the next sweep; pages that this frees, and spares, for the one after."""
        home, is_delegated, _ = self._seats[seat]
        freed = len(self._kv.rows[row.key].own) + self._wanted(row)
        self._kv.move(
            row.key,
            home,
            row.num_tokens,
            is_delegated=is_delegated,
            shared=None if row.prefix is None else row.prefix.key,
        )
        row.is_moving = True
        # Until it is on the compute tier it comes with those that pass through a slot.
        row.seat = max(row.seat, seat)
        self._under_way.append((row, seat))
        return freed

    def settle(self) -> None:
        """The sweep has passed: those that have not ended are in their new places."""
        for row, seat in self._under_way:
            row.is_moving = False
            if row.key in self._kv.rows:
                self._kv.settle(row.key)
                row.seat = seat
        self._under_way = []

    def nearer(self, rows: Iterable[Row], free: Sequence[int]) -> Iterator[tuple[Row, list[int]]]:
        """Rows that could move to faster tiers, the oldest first, with the seats ``free`` there;
        these are looked at again for each."""
        if not any(
            left > 0 and not is_delegated and home in self.fast
            for (home, is_delegated, _), left in zip(self._seats, free, strict=True)
        ):
            return
        for row in sorted(filter(self._may_move, rows), key=lambda row: row.entry):
            own = _SPEED.index(self._kv.rows[row.key].home)
            seats = [
                seat
                for seat, (home, is_delegated, _) in enumerate(self._seats)
                if free[seat] > 0 and not is_delegated and _SPEED.index(home) < own
            ]
            if seats:
                yield row, seats

    def missing(self, home: Home, rows: Iterable[Row]) -> int:
        """How many pages a tier has too few of for what its ``rows`` will have after one more token
        each."""
        own = [row for row in rows if self._kv.rows[row.key].home == home]
        return sum(map(self._wanted, own)) - self._kv.num_free_pages(home)

    def _wanted(self, row: Row) -> int:
        """Pages that a row needs for one more token than it has, unless that ends it."""
        ends = len(row.new_ids) + 1 >= row.params.max_tokens
        return 0 if ends else self._kv.pages_to_grow(row.key, row.num_tokens + 1)

    def farther(self, row: Row, home: Home, free: Sequence[int]) -> list[int]:
        """Seats on slower tiers than ``home`` that a row there could have: on disk, and where the
        CPU attends, those that are free; in RAM the tier's pages are the bound."""
        if self._kv.rows[row.key].home != home or not self._may_move(row):
            return []
        if row.prefix is not None and not self._shares_elsewhere:
            return []
        return [
            seat
            for seat, (other, is_delegated, count) in enumerate(self._seats)
            if count
            and _SPEED.index(other) > _SPEED.index(home)
            and (free[seat] > 0 or not (is_delegated or other == "disk"))
            and not (is_delegated and row.prefix is not None)
        ]

    def _may_move(self, row: Row) -> bool:
        own = self._kv.rows[row.key]
        return row.decodes and not row.is_prefix and not own.is_delegated and own.origin is None
