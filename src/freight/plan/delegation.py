"""The part of the schedule that lets the CPU attend rows whose keys and values are near it.

Queries go to it, with the new keys and values; what it has attended comes back. Keys on disk are
read into RAM as far ahead as there are slots, also for the next layer. Knows micro-batches and what
they move, no rows and no weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from freight.plan.operation import Access, Kind, Lane, Operation
from freight.plan.scoreboard import RING_SLOTS, Scoreboard, read, write
from freight.plan.sweep import BatchWork, Delegated, Passed

__all__ = ["Delegation", "attended_home"]

_RING = "delegated kv"

Turn = tuple[int, int, BatchWork]
"""A unit, its layer, and a micro-batch in it."""


def attended_home(tier: str, layer: int) -> str:
    """The place of the keys that the CPU attends, as operations name it."""
    return f"kv on {tier} for the CPU, layer {layer}"


@dataclass(kw_only=True, slots=True)
class Delegation:
    """What of a sweep is still to be read and to be attended, in order; the units that are
    ``rolling`` keep the pages alone that their window reaches."""

    board: Scoreboard
    rolling: frozenset[int]
    sweep: int = 0
    unread: deque[Turn] = field(default_factory=deque)
    unattended: deque[Turn] = field(default_factory=deque)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)

    def begin(self, sweep: int, turns: Sequence[Turn]) -> Iterator[Operation]:
        """A new sweep, with all that it will have attended."""
        assert not self.unread and not self.unattended and not self.slots
        self.sweep = sweep
        self.unread.extend(own for own in turns if self._passed(own[0], own[2]).slot_bytes)
        yield from self._read_ahead()

    def accesses(self, unit: int, work: BatchWork, *, begins: bool) -> list[Access]:
        """Of the part of a computation that begins before, or ends after, what is attended."""
        k = work.batch.index
        if begins:
            return [
                self.board.new_home("delegated rows", k, (self.sweep, unit, 0)),
                self.board.new_home("attended rows", k, (self.sweep, unit)),
            ]
        return [self.board.home("delegated rows", k), self.board.home("attended rows", k)]

    def send(self, unit: int, layer: int, work: BatchWork) -> Iterator[Operation]:
        """After the queries have been computed: hand them over, and attend what can be."""
        k = work.batch.index
        accesses = [
            self.board.home("delegated rows", k),
            self.board.new_home("delegated rows on cpu", k, (self.sweep, unit, 0)),
        ]
        size = _of(work).query_bytes
        yield self._make(Kind.COPY_QUERIES, Lane.FROM_DEVICE, accesses, unit, work, num_bytes=size)
        self.unattended.append((unit, layer, work))
        yield from self._attend()

    def bring_back(self, unit: int, work: BatchWork) -> Iterator[Operation]:
        """Before what was attended is used."""
        k = work.batch.index
        accesses = [
            self.board.home("delegated rows on cpu", k),
            self.board.new_home("delegated rows", k, (self.sweep, unit, 1)),
        ]
        size = _of(work).attended_bytes
        yield self._make(Kind.COPY_ATTENDED, Lane.TO_DEVICE, accesses, unit, work, num_bytes=size)

    def end(self, unit: int, work: BatchWork) -> Iterator[Operation]:
        """After it was used: its slot is free."""
        self.slots.pop((unit, work.batch.index), None)
        yield from self._read_ahead()
        yield from self._attend()

    def _read_ahead(self) -> Iterator[Operation]:
        while self.unread and len(self.slots) < RING_SLOTS[_RING]:
            unit, layer, work = self.unread.popleft()
            k, passed = work.batch.index, self._passed(unit, work)
            slot = self.slots[unit, k] = self.board.take_slot(_RING)
            accesses = [
                self.board.home(attended_home("disk", layer), k),
                write(_RING, slot, (self.sweep, unit, k, 0), passed.slot_bytes),
            ]
            moved = passed.load.disk
            yield self._make(
                Kind.READ_DELEGATED,
                Lane.DISK_READ,
                accesses,
                unit,
                work,
                slot=slot,
                num_bytes=moved,
            )

    def _attend(self) -> Iterator[Operation]:
        """Those whose queries were sent and whose keys were asked for."""
        while self.unattended:
            unit, layer, work = self.unattended[0]
            k = work.batch.index
            slot = self.slots.get((unit, k), -1)
            if self._passed(unit, work).slot_bytes and slot < 0:
                return
            self.unattended.popleft()
            name = "delegated rows on cpu"
            accesses = [
                self.board.home(name, k),
                self.board.new_home(name, k, (self.sweep, unit, 1)),
            ]
            home = attended_home("cpu", layer)
            if (home, k) in self.board.homes:
                accesses.append(self.board.home(home, k))
                accesses.append(self.board.new_home(home, k, (self.sweep, 1)))
            if slot >= 0:
                accesses += self.board.in_place(_RING, slot, (self.sweep, unit, k), True)
            yield self._make(Kind.ATTEND, Lane.ATTENTION, accesses, unit, work, slot=slot)
            if slot >= 0:
                yield from self._write(unit, layer, work, slot)

    def _write(self, unit: int, layer: int, work: BatchWork, slot: int) -> Iterator[Operation]:
        k = work.batch.index
        accesses = [
            read(_RING, slot, (self.sweep, unit, k, 1)),
            self.board.new_home(attended_home("disk", layer), k, (self.sweep, 1)),
        ]
        moved = self._passed(unit, work).store.disk
        kind, lane = Kind.WRITE_DELEGATED, Lane.DISK_WRITE
        yield self._make(kind, lane, accesses, unit, work, source_slot=slot, num_bytes=moved)

    def _passed(self, unit: int, work: BatchWork) -> Passed:
        """What of the rows on disk passes in a unit."""
        own = _of(work)
        return own.windows if unit in self.rolling else own.kv

    def _make(
        self,
        kind: Kind,
        lane: Lane,
        accesses: list[Access],
        unit: int,
        work: BatchWork,
        *,
        slot: int = -1,
        source_slot: int = -1,
        num_bytes: int = 0,
    ) -> Operation:
        return self.board.make(
            kind,
            lane,
            accesses,
            sweep=self.sweep,
            unit=unit,
            batch=work.batch,
            slot=slot,
            source_slot=source_slot,
            num_bytes=num_bytes,
            num_delegated=_of(work).num_rows,
        )


def _of(work: BatchWork) -> Delegated:
    assert work.delegated is not None
    return work.delegated
