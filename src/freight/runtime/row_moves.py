"""Rows under way that change tiers: in a sweep each is brought from where it was, and left where it
will be.

Which rows, and when, is the admission's business. Knows rows, seats and pages, no sweeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from freight.memory.kv_cache import Home, KVCache
from freight.runtime.answers import Row

__all__ = ["RowMoves"]

_SPEED: Final = ("compute", "cpu", "disk")
"""Tiers, the fastest first."""


class RowMoves:
    """``seats`` of a micro-batch are (tier, whether the CPU attends its rows, how many there are).

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
        self._is_on = is_on and len(homes) > 1
        self._shares_elsewhere = shares_elsewhere
        self._under_way: list[tuple[Row, int]] = []

    @property
    def can_leave(self) -> bool:
        """Whether there are tiers that rows could move to at all."""
        return self._is_on

    def home(self, seat: int) -> Home:
        return self._seats[seat][0]

    def begin(self, row: Row, seat: int) -> None:
        """Move a row in the next sweep."""
        home, is_delegated, _ = self._seats[seat]
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
        if not self._is_on or not any(
            left > 0 and not is_delegated and home != _SPEED[-1]
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

    def lacks(self, home: Home, rows: Iterable[Row]) -> bool:
        """Whether a tier has too few pages for what its ``rows`` will have after one more token
        each, those counted that are about to leave it."""
        wanted, free = 0, self._kv.num_free_pages(home)
        for row in rows:
            own = self._kv.rows[row.key]
            if own.origin is not None and own.origin.home == home:
                free += len(own.origin.own)
            elif own.home == home:
                wanted += self._kv.pages_to_grow(row.key, row.num_tokens + 1)
        return wanted > free

    def farther(self, row: Row, home: Home, free: Sequence[int]) -> Iterator[int]:
        """Seats on slower tiers than ``home`` that a row there could have. Of those that the CPU
        attends there are as many as were planned; of others the tier's pages are the bound."""
        if self._kv.rows[row.key].home != home or not self._may_move(row):
            return
        if row.prefix is not None and not self._shares_elsewhere:
            return
        for seat, (other, is_delegated, count) in enumerate(self._seats):
            if not count or _SPEED.index(other) <= _SPEED.index(home):
                continue
            if is_delegated and (free[seat] <= 0 or row.prefix is not None):
                continue
            yield seat

    def _may_move(self, row: Row) -> bool:
        own = self._kv.rows[row.key]
        return row.decodes and not row.is_prefix and not own.is_delegated and own.origin is None
