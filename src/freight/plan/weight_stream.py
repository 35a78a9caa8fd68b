"""The part of the schedule that brings weights: which unit next, where in the ring, how fast.

Streamed units pass through one ring of blocks on the compute tier; each lies in consecutive blocks
of it, of which the first one follows the last. A unit is brought as soon as there are blocks enough
for it, so loads run as far ahead as the ring allows, also into the next sweep; a unit that has been
computed frees its blocks. What has
become possible when a unit begins is spread over the unit's micro-batches. Experts come once their
router has been computed, and only those that were chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from freight.plan.operation import Access, Kind, Lane, Operation
from freight.plan.scoreboard import Scoreboard, arrival, read, write
from freight.plan.sweep import StreamModel

__all__ = ["WeightStream"]

Target = tuple[int, int]
"""(sweep, unit)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resident:
    """A unit in the ring, from when its blocks are reserved until it has been computed."""

    target: Target
    first_block: int
    num_blocks: int
    reads: tuple[Access, ...]


@dataclass(kw_only=True, slots=True)
class WeightStream:
    """State of the stream: what is in the ring, and what is still to be issued.

    ``cursor`` is the first unit that has not been considered, ``chosen`` has the experts of the
    (sweep, layer) whose routers have been computed.
    """

    model: StreamModel
    board: Scoreboard
    expects_more: Callable[[], bool]
    cursor: Target = (0, 0)
    chosen: dict[Target, Collection[int]] = field(default_factory=dict)
    head: int = 0
    ring: deque[_Resident] = field(default_factory=deque)
    residents: dict[Target, _Resident] = field(default_factory=dict)
    pending: deque[tuple[Target, int]] = field(default_factory=deque)
    has_pieces: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_pieces = any(unit.pieces for unit in self.model.units)

    def begin(self, sweep: int, unit: int, oldest: int) -> None:
        """A unit's first computation comes next; units before ``oldest`` are not needed again."""
        self._retire((sweep, oldest))
        self._reserve(sweep, unit)

    def bring(self, sweep: int, unit: int, num_turns: int) -> Iterator[Operation]:
        """Loads to issue before a computation of this unit; what may come until something else can
        be brought is spread over it and ``num_turns`` - 1 more."""
        while self.pending and self.pending[0][0] <= (sweep, unit):
            yield from self._bring_piece(*self.pending.popleft())  # needed right now
        count = -(-len(self.pending) // num_turns)
        for _ in range(count):
            yield from self._bring_piece(*self.pending.popleft())

    def choose(self, sweep: int, layer: int, experts: Collection[int]) -> None:
        """Say which experts of a layer this sweep needs."""
        self.chosen = {target: kept for target, kept in self.chosen.items() if target[0] == sweep}
        self.chosen[sweep, layer] = experts

    def first_block(self, sweep: int, unit: int) -> int:
        """Where in the ring a unit that is there begins."""
        return self.residents[sweep, unit].first_block

    def reads(self, sweep: int, unit: int) -> tuple[Access, ...]:
        """Accesses of a computation that uses the unit's streamed weights."""
        return self.residents[sweep, unit].reads

    def decode(self, sweep: int, unit: int) -> Operation:
        accesses = [
            *self.reads(sweep, unit),
            write("decoded weights", 0, (sweep, unit), 0),
        ]
        kind, lane, slot = Kind.DECODE_WEIGHTS, Lane.COMPUTE, self.first_block(sweep, unit)
        return self.board.make(kind, lane, accesses, sweep=sweep, unit=unit, source_slot=slot)

    # -- the ring ----------------------------------------------------------------------------

    def _retire(self, current: Target) -> None:
        while self.ring and self.ring[0].target < current:
            del self.residents[self.ring.popleft().target]

    def _reserve(self, sweep: int, unit: int) -> None:
        """Reserve blocks for the next units, in order, as far as there are any."""
        self.cursor = max(self.cursor, (sweep, unit))
        while (target := self._streamed_from(*self.cursor)) is not None:
            if target[0] > sweep + 1 or (target[0] > sweep and not self.expects_more()):
                return
            num_blocks, size = self.model.num_blocks[target[1]], self.model.ring_blocks
            if num_blocks > size - sum(resident.num_blocks for resident in self.ring):
                return
            first = self.head if self.ring else 0
            self.head = (first + num_blocks) % size
            blocks = ((first + block) % size for block in range(num_blocks))
            reads = tuple(read("weights", block, target) for block in blocks)
            resident = _Resident(
                target=target, first_block=first, num_blocks=num_blocks, reads=reads
            )
            self.ring.append(resident)
            self.residents[target] = resident
            pieces = self.model.units[target[1]].pieces
            self.pending.extend((target, number) for number in range(len(pieces)))
            self.cursor = (target[0], target[1] + 1)

    def _streamed_from(self, sweep: int, unit: int) -> Target | None:
        """The first unit with anything to bring, from this one on, also in the next sweep; None
        where that cannot be told yet."""
        if not self.has_pieces:
            return None
        units = self.model.units
        later = ((sweep, number) for number in range(unit, len(units)))
        for target in chain(later, ((sweep + 1, number) for number in range(unit))):
            own = units[target[1]]
            if not own.pieces:
                continue
            if own.expert is None:
                return target
            assert own.layer is not None
            chosen = self.chosen.get((target[0], own.layer))
            if chosen is None:
                return None
            if own.expert in chosen:
                return target
        return None

    # -- loads -------------------------------------------------------------------------------

    def _bring_piece(self, target: Target, number: int) -> Iterator[Operation]:
        sweep, unit = target
        piece = self.model.units[unit].pieces[number]
        first, size = self.first_block(sweep, unit), self.model.ring_blocks
        arrivals = [
            arrival("weights", (first + block) % size, target, number, num_pieces, num_bytes)
            for block, num_pieces, num_bytes in self.model.filled[unit][number]
        ]
        make = partial(
            self.board.make, sweep=sweep, unit=unit, piece=number, num_bytes=piece.num_bytes
        )
        if self.model.compute_tier == "cpu":
            yield make(Kind.READ_WEIGHTS, Lane.DISK_READ, arrivals, slot=first)
            return
        reads: list[Access] = []
        staging = -1
        if piece.tier == "disk":
            staging = self.board.take_slot("weight staging")
            staged = write("weight staging", staging, (sweep, unit, number), piece.num_bytes)
            yield make(Kind.READ_WEIGHTS, Lane.DISK_READ, [staged], slot=staging)
            reads.append(read("weight staging", staging, (sweep, unit, number)))
        accesses = [*reads, *arrivals]
        yield make(Kind.COPY_WEIGHTS, Lane.TO_DEVICE, accesses, slot=first, source_slot=staging)
