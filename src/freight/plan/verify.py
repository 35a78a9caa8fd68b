"""Proves a stream of operations legal, operation by operation, or says why it is not.

Independent of the generator: what is known to have happened before what is derived from lanes
(operations begin and end in order, and one begins when those before it have ended, unless both
pair) and from ``after`` alone. Rejected are a computation before its load, a slot
reused before its last reader is done, content that is not what the reader expects, an index out of
a ring, and more bytes in a slot than it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from freight.plan.operation import Access, Lane, Operation, Owner, Place

__all__ = ["IllegalSchedule", "Ring", "verify"]

Clock = dict[Lane, int]


class IllegalSchedule(AssertionError):
    """A stream that must not be run: a bug in the schedule, never in what the user gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Slots of one kind: how many there are, and the size of each."""

    num_slots: int
    slot_bytes: int


@dataclass(kw_only=True, slots=True)
class _Content:
    """What a place holds, and who has touched it since that content began to arrive."""

    owner: Owner
    num_pieces: int
    pieces: dict[int, Operation] = field(default_factory=dict)
    readers: list[Operation] = field(default_factory=list)
    num_bytes: int = 0


def verify(operations: Iterable[Operation], rings: Mapping[str, Ring]) -> Iterator[Operation]:
    """Pass operations through, raising ``IllegalSchedule`` at the first illegal one.

    ``rings`` gives the places with a bounded number of slots; other places are homes, unbounded.
    """
    clocks: dict[int, tuple[Lane, Clock]] = {}
    begun: dict[Lane, Clock] = {}
    ended: dict[Lane, Clock] = {}
    contents: dict[Place, _Content] = {}
    expected = 0
    for operation in operations:
        if operation.index != expected:
            raise IllegalSchedule(f"{operation} comes where operation {expected} is due")
        expected += 1
        lane = operation.lane
        clock = _begin(operation, (begun if operation.pairs else ended).get(lane, {}), clocks)
        for access in operation.accesses:
            _check(operation, access, contents, clock, rings)
        after = {**ended.get(lane, {})}
        _add(clock, after)
        after[lane] = operation.index
        begun[lane] = clock if operation.pairs else after
        ended[lane] = after
        clocks[operation.index] = (lane, after)
        yield operation


def _begin(operation: Operation, before: Clock, clocks: Mapping[int, tuple[Lane, Clock]]) -> Clock:
    """Per lane the last operation that is surely done when this one begins."""
    clock = {**before}
    for waited, index in operation.after:
        if index not in clocks or clocks[index][0] != waited:
            raise IllegalSchedule(f"{operation} waits for operation {index}, which is not earlier")
        _add(clocks[index][1], clock)
    return clock


def _add(known: Clock, clock: Clock) -> None:
    for lane, done in known.items():
        clock[lane] = max(clock.get(lane, -1), done)


def _check(
    operation: Operation,
    access: Access,
    contents: dict[Place, _Content],
    clock: Clock,
    rings: Mapping[str, Ring],
) -> None:
    name, index = access.place
    ring = rings.get(name)
    if ring is not None and not 0 <= index < ring.num_slots:
        raise IllegalSchedule(f"{operation} uses slot {index} of {ring.num_slots} in {name}")
    content = contents.get(access.place)
    if access.is_write:
        content = _write(operation, access, content, clock)
        contents[access.place] = content
        if ring is not None and content.num_bytes > ring.slot_bytes:
            raise IllegalSchedule(
                f"{operation} puts {content.num_bytes} bytes into a {name} slot of "
                f"{ring.slot_bytes}"
            )
        return
    if content is None or content.owner != access.owner:
        held = "nothing" if content is None else str(content.owner)
        raise IllegalSchedule(f"{operation} wants {access.owner} in {access.place}: it has {held}")
    if len(content.pieces) != content.num_pieces:
        raise IllegalSchedule(
            f"{operation} reads {access.place} with {len(content.pieces)} of "
            f"{content.num_pieces} pieces"
        )
    for writer in content.pieces.values():
        _need(operation, writer, clock, access.place)
    content.readers.append(operation)


def _write(
    operation: Operation, access: Access, content: _Content | None, clock: Clock
) -> _Content:
    if content is None or content.owner != access.owner:
        for earlier in () if content is None else (*content.pieces.values(), *content.readers):
            _need(operation, earlier, clock, access.place)
        content = _Content(owner=access.owner, num_pieces=access.num_pieces)
    if access.piece in content.pieces:
        raise IllegalSchedule(f"{operation} writes piece {access.piece} of {access.place} again")
    content.pieces[access.piece] = operation
    content.num_bytes += access.num_bytes
    return content


def _need(operation: Operation, earlier: Operation, clock: Clock, place: Place) -> None:
    if earlier is not operation and clock.get(earlier.lane, -1) < earlier.index:
        raise IllegalSchedule(f"{operation} touches {place} but need not come after {earlier}")
