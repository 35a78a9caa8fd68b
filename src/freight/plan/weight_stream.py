"""The part of the schedule that brings weights: which unit next, where in the ring, how fast.

Streamed units pass through one ring of blocks on the compute tier; each lies in consecutive blocks
of it, of which the first one follows the last. A unit is brought as soon as there are blocks enough
for it, so loads run as far ahead as the ring allows, also into the next sweep; a unit that has been
computed frees its blocks. What has
become possible when a unit begins is spread over the unit's micro-batches. Experts come once their
router has been computed, and only those that were chosen, unless so many tokens are there that all
are expected; several by one operation, for asking for one of a model's many takes as long as
bringing it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Final

from freight.plan.expected_experts import ExpectedExperts
from freight.plan.operation import Access, Kind, Lane, Operation, UnitPlace
from freight.plan.policy import Tier
from freight.plan.scoreboard import Scoreboard, arrival, read, write
from freight.plan.sweep import StreamModel, StreamPiece, Sweep
from freight.quantities import MIB

__all__ = ["WeightStream"]

_COMING_BYTES: Final[Mapping[Tier, int]] = {"gpu": 16 * MIB, "cpu": 8 * MIB}
"""Of experts, by one copy from RAM to a device, or by one operation that reads."""

Target = tuple[int, int]
"""(sweep, unit)"""
_Pending = tuple[Target, int]
"""And the number of a piece."""


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

    ``cursor`` is the first unit that has not been considered, ``chosen`` has the experts that come
    in a (sweep, layer), as far as that is known.
    """

    model: StreamModel
    board: Scoreboard
    expects_more: Callable[[], bool]
    cursor: Target = (0, 0)
    chosen: dict[Target, Collection[int]] = field(default_factory=dict)
    head: int = 0
    ring: deque[_Resident] = field(default_factory=deque)
    residents: dict[Target, _Resident] = field(default_factory=dict)
    pending: deque[_Pending] = field(default_factory=deque)
    held_blocks: int = 0
    has_pieces: bool = field(init=False)
    expected: ExpectedExperts = field(init=False)
    tokens: tuple[int, int] = (0, 0)
    """Of the sweep, and those that the head needs."""

    def __post_init__(self) -> None:
        self.has_pieces = any(unit.pieces for unit in self.model.units)
        self.expected = ExpectedExperts(model=self.model)

    def begin(self, sweep: int, unit: int, oldest: int) -> None:
        """A unit's first computation comes next; units before ``oldest`` are not needed again."""
        self._retire((sweep, oldest))
        self._reserve(sweep, unit)

    def bring(self, sweep: int, unit: int, num_turns: int) -> Iterator[Operation]:
        """Loads to issue before a computation of this unit; what may come until something else can
        be brought is spread over it and ``num_turns`` - 1 more."""
        needed = 0  # right now
        for target, _ in self.pending:
            if target > (sweep, unit):
                break
            needed += 1
        yield from self._bring(needed)
        yield from self._bring(-(-len(self.pending) // num_turns))

    def expect(self, sweep: Sweep) -> None:
        """A sweep begins: of some layers it is known that all experts come."""
        self.chosen.clear()
        self.tokens = sweep.num_tokens, sweep.num_picked
        for layer in self.model.experts:
            if coming := self.expected.of(layer, *self.tokens):
                self.chosen[sweep.index, layer] = coming

    def choose(self, sweep: int, layer: int, experts: Collection[int]) -> Collection[int]:
        """Say which experts of a layer this sweep needs; those that come."""
        self.expected.learn(layer, *self.tokens, len(experts))
        return self.chosen.setdefault((sweep, layer), experts)

    def places(self, sweep: int, units: Sequence[int]) -> tuple[list[UnitPlace], list[Access]]:
        """Where in the ring units begin that are computed together, and what that reads."""
        found, accesses = [], list[Access]()
        for unit in units:
            resident = self.residents.get((sweep, unit))
            assert resident is not None or not self.model.units[unit].pieces
            found.append(UnitPlace(unit, 0, -1 if resident is None else resident.first_block))
            accesses += () if resident is None else resident.reads
        return found, accesses

    def decode(self, sweep: int, unit: int) -> Operation:
        resident = self.residents[sweep, unit]
        accesses = [
            *resident.reads,
            write("decoded weights", 0, (sweep, unit), 0),
        ]
        kind, lane, slot = Kind.DECODE_WEIGHTS, Lane.COMPUTE, resident.first_block
        return self.board.make(kind, lane, accesses, sweep=sweep, unit=unit, source_slot=slot)

    # -- the ring ----------------------------------------------------------------------------

    def _retire(self, current: Target) -> None:
        while self.ring and self.ring[0].target < current:
            ended = self.ring.popleft()
            self.held_blocks -= ended.num_blocks
            del self.residents[ended.target]

    def _reserve(self, sweep: int, unit: int) -> None:
        """Reserve blocks for the next units, in order, as far as there are any."""
        self.cursor = max(self.cursor, (sweep, unit))
        while (target := self._streamed_from(*self.cursor)) is not None:
            if target[0] > sweep + 1 or (target[0] > sweep and not self.expects_more()):
                return
            num_blocks, size = self.model.num_blocks[target[1]], self.model.ring_blocks
            if num_blocks > size - self.held_blocks:
                return
            first = self.head if self.ring else 0
            self.head = (first + num_blocks) % size
            blocks = ((first + block) % size for block in range(num_blocks))
            reads = tuple(read("weights", block, target) for block in blocks)
            resident = _Resident(
                target=target, first_block=first, num_blocks=num_blocks, reads=reads
            )
            self.ring.append(resident)
            self.held_blocks += num_blocks
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

    def _bring(self, count: int) -> Iterator[Operation]:
        """So many of the next pieces; several by one operation where they come like that."""
        while count:
            pieces = [self.pending.popleft()]
            num_bytes = self._piece(*pieces[0]).num_bytes
            while len(pieces) < count and self._comes_with(pieces[0], self.pending[0]):
                num_bytes += self._piece(*self.pending[0]).num_bytes
                if num_bytes > _COMING_BYTES[self.model.compute_tier]:
                    break
                pieces.append(self.pending.popleft())
            count -= len(pieces)
            yield from self._bring_pieces(pieces)

    def _comes_with(self, first: _Pending, other: _Pending) -> bool:
        """Whether both are of experts of a layer, and no staging is between."""
        units = [self.model.units[unit] for (_, unit), _ in (first, other)]
        tier = "cpu" if self.model.compute_tier == "gpu" else "disk"
        return (
            first[0][0] == other[0][0]
            and units[0].expert is not None is not units[1].expert
            and units[0].layer == units[1].layer
            and self._piece(*first).tier == tier == self._piece(*other).tier
        )

    def _piece(self, target: Target, number: int) -> StreamPiece:
        return self.model.units[target[1]].pieces[number]

    def _bring_pieces(self, pieces: Sequence[_Pending]) -> Iterator[Operation]:
        """Several without staging, or one."""
        size = self.model.ring_blocks
        brought = [
            UnitPlace(target[1], number, self.residents[target].first_block)
            for target, number in pieces
        ]
        arrivals = [
            arrival("weights", (own.slot + block) % size, target, own.piece, num_pieces, num_bytes)
            for (target, _), own in zip(pieces, brought, strict=True)
            for block, num_pieces, num_bytes in self.model.filled[own.unit][own.piece]
        ]
        (sweep, unit), number = pieces[0]
        piece, first, others = self._piece(*pieces[0]), brought[0].slot, tuple(brought[1:])
        num_bytes = sum(self._piece(*own).num_bytes for own in pieces)
        make = partial(self.board.make, sweep=sweep, unit=unit, piece=number, num_bytes=num_bytes)
        if self.model.compute_tier == "cpu":
            yield make(Kind.READ_WEIGHTS, Lane.DISK_READ, arrivals, slot=first, others=others)
            return
        reads: list[Access] = []
        staging = -1
        if piece.tier == "disk":
            staging = self.board.take_slot("weight staging")
            staged = write("weight staging", staging, (sweep, unit, number), piece.num_bytes)
            yield make(Kind.READ_WEIGHTS, Lane.DISK_READ, [staged], slot=staging)
            reads.append(read("weight staging", staging, (sweep, unit, number)))
        accesses, lane = [*reads, *arrivals], Lane.TO_DEVICE
        yield make(
            Kind.COPY_WEIGHTS, lane, accesses, slot=first, source_slot=staging, others=others
        )
