"""Who enters the block, and when: the rules that tell one schedule from another.

Zig-zag (``zigzag``) fills a block and lets it run until the last of its rows has ended; row-by-row
is a block of one micro-batch. The continuous rules let rows enter at every sweep: what the longest
answers leave idle and what rows have not grown into yet is used by others. How long answers will be
is not known: a row enters if what the rows are expected to grow to fits at every later sweep, and
has pages for what it has. Where that was wrong the youngest row moves to a slower tier, or where
there is no room either gives its pages up and is computed again later; the oldest never does, so
that all come to an end. Knows tokens and pages, no weights and no sweeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from freight.memory.kv_cache import KVCache
from freight.memory.passage import Home
from freight.model.batch import RowKey
from freight.plan.admission import Lengths, Outlook, Pace, Pages, always
from freight.plan.policy import Policy, Tier
from freight.runtime.answers import Answer, Row
from freight.runtime.prefixes import Prefixes
from freight.runtime.request import Request
from freight.runtime.row_moves import RowMoves
from freight.runtime.waiting import Waiting

__all__ = ["Admission", "Continuous", "by_key"]

_MOST_REFUSED: Final = 16

Room = Home | int
"""Where pages are limited: a tier, or the slot through which a micro-batch's offloaded rows pass,
by its number."""


@dataclass(kw_only=True, slots=True)
class _Load:
    """What a micro-batch has when rows enter: rows, the tokens that they bring next, and seats that
    are free."""

    free_seats: list[int]
    num_tokens: int = 0
    num_rows: int = 0

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.num_tokens += 1 if row.decodes else row.num_tokens - row.kv_len
            self.num_rows += 1
            self.free_seats[row.seat] -= not row.is_prefix


class Admission(ABC):
    """The block's micro-batches of rows; ``admit`` is called before every sweep."""

    def __init__(
        self,
        waiting: Waiting,
        policy: Policy,
        kv_cache: KVCache,
        *,
        shares_elsewhere: bool = False,
    ) -> None:
        """``shares_elsewhere``: there are pages on the compute tier for what prompts begin with,
        beside those of its rows."""
        self.block: list[dict[RowKey, Row]] = [{} for _ in range(policy.num_micro_batches)]
        self.tokens_per_sweep = 1.0
        """That rows make, on average: more than one where guesses come true."""
        self._waiting = waiting
        self._policy = policy
        self._kv = kv_cache
        self._prefixes = Prefixes(
            kv=kv_cache,
            is_on=policy.shares_prefixes and kv_cache.holds_beginnings,
            elsewhere=shares_elsewhere,
        )

    @abstractmethod
    def admit(self) -> None:
        """Let rows enter whose turn it is."""

    @abstractmethod
    def lend(self, k: int, row: Row, most: int) -> int:
        """For how many tokens, up to so many, a row of micro-batch ``k`` has pages behind its own
        in the next sweep."""

    def end(self, k: int, row: Row) -> None:
        """A row of micro-batch ``k`` leaves, and its pages are free."""
        self._prefixes.leave(row)
        self._kv.release(row.key)
        self.keep(k, row)

    def keep(self, k: int, row: Row) -> None:
        """A row leaves the block, and its pages stay."""
        del self.block[k][row.key]

    def has_rows(self) -> bool:
        return any(self.block)

    def _forget(self, request: Request | None) -> None:
        """Free beginnings that no row shares, but for that of ``request``."""
        for key in self._prefixes.forget_others(request):
            for rows in self.block:
                rows.pop(key, None)

    def _home(self, tier: Tier) -> Home:
        if tier == self._policy.compute_tier:
            return "compute"
        assert tier != "gpu"
        return tier


class Continuous(Admission):
    """Rows enter at every sweep, as far as seats, pages and the pace allow.

    A micro-batch has seats on the tiers by the policy's shares; samples enter together, on seats of
    one tier, unless they share their prompt. ``has_end``: there is a token that ends answers. The
    offloaded rows of a micro-batch have ``slot_pages`` together.
    """

    def __init__(
        self,
        waiting: Waiting,
        policy: Policy,
        kv_cache: KVCache,
        *,
        slot_pages: int,
        lengths: Lengths,
        has_end: bool,
        shares_elsewhere: bool = False,
    ) -> None:
        super().__init__(waiting, policy, kv_cache, shares_elsewhere=shares_elsewhere)
        self._lengths = lengths
        self._log_survival = lengths.log_survival()
        self._has_end = has_end
        self._seats = policy.homes(policy.micro_batch_size)
        self._most_together = max(count for _, _, count in self._seats)
        homes = {self._home(tier) for tier, _, count in self._seats if count}
        is_near = homes == {"compute"}
        self._parts = is_near or shares_elsewhere
        homes |= {"compute"} if shares_elsewhere else set()
        self._num_pages: dict[Room, int] = {home: kv_cache.num_free_pages(home) for home in homes}
        if not is_near:
            self._num_pages |= dict.fromkeys(range(policy.num_micro_batches), slot_pages)
        self._pace = Pace(policy, self._mean())
        self._loads: list[_Load] = []
        self._spare: dict[Room, int] = {}
        seats = [(self._home(t) if n else "compute", own, n) for t, own, n in self._seats]
        self._moves = RowMoves(
            kv_cache,
            seats,
            is_on=policy.moves_rows and not policy.recomputed and kv_cache.is_kept,
            shares_elsewhere=shares_elsewhere,
        )

    def admit(self) -> None:
        self._log_survival = self._lengths.log_survival()
        self._moves.settle()
        self._grow()
        self._make_room()
        if not self._waiting.is_empty():
            new, _ = self._waiting.next_rows(1)
            self._forget((new.answer if isinstance(new, Row) else new).request)
        self._pace.begin_sweep(self._mean())
        outlooks = {room: self._outlook(room) for room in self._num_pages}
        self._loads = [self._load(rows.values()) for rows in self.block]
        while not self._waiting.is_empty() and (self._pace.allows() or not self.has_rows()):
            if not self._enter(outlooks, self._most_together):
                parts = self._parts and self._prefixes.may_part(self._waiting.next_rows(1)[0])
                if (self.has_rows() and not parts) or not self._enter(outlooks, 1):
                    break
        if self._waiting.is_empty():
            self._come_nearer(outlooks)
        if self._policy.draft_tokens:
            self._spare = {room: self._spare_pages(room) for room in self._num_pages}

    def lend(self, k: int, row: Row, most: int) -> int:
        own = row.num_tokens - row.num_shared_tokens
        count = self._kv.pages_for(own + most) - self._kv.pages_for(own)
        rooms = self._rooms_passed(k, row)
        if count and (
            any(self._spare[room] < count for room in rooms)
            or not self._kv.grow(row.key, row.num_tokens + most)
        ):
            return self._kv.pages_for(own) * self._policy.page_tokens - own
        for room in rooms:
            self._spare[room] -= count
        return most

    def _spare_pages(self, room: Room) -> int:
        """Pages that nobody needs in the next sweep, nor in the one after it."""
        if isinstance(room, int):
            held = (row for row in self.block[room].values() if not row.is_prefix)
            own = (row for row in held if room in self._rooms_passed(room, row))
            counts = (row.num_tokens - row.num_shared_tokens for row in own)
            return self._num_pages[room] - sum(self._kv.pages_for(count + 1) for count in counts)
        rows = self._rows_in(room)
        is_whole = room == "disk" and self._kv.has_extents
        return self._num_pages[room] if is_whole else self._kv.num_free_pages(room) - len(rows)

    def _mean(self) -> float:
        """For how many sweeps rows stay: on the diagonal as long as any may."""
        is_even = self._policy.admission == "diagonal"
        mean = float(max(1, self._lengths.longest)) if is_even else self._lengths.mean()
        return max(1.0, mean / self.tokens_per_sweep)

    def _left(self, answer: Answer, num_made: int) -> tuple[int, int]:
        """The most tokens that it makes yet, and how many it has made, if it may end before."""
        params = answer.request.params
        ends_early = params.may_stop(has_end=self._has_end)
        ends_early &= self._policy.admission != "diagonal"
        return max(1, params.max_tokens - num_made), num_made if ends_early else -1

    def _outlook(self, room: Room) -> Outlook:
        outlook = Outlook(self._lengths.longest, self._policy.page_tokens, self._log_survival)
        rows = self._rows_in(room)
        if rows:
            left, made = zip(
                *(self._left(row.answer, len(row.new_ids)) for row in rows), strict=True
            )
            own_tokens = [row.num_tokens - row.num_shared_tokens for row in rows]
            outlook.add(outlook.curve(own_tokens, left, made))
        if room == "compute":
            outlook.add_always(self._prefixes.num_pages())
        return outlook

    def _rows_in(self, room: Room) -> list[Row]:
        """Rows whose pages count there."""
        return [
            row
            for k, own in enumerate(self.block)
            for row in own.values()
            if not row.is_prefix and room in self._rooms(k, self._kv.rows[row.key].home)
        ]

    @staticmethod
    def _rooms(k: int, home: Home) -> tuple[Room, ...]:
        """Where the pages of a row of micro-batch ``k`` count."""
        return (home,) if home == "compute" else (home, k)

    def _rooms_passed(self, k: int, row: Row) -> tuple[Room, ...]:
        """Likewise in the next sweep: one that comes nearer passes through the slot yet."""
        own = self._kv.rows[row.key]
        return self._rooms(k, own.home) if own.is_near or own.home != "compute" else (own.home, k)

    # -- rows that enter -------------------------------------------------------------------------

    def _enter(self, outlooks: dict[Room, Outlook], most: int) -> bool:
        """Let the next rows in, up to so many of one request; False if there is no room."""
        new, count = self._waiting.next_rows(most)
        if isinstance(new, Row):
            num_tokens, (left, made) = new.num_tokens, self._left(new.answer, len(new.new_ids))
        else:
            num_tokens, (left, made) = len(new.request.prompt_ids), self._left(new, 0)
        request = (new.answer if isinstance(new, Row) else new).request
        for k, seat in self._free_seats(count):
            tier, is_delegated, _ = self._seats[seat]
            home = self._home(tier)
            shared = 0 if is_delegated else self._prefixes.num_tokens(request, home)
            curve = outlooks[home].curve(
                [num_tokens - shared] * count, [left] * count, [made] * count
            )
            curves: dict[Room, Pages] = dict.fromkeys(self._rooms(k, home), curve)
            wanted, states = {home: count * self._kv.pages_for(num_tokens - shared)}, {home: count}
            if shared and self._prefixes.find(request) is None:
                beginning = self._kv.pages_for(shared)
                curves["compute"] = curves.get("compute", np.zeros_like(curve)) + always(beginning)
                for sums, more in ((wanted, beginning), (states, 1)):
                    sums["compute"] = sums.get("compute", 0) + more
            if self._kv.has_free(wanted, states) and all(
                outlooks[room].fits(own, self._num_pages[room]) for room, own in curves.items()
            ):
                rows = self._waiting.take(count)
                for row in rows:
                    row.seat = seat
                new_rows = self._reserve(rows, home, is_delegated=is_delegated)
                self.block[k] |= by_key(new_rows)
                self._loads[k].add(new_rows)
                self._pace.take(count)
                for room, own in curves.items():
                    outlooks[room].add(own)
                return True
        return False

    def _reserve(self, rows: Sequence[Row], home: Home, *, is_delegated: bool) -> list[Row]:
        """Pages for what the rows of one request have; the rows, and before them the one that
        computes what they share, if it is new."""
        request = rows[0].answer.request
        if is_delegated or not self._prefixes.num_tokens(request, home):
            named = [(row.key, row.num_tokens) for row in rows]
            self._kv.admit(home, named, is_delegated=is_delegated)
            return [*rows]
        prefix, new = self._prefixes.find(request), []
        if prefix is None:
            prefix = self._prefixes.hold(request, rows[0].entry)
            prefix.seat = rows[0].seat
            new = [prefix]
        self._prefixes.admit([(row, row.num_tokens) for row in rows], prefix, home)
        return [*new, *rows]

    def _free_seats(self, count: int) -> Iterator[tuple[int, int]]:
        """(micro-batch, seat) with room for so many rows: where fewest tokens are brought first,
        and of its seats those of which the largest share is free."""
        order = sorted((own.num_tokens, own.num_rows, k) for k, own in enumerate(self._loads))
        for _, _, k in order:
            free = self._loads[k].free_seats
            if sum(free) < count:  # some have moved beyond the seats of their tier
                continue
            shares = [
                (-left / own, seat)
                for seat, (left, (_, _, own)) in enumerate(zip(free, self._seats, strict=True))
                if own and left >= count
            ]
            yield from ((k, seat) for _, seat in sorted(shares))

    def _load(self, rows: Iterable[Row]) -> _Load:
        load = _Load(free_seats=[own for _, _, own in self._seats])
        load.add(rows)
        return load

    # -- rows that move ---------------------------------------------------------------------------

    def _come_nearer(self, outlooks: dict[Room, Outlook]) -> None:
        """Nobody enters any more: rows take what others have left on faster tiers, those first that
        came first."""
        for k, rows in enumerate(self.block):
            free = self._loads[k].free_seats
            for row, seats in self._moves.nearer(rows.values(), free):
                for seat in seats:
                    home = self._moves.home(seat)
                    if self._fits(row, home, {home: outlooks[home]}):
                        free[seat] -= 1
                        self._moves.begin(row, seat)
                        break
                else:
                    break

    def _make_room(self) -> None:
        """Where a tier has too few pages for the next sweep, its youngest rows move on to a slower
        one; not many of those that find no room there are asked."""
        for home in self._moves.fast:
            placed = [
                (k, row)
                for k, own in enumerate(self.block)
                for row in own.values()
                if not row.is_prefix
            ]
            missing = self._moves.missing(home, [row for _, row in placed])
            if missing > 0:
                self._forget(None)
                missing = self._moves.missing(home, [row for _, row in placed])
            if missing <= 0:
                continue
            loads = [self._load(own.values()) for own in self.block]
            outlooks: dict[Room, Outlook] = {}
            refused = 0
            for k, row in sorted(placed, key=lambda own: -own[1].entry):
                seats = self._moves.farther(row, home, loads[k].free_seats)
                if not seats:
                    continue
                if (seat := self._fitting(row, k, home, seats, outlooks)) is None:
                    refused += 1
                    if refused == _MOST_REFUSED:
                        break
                    continue
                loads[k].free_seats[row.seat] += 1
                missing -= self._moves.begin(row, seat)
                loads[k].free_seats[seat] -= 1
                if missing <= 0:
                    break

    def _fitting(
        self,
        row: Row,
        k: int,
        home: Home,
        seats: Sequence[int],
        outlooks: dict[Room, Outlook],
    ) -> int | None:
        """The first of these seats off ``home`` where a row finds room."""
        for seat in seats:
            target = self._moves.home(seat)
            # Through the slot it comes in any case if it has until now.
            rooms = self._rooms(k, target) if home == "compute" else (target,)
            for room in rooms:
                if room not in outlooks:
                    outlooks[room] = self._outlook(room)
            if self._fits(row, target, {room: outlooks[room] for room in rooms}):
                return seat
        return None

    def _fits(self, row: Row, home: Home, outlooks: dict[Room, Outlook]) -> bool:
        """Whether a row under way finds pages now, and in these rooms later; if so it counts."""
        own = row.num_tokens - row.num_shared_tokens
        left, made = self._left(row.answer, len(row.new_ids))
        curve = outlooks[home].curve([own], [left], [made])
        fits = all(at.fits(curve, self._num_pages[room]) for room, at in outlooks.items())
        if fits and self._kv.has_room(home, own):
            for outlook in outlooks.values():
                outlook.add(curve)
            return True
        return False

    # -- rows that grow --------------------------------------------------------------------------

    def _grow(self) -> None:
        """Pages for the tokens that are there now, the oldest rows first; where there are none, of
        a tier or of a slot, the youngest row there gives up its own."""
        rows = [row for own in self.block for row in own.values() if not row.is_prefix]
        rows.sort(key=lambda row: row.entry)
        youngest: dict[Home, Iterator[Row]] = {}
        for row in rows:
            while row.key in self._kv.rows and not self._kv.grow(row.key, row.num_tokens):
                self._forget(None)
                if self._kv.grow(row.key, row.num_tokens):
                    break
                home = self._kv.rows[row.key].home
                if home not in youngest:
                    youngest[home] = iter([o for o in reversed(rows) if self._is_at(o, home)])
                self._give_up(next(youngest[home]))
        for room, most in self._num_pages.items():
            if isinstance(room, int):
                self._fit(room, most)

    def _fit(self, k: int, num_pages: int) -> None:
        """Keep the offloaded rows of a micro-batch to the pages that a slot has."""
        rows = sorted(self._rows_in(k), key=lambda row: row.entry)
        pages = [self._kv.pages_for(row.num_tokens - row.num_shared_tokens) for row in rows]
        total = sum(pages)
        while total > num_pages:
            total -= pages.pop()
            self._give_up(rows.pop())

    def _is_at(self, row: Row, home: Home) -> bool:
        return row.key in self._kv.rows and self._kv.rows[row.key].home == home

    def _give_up(self, row: Row) -> None:
        k = next(k for k, rows in enumerate(self.block) if row.key in rows)
        self.end(k, row)
        row.kv_len = row.written_len = 0
        self._waiting.put_back(row)


def by_key(rows: Iterable[Row]) -> dict[RowKey, Row]:
    return {row.key: row for row in rows}
