"""Random models and sweeps for the schedule, and what an operation stream does when it is run.

``replay`` and ``is_legal`` are the oracles of the schedule and the verifier: they know lanes, waits
and the contents of places, and nothing of vector clocks or of how a stream was made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from freight.model.batch import MicroBatch, RowKey, RowSpan
from freight.plan.operation import Lane, Operation, Owner, Place
from freight.plan.schedule import schedule
from freight.plan.scoreboard import RING_SLOTS
from freight.plan.sweep import (
    BatchWork,
    Delegated,
    Moved,
    Passed,
    StreamModel,
    StreamPiece,
    StreamUnit,
    Sweep,
)
from freight.plan.verify import Ring

BLOCK_BYTES = 8
_Works = Sequence[tuple[BatchWork, set[int] | None]]
PLENTY = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a schedule is made from; whether a sweep follows is known in advance."""

    model: StreamModel
    sweeps: tuple[Sweep, ...]
    seed: int = 0

    def operations(self) -> list[Operation]:
        return [*self.stream()]

    def stream(self) -> Iterator[Operation]:
        taken: list[Sweep] = []

        def hand_out() -> Iterator[Sweep]:
            for sweep in self.sweeps:
                taken.append(sweep)
                yield sweep

        def expects_more() -> bool:
            return len(taken) < len(self.sweeps)

        return schedule(hand_out(), self.model, expects_more, self.router())

    def router(self) -> Callable[[int], frozenset[int]]:
        """What each micro-batch chooses in each layer: something, by chance."""
        dice = random.Random(self.seed)
        most = max((unit.expert for unit in self.model.units if unit.expert is not None), default=0)

        def chosen(k: int) -> frozenset[int]:
            # Experts that a layer does not have are asked for in vain.
            return frozenset(dice.choices(range(most + 1), k=1 + most // 2))

        return chosen

    def runs(self) -> list[tuple[int, int, BatchWork]]:
        """(sweep, unit, work) of all computations there should be, in order."""
        return [
            (sweep, unit, work)
            for sweep, units, works in self._turns()
            for unit in units
            for work, chosen in works
            if chosen is None or unit in chosen
        ]

    def steps(self) -> list[tuple[int, tuple[int, ...], BatchWork]]:
        """(sweep, units, work) of what is computed at once: of experts groups of which the work
        has chosen any, or the first work if none has."""
        found = []
        for sweep, units, works in self._turns():
            for group in self._groups(units):
                own = [w for w, some in works if some is None or not some.isdisjoint(group)]
                found += [(sweep, group, work) for work in own or [work for work, _ in works[:1]]]
        return found

    def coming(self) -> set[tuple[int, int]]:
        """(sweep, unit) of all that comes."""
        return {(sweep, unit) for sweep, units, _ in self._turns() for unit in units}

    def _turns(self) -> Iterator[tuple[int, tuple[int, ...], _Works]]:
        """(sweep, units, works): of a layer the experts that come, and otherwise one unit, with
        those micro-batches that work there and, of experts, the units that they have chosen."""
        router, units = self.router(), self.model.units
        enough: dict[int | None, float] = {}
        for sweep in self.sweeps:
            for number, unit in enumerate(units):
                if unit.expert is not None:
                    continue
                yield sweep.index, (number,), [(work, None) for work in sweep.works]
                if unit.kind != "router":
                    continue
                experts = {
                    own.expert: n
                    for n, own in enumerate(units)
                    if own.layer == unit.layer and own.expert is not None
                }
                choices = [router(work.batch.index) for work in sweep.works]
                said = frozenset().union(*choices)
                works = [
                    (work, {experts[own] for own in chosen & experts.keys()})
                    for work, chosen in zip(sweep.works, choices, strict=True)
                ]
                needed = {experts[own] for own in said & experts.keys()}
                own, tokens = enough.get(unit.layer, self.model.tokens_of_all), len(sweep.works)
                come = {*experts.values()} if tokens >= own else needed
                yield sweep.index, tuple(sorted(come)), works
                # What was seen says how many tokens, one of each work, are enough for all.
                is_all = len(said) >= len(experts)
                enough[unit.layer] = min(own, tokens) if is_all else max(own, tokens + 1)

    def _groups(self, units: Sequence[int]) -> list[tuple[int, ...]]:
        """As many of them one after the other as may come at once."""
        groups: list[list[int]] = []
        model = self.model
        for unit in units:
            blocks = model.num_blocks[unit]
            if groups:
                held = sum(model.num_blocks[own] for own in groups[-1])
                decodes = model.units[unit].needs_decode or model.units[groups[-1][-1]].needs_decode
                if held + blocks <= model.group_blocks and not decodes:
                    groups[-1].append(unit)
                    continue
            groups.append([unit])
        return [tuple(own) for own in groups]

    def rings(self) -> dict[str, Ring]:
        rings = {name: Ring(num_slots=n, slot_bytes=PLENTY) for name, n in RING_SLOTS.items()}
        weights = Ring(num_slots=self.model.ring_blocks, slot_bytes=self.model.block_bytes)
        staging = Ring(num_slots=self.model.staging_slots, slot_bytes=PLENTY)
        if self.model.embeds_in_place:
            places = {work.batch.index for own in self.sweeps for work in own.works}
            most = max(places, default=0) + 1
            rings["embedding rows"] = Ring(num_slots=most, slot_bytes=PLENTY)
        return {**rings, "weights": weights, "weight staging": staging}


# -- strategies --------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tier = draw(st.sampled_from(["cpu", "gpu"]))
    units = draw(_units(tier))
    most = max(-(-unit.slot_bytes // BLOCK_BYTES) for unit in units)
    spare = draw(st.integers(0, 8))
    ring = most + spare
    model = StreamModel(
        units=units,
        compute_tier=tier,
        ring_blocks=ring,
        block_bytes=BLOCK_BYTES,
        group_blocks=draw(st.integers(0, ring)),
        tokens_of_all=draw(st.sampled_from([2, 3, math.inf])),
        staging_slots=draw(st.integers(1, 6)),
        embeds_in_place=tier == "cpu" and draw(st.booleans()),
    )
    return Case(model=model, sweeps=draw(_sweeps(tier)), seed=draw(st.integers(0, 99)))


@st.composite
def _units(draw: st.DrawFn, tier: str) -> tuple[StreamUnit, ...]:
    num_layers, num_chunks = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kinds: list[tuple[Any, int | None, int | None]] = []
    for layer in range(num_layers):
        kinds.append(("attention", layer, None))
        num_experts = draw(st.sampled_from([0, 1, 3, 6]))
        kinds.append(("router" if num_experts else "mlp", layer, None))
        kinds += [("expert", layer, expert) for expert in range(num_experts)]
    kinds += [("head", None, None)] * num_chunks
    units = [StreamUnit(kind="embedding", layer=None)]
    for kind, layer, expert in kinds:
        pieces = draw(_pieces(tier))
        needs_decode = bool(pieces) and draw(st.booleans())
        units.append(
            StreamUnit(
                kind=kind,
                layer=layer,
                pieces=pieces,
                needs_decode=needs_decode,
                expert=expert,
                recomputes=kind == "attention" and draw(st.booleans()),
            )
        )
    return tuple(units)


@st.composite
def _pieces(draw: st.DrawFn, tier: str) -> tuple[StreamPiece, ...]:
    """Pieces of up to a block, one after the other, at times with a gap."""
    tiers = ["disk"] if tier == "cpu" else ["cpu", "disk"]
    sizes = draw(st.lists(st.integers(1, BLOCK_BYTES), max_size=4))
    pieces, offset = [], 0
    for size in sizes:
        offset += draw(st.integers(0, 2))
        source: Any = draw(st.sampled_from(tiers))
        pieces.append(StreamPiece(tier=source, num_bytes=size, offset=offset))
        offset += size
    return tuple(pieces)


@dataclass(kw_only=True, slots=True)
class _Life:
    """A micro-batch in a block: how many sweeps it lives, what of it is offloaded, and what of its
    KV on RAM and disk the CPU attends."""

    num_sweeps: int
    kv: tuple[int, int, int]
    delegated: tuple[int, int]
    activations: tuple[int, int]
    embedding_bytes: int
    drops_kv_at: int


@st.composite
def _lives(draw: st.DrawFn, tier: str) -> _Life:
    sizes = st.sampled_from([0, 0, 3])
    on_cpu = st.just(0) if tier == "cpu" else sizes
    return _Life(
        num_sweeps=draw(st.integers(1, 3)),
        kv=(draw(on_cpu), draw(sizes), draw(sizes)),
        delegated=(draw(on_cpu), draw(on_cpu)),
        activations=(draw(on_cpu), draw(sizes)),
        embedding_bytes=draw(sizes),
        drops_kv_at=draw(st.integers(1, 4)),
    )


@st.composite
def _sweeps(draw: st.DrawFn, tier: str) -> tuple[Sweep, ...]:
    """Blocks one after the other; micro-batches end at different sweeps."""
    sweeps: list[Sweep] = []
    for lives in draw(st.lists(st.lists(_lives(tier), min_size=1, max_size=4), max_size=2)):
        for turn in range(max(life.num_sweeps for life in lives)):
            works = tuple(
                _work(k, life, turn) for k, life in enumerate(lives) if turn < life.num_sweeps
            )
            sweeps.append(Sweep(index=len(sweeps), works=works))
    return tuple(sweeps)


def _work(k: int, life: _Life, turn: int) -> BatchWork:
    # Rows that end take their offloaded KV with them: later sweeps may have none left.
    gone = turn >= life.drops_kv_at
    cpu, disk, tails = (0, 0, 0) if gone else life.kv
    attended = (0, 0) if gone else life.delegated
    if not turn:  # prompts are attended where all is computed
        cpu, disk = cpu + attended[0], disk + attended[1]
    kv = Moved(cpu=cpu, disk=disk, tails=tails)
    on_cpu, on_disk = life.activations
    return BatchWork(
        batch=micro_batch(k),
        continues=turn > 0,
        embedding_bytes=life.embedding_bytes,
        kv=Passed(load=kv if turn else Moved(), store=kv, slot_bytes=cpu + disk + tails),
        inputs=Passed(
            load=_thrice(kv) if turn else Moved(),
            store=_thrice(kv),
            slot_bytes=3 * (cpu + disk + tails),
            num_loaded=7,
        ),
        activations=Moved(cpu=on_cpu, disk=on_disk),
        activation_slot_bytes=on_cpu + on_disk,
        delegated=_delegated(*attended) if turn and any(attended) else None,
        delegates_later=not turn and any(attended),
    )


def _thrice(kv: Moved) -> Moved:
    """What is passed where it is something else than keys and values."""
    return Moved(cpu=3 * kv.cpu, disk=3 * kv.disk, tails=3 * kv.tails)


def _delegated(cpu: int, disk: int) -> Delegated:
    return Delegated(
        num_rows=1,
        query_bytes=5,
        attended_bytes=4,
        kv=Passed(load=Moved(disk=disk), store=Moved(disk=disk), slot_bytes=disk),
    )


def micro_batch(k: int) -> MicroBatch:
    span = RowSpan(row=RowKey(k), start=0, num_new=1, kv_len=0, logit_positions=(0,))
    return MicroBatch(index=k, rows=(span,), token_ids=[0])


# -- oracles -----------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Held:
    """What is in a place."""

    owner: Owner
    num_pieces: int
    pieces: set[int] = field(default_factory=set)


def replay(operations: Sequence[Operation], order: Sequence[int]) -> str:
    """Run the operations in this order on places that hold owners; what went wrong, or nothing."""
    places: dict[Place, _Held] = {}
    for index in order:
        for access in operations[index].accesses:
            held = places.get(access.place)
            if access.is_write:
                if held is None or held.owner != access.owner:
                    held = places[access.place] = _Held(
                        owner=access.owner, num_pieces=access.num_pieces
                    )
                held.pieces.add(access.piece)
            elif held is None or held.owner != access.owner:
                return f"{operations[index]} finds {held} instead of {access.owner}"
            elif len(held.pieces) < held.num_pieces:
                return f"{operations[index]} finds {access.owner} incomplete"
    return ""


def some_order(operations: Sequence[Operation], seed: int) -> list[int]:
    """An order in which lanes that work at any speed may do the operations."""
    dice = random.Random(seed)
    favourite = dice.choice([*Lane, None])
    queues: dict[Lane, list[Operation]] = {}
    for operation in operations:
        queues.setdefault(operation.lane, []).append(operation)
    done: set[int] = set()
    order: list[int] = []
    while any(queues.values()):
        ready = [
            queue
            for queue in queues.values()
            if queue and all(index in done for _, index in queue[0].after)
        ]
        assert ready, "a deadlock: no lane can go on"
        preferred = [queue for queue in ready if queue[0].lane is favourite]
        operation = dice.choice(preferred or ready).pop(0)
        done.add(operation.index)
        order.append(operation.index)
    return order


def is_legal(operations: Sequence[Operation], rings: dict[str, Ring]) -> bool:
    """The verifier's question, answered from the closure of happens-before, as sets of bits."""
    before = _closure(operations)
    return before is not None and not any(
        problem(operations, before, rings) for problem in (_misplaced, _raced)
    )


def _closure(operations: Sequence[Operation]) -> list[int] | None:
    """Per operation the set of those that are surely done when it begins; None where waits are
    wrong. Its neighbour on the lane has begun, and has ended unless both pair."""
    before: list[int] = []
    at_end: list[int] = []
    last: dict[Lane, int] = {}
    for index, operation in enumerate(operations):
        if operation.index != index:
            return None
        bits = told = 0
        if operation.lane in last:
            neighbour = last[operation.lane]
            told = at_end[neighbour]
            both = operation.pairs and operations[neighbour].pairs
            bits = before[neighbour] if both else told
        for lane, other in operation.after:
            if other >= index or other < 0 or operations[other].lane is not lane:
                return None
            bits |= at_end[other]
        before.append(bits)
        at_end.append(bits | told | 1 << index)
        last[operation.lane] = index
    return before


def _misplaced(operations: Sequence[Operation], before: list[int], rings: dict[str, Ring]) -> bool:
    """Whether a slot is outside its ring, or gets more bytes than it has."""
    filled: dict[tuple[Place, Owner], int] = {}
    for operation in operations:
        for access in operation.accesses:
            ring = rings.get(access.place[0])
            if ring is None:
                continue
            if not 0 <= access.place[1] < ring.num_slots:
                return True
            key = (access.place, access.owner)
            filled[key] = filled.get(key, 0) + access.num_bytes * access.is_write
            if filled[key] > ring.slot_bytes:
                return True
    return False


def _raced(operations: Sequence[Operation], before: list[int], rings: dict[str, Ring]) -> bool:
    """Whether some access may meet another content than its own, complete."""
    touched: dict[Place, list[tuple[int, Any]]] = {}
    for operation in operations:
        for access in operation.accesses:
            touched.setdefault(access.place, []).append((operation.index, access))
    return any(_place_raced(accesses, before) for accesses in touched.values())


def _place_raced(accesses: list[tuple[int, Any]], before: list[int]) -> bool:
    for place, (index, access) in enumerate(accesses):
        tail = place
        while tail and accesses[tail - 1][1].owner == access.owner:
            tail -= 1
        current = accesses[tail:place]
        writes = [(i, a) for i, a in current if a.is_write]
        if access.is_write:
            if any(a.piece == access.piece for _, a in writes):
                return True
            needed = [] if current else [i for i, _ in _epoch_before(accesses, tail)]
        else:
            if not writes or len(writes) != writes[0][1].num_pieces:
                return True
            needed = [i for i, _ in writes]
        if any(i != index and not before[index] >> i & 1 for i in needed):
            return True
    return False


def _epoch_before(accesses: list[tuple[int, Any]], end: int) -> list[tuple[int, Any]]:
    """The accesses of the owner that was there before ``end``."""
    begin = end
    while begin and accesses[begin - 1][1].owner == accesses[end - 1][1].owner:
        begin -= 1
    return accesses[begin:end]
