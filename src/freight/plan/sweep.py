"""What the schedule is made from: sweeps over micro-batches, and units with pieces to bring.

Plain values, all sizes in bytes. Who makes up a sweep is the scheduler's business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from freight.model.batch import MicroBatch
from freight.model.programme import UnitKind, picking_unit
from freight.plan.policy import LEAST_STAGED, Tier

__all__ = [
    "Awaited",
    "BatchWork",
    "Delegated",
    "Moved",
    "Passed",
    "StreamModel",
    "StreamPiece",
    "StreamUnit",
    "Sweep",
]


class Moved(NamedTuple):
    """Bytes of one load or store, by the tier whose home they leave or reach.

    ``tails`` counts the KV pages in progress of rows on disk, which are in RAM: they cross no disk.
    """

    cpu: int = 0
    disk: int = 0
    tails: int = 0

    def __bool__(self) -> bool:
        return bool(self.cpu or self.disk or self.tails)

    def times(self, count: int) -> Moved:
        """So often, or of pages of so many bytes."""
        return Moved(count * self.cpu, count * self.disk, count * self.tails)


_NOTHING: Final = Moved()


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What of rows elsewhere passes through ``slot_bytes`` of a slot, in ``num_loaded`` pages."""

    load: Moved = _NOTHING
    store: Moved = _NOTHING
    slot_bytes: int = 0
    num_loaded: int = 0

    def times(self, page_bytes: int) -> Passed:
        """In bytes, where it is in pages."""
        return Passed(
            load=self.load.times(page_bytes),
            store=self.store.times(page_bytes),
            slot_bytes=page_bytes * self.slot_bytes,
            num_loaded=self.num_loaded,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegated:
    """The rows of a micro-batch whose keys the CPU attends in a sweep: its last ``num_rows``.

    ``query_bytes`` of queries, keys and values go to it, ``attended_bytes`` come back. Of rows on
    disk ``kv`` passes through RAM, and ``windows`` in a layer that keeps the last pages of keys.
    """

    num_rows: int
    query_bytes: int
    attended_bytes: int
    kv: Passed = Passed()
    windows: Passed = Passed()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchWork:
    """One micro-batch in one sweep, with what it moves: KV per layer, activations per unit.

    ``kv`` is what passes in a layer that keeps keys and values, ``inputs`` in one that keeps what
    they are made of, ``states`` in one that keeps a state, ``windows`` in one that keeps the last
    pages of keys. It and ``activation_slot_bytes`` are
    what its offloaded rows take in a slot; 0 where all its rows stay on the compute tier.
    ``embedding_bytes`` of embedding rows come from elsewhere than the compute tier: in a stage that
    another one precedes, all its rows. So many as ``departing_bytes`` go to the next stage.
    ``continues``: it waits for tokens of a sweep before. ``delegates_later``: keys that it stores
    are of rows that the CPU will attend.
    """

    batch: MicroBatch
    continues: bool
    embedding_bytes: int = 0
    kv: Passed = Passed()
    inputs: Passed = Passed()
    states: Passed = Passed()
    windows: Passed = Passed()
    activations: Moved = _NOTHING
    activation_slot_bytes: int = 0
    delegated: Delegated | None = None
    delegates_later: bool = False
    departing_bytes: int = 0

    def passes(self, unit: StreamUnit) -> bool:
        """Whether anything passes in that unit."""
        return unit.keeps and self.passed(unit).slot_bytes > 0

    def passed(self, unit: StreamUnit) -> Passed:
        """What passes in that unit."""
        if unit.kind == "recurrence":
            return self.states
        if unit.rolls:
            return self.windows
        return self.inputs if unit.recomputes else self.kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The micro-batches of one pass over the units."""

    index: int
    works: tuple[BatchWork, ...]

    @property
    def num_tokens(self) -> int:
        return sum(work.batch.num_tokens for work in self.works)

    @property
    def num_picked(self) -> int:
        """Those that the head needs."""
        return sum(work.batch.num_picked for work in self.works)


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    """A sweep whose tokens must be known before the next one can be made up: where several blocks
    are in flight, that of the same block."""

    sweep: int
    batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPiece:
    """One load of weights: from which tier, and where in the unit's stretch of the ring."""

    tier: Tier
    num_bytes: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamUnit:
    """What the schedule must know of a unit: its kind, and what is to be brought for it.

    ``expert`` is its number among those of its layer, of which those come that are chosen, or
    expected. One that
    ``recomputes`` makes keys and values of rows elsewhere of what came into it; one that ``rolls``
    keeps the pages alone that its window reaches.
    """

    kind: UnitKind
    layer: int | None
    pieces: tuple[StreamPiece, ...] = ()
    needs_decode: bool = False
    expert: int | None = None
    recomputes: bool = False
    rolls: bool = False

    @property
    def keeps(self) -> bool:
        """Whether rows keep anything for it: keys and values, or a state."""
        return self.kind in ("attention", "recurrence")

    @property
    def slot_bytes(self) -> int:
        return max((piece.end for piece in self.pieces), default=0)


_Blocks = tuple[tuple[int, int, int], ...]
"""Blocks that a piece lies in: (block of the unit, pieces that share it, bytes there)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamModel:
    """The units in order, the embedding first, where they are computed, and the ring of weights:
    ``ring_blocks`` blocks of ``block_bytes``. So many pieces from the disk as ``staging_slots`` may
    wait in RAM for the link to a device. A stage of a pipeline ``receives`` what its first unit
    enters into the residual stream, or ``sends`` what its last one picks, or both. Unit
    ``picks_at`` is the first that works on what the head needs alone, kept for each micro-batch;
    it may be that the head ``needs_all``. ``embeds_in_place``: rows of the table are read to where
    the residual stream will be. Neighbouring experts that were chosen come and are computed
    together, as many as take up to ``group_blocks``; those that stay, all. So many tokens as
    ``tokens_of_all`` are expected to choose all experts of a layer, until some have been seen to
    choose."""

    units: tuple[StreamUnit, ...]
    compute_tier: Tier
    ring_blocks: int
    block_bytes: int
    group_blocks: int = 0
    tokens_of_all: float = math.inf
    staging_slots: int = LEAST_STAGED
    receives: bool = False
    sends: bool = False
    needs_all: bool = False
    embeds_in_place: bool = False
    picks_at: int = field(init=False)
    experts: Mapping[int, tuple[int, ...]] = field(init=False, compare=False, repr=False)
    """Of a layer, as units."""
    num_blocks: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Of each unit."""
    filled: tuple[tuple[_Blocks, ...], ...] = field(init=False, compare=False, repr=False)
    """Of each unit and piece the blocks that it lies in."""

    def __post_init__(self) -> None:
        kinds = [unit.kind for unit in self.units]
        picks_at = picking_unit(kinds, needs_all=self.needs_all or self.sends)
        object.__setattr__(self, "picks_at", picks_at)
        forms = {id(unit.pieces): unit for unit in self.units}  # many units share theirs
        sizes = {own: -(-unit.slot_bytes // self.block_bytes) for own, unit in forms.items()}
        filled = {own: _fill(unit.pieces, self.block_bytes) for own, unit in forms.items()}
        num_blocks = tuple(sizes[id(unit.pieces)] for unit in self.units)
        object.__setattr__(self, "num_blocks", num_blocks)
        object.__setattr__(self, "filled", tuple(filled[id(unit.pieces)] for unit in self.units))
        experts: dict[int, list[int]] = {}
        for number, unit in enumerate(self.units):
            if unit.expert is not None and unit.layer is not None:
                experts.setdefault(unit.layer, []).append(number)
        object.__setattr__(self, "experts", {layer: tuple(own) for layer, own in experts.items()})
        most = max(num_blocks, default=0)
        assert most <= self.ring_blocks, f"a unit of {most} blocks, a ring of {self.ring_blocks}"

    def numbers_of_experts(self, layer: int) -> frozenset[int]:
        """Of all that a layer has."""
        numbers = (self.units[unit].expert for unit in self.experts[layer])
        return frozenset(own for own in numbers if own is not None)

    def groups(self, layer: int, coming: Collection[int]) -> Iterator[tuple[int, ...]]:
        """Units of those experts of a layer that are ``coming``, cut where no more of them come
        and are computed together."""
        group: list[int] = []
        blocks = 0
        for number in self.experts[layer]:
            if self.units[number].expert not in coming:
                continue
            blocks += self.num_blocks[number]
            if group and (blocks > self.group_blocks or self._decodes(group[-1], number)):
                yield tuple(group)
                group, blocks = [], self.num_blocks[number]
            group.append(number)
        if group:
            yield tuple(group)

    def fit_together(self, unit: int) -> bool:
        """Whether a unit can stay in the ring until the one after it has been computed too."""
        if self._decodes(unit, unit + 1):
            return False
        return self.num_blocks[unit] + self.num_blocks[unit + 1] <= self.ring_blocks

    def _decodes(self, *units: int) -> bool:
        """Whether any unit is decoded: there is room for one."""
        return any(self.units[unit].needs_decode for unit in units)


def _fill(pieces: Sequence[StreamPiece], block_bytes: int) -> tuple[_Blocks, ...]:
    """For each piece of a unit the blocks that it lies in."""

    def blocks_of(piece: StreamPiece) -> range:
        return range(piece.offset // block_bytes, -(-piece.end // block_bytes))

    sharing = Counter(block for piece in pieces for block in blocks_of(piece))

    def bytes_there(piece: StreamPiece, block: int) -> int:
        begin = max(piece.offset, block * block_bytes)
        return min(piece.end, (block + 1) * block_bytes) - begin

    return tuple(
        tuple((block, sharing[block], bytes_there(piece, block)) for block in blocks_of(piece))
        for piece in pieces
    )
