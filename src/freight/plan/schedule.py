"""Sweeps in, operations out: one continuous stream, with no barrier between sweeps.

A sweep is one pass over the units in which each unit's weights are brought once for the whole
block of rows. Row-by-row and zig-zag differ only in the sweeps that come in. While a unit is
computed, later units' weights come in slices across the micro-batches, also over the border of a
sweep (``weight_stream``); the activations of the next micro-batch are fetched, and the KV of the
next one that has any, be it in a later layer; those of the previous one are stored. Waits are
between operations: each lists those of other lanes it needs.
What a router has chosen is asked for after its last computation has been taken; until then nothing
of its experts is issued, unless all are expected.

In which order a sweep's computations come is said in ``steps``, what the CPU attends meanwhile in
``delegation``, what comes from other stages of a pipeline and goes to them in ``handover``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from freight.plan.delegation import Delegation, attended_home
from freight.plan.handover import Handover
from freight.plan.operation import Access, Kind, Lane, Operation
from freight.plan.policy import Tier
from freight.plan.scoreboard import Scoreboard, read, write
from freight.plan.steps import Step, steps_of
from freight.plan.sweep import Awaited, BatchWork, StreamModel, StreamUnit, Sweep
from freight.plan.weight_stream import WeightStream

__all__ = ["schedule"]


def schedule(
    sweeps: Iterator[Sweep | Awaited],
    model: StreamModel,
    expects_more: Callable[[], bool],
    chosen: Callable[[int], Collection[int]] | None = None,
) -> Iterator[Operation]:
    """Operations of ``sweeps``; ``expects_more`` says near a sweep's end whether one follows.

    ``chosen`` gives the experts that micro-batch k has chosen in the layer computed last.

    Each sweep is asked for after the last operation of the one before has been taken, so that its
    rows can depend on the tokens. A wrong guess costs loads that nobody uses. In a pipeline tokens
    of earlier sweeps are awaited between them.
    """
    board = Scoreboard(staging_slots=model.staging_slots)
    weights = WeightStream(model=model, board=board, expects_more=expects_more)
    rolling = frozenset(number for number, unit in enumerate(model.units) if unit.rolls)
    stream = _Stream(
        model=model,
        board=board,
        weights=weights,
        delegation=Delegation(board=board, rolling=rolling),
        handover=Handover(turns=sweeps, model=model, board=board),
        chosen=chosen or _nothing_chosen,
        keeping=tuple(number for number, unit in enumerate(model.units) if unit.keeps),
    )
    return stream.run()


def _home(unit: StreamUnit, tier: Tier) -> str:
    """Of what rows keep for a unit: a layer may have two of these."""
    return f"{unit.kind} on {tier}, layer {unit.layer}"


def _nothing_chosen(k: int) -> Collection[int]:
    raise AssertionError("a model with experts needs to be asked what was chosen")


_KINDS: Final = {
    "whole": Kind.COMPUTE,
    "begin": Kind.BEGIN_ATTENTION,
    "finish": Kind.FINISH_ATTENTION,
}

_KV_AHEAD: Final = 1
"""Slots of KV that is fetched while another's is used, and one more's is stored."""

_Run = Generator[Operation, None, Step | None]


@dataclass(kw_only=True, slots=True)
class _Stream:
    """The generator's state: what is where, and what was issued. ``keeping`` are the units
    for which rows keep anything, few among thousands of experts; ``unfetched`` those of the sweep,
    with a micro-batch each, whose KV has still to be fetched, in the order they are computed."""

    model: StreamModel
    board: Scoreboard
    weights: WeightStream
    delegation: Delegation
    handover: Handover
    chosen: Callable[[int], Collection[int]]
    keeping: tuple[int, ...]
    unfetched: deque[tuple[int, BatchWork]] = field(default_factory=deque)
    kv_slots: dict[tuple[int, int], int] = field(default_factory=dict)
    activation_slots: dict[int, int] = field(default_factory=dict)
    embedding_slots: dict[int, int] = field(default_factory=dict)

    @property
    def on_device(self) -> bool:
        return self.model.compute_tier == "gpu"

    # -- one sweep ---------------------------------------------------------------------------

    def run(self) -> Iterator[Operation]:
        while (sweep := (yield from self.handover.next_sweep())) is not None:
            self.weights.expect(sweep)
            steps = steps_of(sweep, self.model, self.chosen, self.weights.choose)
            step = next(steps, None)
            yield from self.begin_delegation(sweep)
            self.unfetched = deque(
                (number, work)
                for number in self.keeping
                for work in sweep.works
                if work.passes(self.model.units[number])
            )
            if step is not None:  # the embedding
                yield from self.load_activations(sweep.index, step)
            while step is not None:
                unit = step.unit
                step = yield from self.run_step(sweep.index, step, steps)
                if unit == 0 and step is not None and step.unit:
                    yield from self.handover.look_ahead(sweep)

    def begin_delegation(self, sweep: Sweep) -> Iterator[Operation]:
        turns = [
            (number, unit.layer, work)
            for number, unit in enumerate(self.model.units)
            if unit.kind == "attention" and unit.layer is not None
            for work in sweep.works
            if work.delegated
        ]
        yield from self.delegation.begin(sweep.index, turns)

    def run_step(self, sweep: int, step: Step, steps: Iterator[Step]) -> _Run:
        """Operations around one computation; returns the next step."""
        unit, work = step.unit, step.work
        if step.is_first:
            self.weights.begin(sweep, unit, step.oldest)
        yield from self.weights.bring(sweep, step.members[-1], step.num_turns)
        kind = self.model.units[unit].kind
        is_open = kind == "router" and step.num_turns == 1
        following = None if is_open else next(steps, None)
        # Rows of the same micro-batch must be stored first; there is one buffer of embedding rows,
        # too large to have two of for what it would hide.
        apart = unit > 0 and following is not None and following.work is not work
        passes_kv = self.passes_kv(step)
        while self.unfetched and len(self.kv_slots) < passes_kv + _KV_AHEAD:
            yield from self.load_kv(sweep, *self.unfetched.popleft())
        if following is not None and apart:
            yield from self.load_activations(sweep, following)
        if step.is_first and self.model.units[unit].needs_decode:
            yield self.weights.decode(sweep, unit)
        if step.part == "finish":
            yield from self.delegation.bring_back(unit, work)
        yield self.compute(sweep, step)
        if passes_kv:
            yield from self.store_kv(sweep, step)
        yield from self.store_activations(sweep, step)
        yield from self.go_on_delegating(step)
        if unit == len(self.model.units) - 1:
            yield from self.handover.hand_over(sweep, unit, work)
        if is_open:
            following = next(steps, None)
        if following is not None and not apart:
            yield from self.load_activations(sweep, following)
        return following

    def go_on_delegating(self, step: Step) -> Iterator[Operation]:
        layer = self.model.units[step.unit].layer
        if step.part == "begin":
            assert layer is not None
            yield from self.delegation.send(step.unit, layer, step.work)
        elif step.part == "finish":
            yield from self.delegation.end(step.unit, step.work)

    # -- KV cache ----------------------------------------------------------------------------

    def load_kv(self, sweep: int, unit: int, work: BatchWork) -> Iterator[Operation]:
        """Fetch what the offloaded rows' keys and values are so far into a slot."""
        layer = self.model.units[unit].layer
        assert layer is not None
        k = work.batch.index
        slot = self.kv_slots[unit, k] = self.board.take_slot("kv slot")
        home = partial(_home, self.model.units[unit])
        passed = work.passed(self.model.units[unit])
        load, size = passed.load, passed.slot_bytes
        if not load:
            return
        make = partial(self.board.make, sweep=sweep, unit=unit, batch=work.batch)
        arrival = write("kv slot", slot, (sweep, unit, k, 0), size)
        from_disk = bool(load.disk or load.tails)
        disk = [self.board.home(home("disk"), k)] if from_disk else []
        host = [self.board.home(home("cpu"), k)] if load.cpu else []
        if not self.on_device:
            moved = load.disk
            tail = [self.board.home(home("disk"), k)]
            accesses = [*tail, arrival]
            yield make(Kind.READ_KV, Lane.DISK_READ, accesses, slot=slot, num_bytes=moved)
            return
        source = -1
        if disk:
            source = self.board.take_slot("kv in")
            moved = load.disk
            accesses = [*disk, write("kv in", source, (sweep, unit, k), size)]
            yield make(Kind.READ_KV, Lane.DISK_READ, accesses, slot=source, num_bytes=moved)
            host.append(read("kv in", source, (sweep, unit, k)))
        moved = load.cpu + load.disk + load.tails
        yield make(
            Kind.COPY_KV,
            Lane.TO_DEVICE,
            [*host, arrival],
            slot=slot,
            source_slot=source,
            num_bytes=moved,
        )

    def passes_kv(self, step: Step) -> bool:
        return step.part != "finish" and step.work.passes(self.model.units[step.unit])

    def store_kv(self, sweep: int, step: Step) -> Iterator[Operation]:
        """Bring the pages that the new tokens touched back to their homes."""
        unit, work = step.unit, step.work
        layer = self.model.units[unit].layer
        assert layer is not None
        k = work.batch.index
        slot = self.kv_slots.pop((unit, k))
        home = partial(_home, self.model.units[unit])
        passed = work.passed(self.model.units[unit])
        store = passed.store
        delegates_later = work.delegates_later and self.model.units[unit].kind == "attention"
        make = partial(self.board.make, sweep=sweep, unit=unit, batch=work.batch)
        source = read("kv slot", slot, (sweep, unit, k, 1))
        disk_home = home("disk")
        if not self.on_device:
            accesses = [source, self.board.new_home(disk_home, k, (sweep,))]
            moved = store.disk
            yield make(Kind.WRITE_KV, Lane.DISK_WRITE, accesses, source_slot=slot, num_bytes=moved)
            return
        accesses = [source, self.board.new_home(home("cpu"), k, (sweep,))]
        if delegates_later:
            accesses.append(self.board.new_home(attended_home("cpu", layer), k, (sweep, 0)))
        out = -1
        to_disk = bool(store.disk or store.tails)
        if to_disk:
            out = self.board.take_slot("kv out")
            accesses.append(write("kv out", out, (sweep, unit, k), passed.slot_bytes))
        moved = store.cpu + store.disk + store.tails
        yield make(
            Kind.COPY_BACK_KV,
            Lane.FROM_DEVICE,
            accesses,
            slot=out,
            source_slot=slot,
            num_bytes=moved,
        )
        if to_disk:
            accesses = [read("kv out", out, (sweep, unit, k))]
            accesses.append(self.board.new_home(disk_home, k, (sweep,)))
            if delegates_later:
                accesses.append(self.board.new_home(attended_home("disk", layer), k, (sweep, 0)))
            moved = store.disk
            yield make(Kind.WRITE_KV, Lane.DISK_WRITE, accesses, source_slot=out, num_bytes=moved)

    # -- activations -------------------------------------------------------------------------

    def load_activations(self, sweep: int, step: Step) -> Iterator[Operation]:
        """Fetch the offloaded rows of the residual stream; for the embedding, of the table."""
        unit, work = step.unit, step.work
        kind = self.model.units[unit].kind
        if kind == "embedding":
            yield from self.load_embedding(sweep, work)
        if not work.activation_slot_bytes or unit > self.model.picks_at:
            return
        k = work.batch.index
        make = partial(self.board.make, sweep=sweep, unit=unit, batch=work.batch)
        size = work.activation_slot_bytes
        slot = self.activation_slots[k] = self.board.take_slot("activation slot")
        if kind == "embedding":
            return
        stage = 2 if step.part == "begin" else 0  # then only read, and loaded again to finish
        arrival = write("activation slot", slot, (sweep, unit, k, stage), size)
        accesses = [arrival]
        source = -1
        if work.activations.disk:
            accesses.insert(0, self.board.home("activations on disk", k))
        if work.activations.disk and self.on_device:
            source = self.board.take_slot("activations in")
            staged = write("activations in", source, (sweep, unit, k, stage), size)
            accesses = [accesses[0], staged]
        if work.activations.disk:
            moved = work.activations.disk
            target = source if self.on_device else slot
            yield make(Kind.READ_HIDDEN, Lane.DISK_READ, accesses, slot=target, num_bytes=moved)
            accesses = [read("activations in", source, (sweep, unit, k, stage)), arrival]
        if self.on_device:
            if work.activations.cpu:
                accesses.insert(0, self.board.home("activations on cpu", k))
            yield make(
                Kind.COPY_HIDDEN,
                Lane.TO_DEVICE,
                accesses,
                slot=slot,
                source_slot=source,
                num_bytes=work.activations.cpu + work.activations.disk,
            )

    def load_embedding(self, sweep: int, work: BatchWork) -> Iterator[Operation]:
        if not work.embedding_bytes:
            return
        k = work.batch.index
        make = partial(
            self.board.make, sweep=sweep, unit=0, batch=work.batch, num_bytes=work.embedding_bytes
        )
        slot = k  # where it was received, or will be computed on
        if not self.model.receives:
            accesses = [self.board.home("tokens", k)] if work.continues else []
            if not self.model.embeds_in_place:
                slot = self.board.take_slot("embedding rows")
            accesses.append(write("embedding rows", slot, (sweep, k), work.embedding_bytes))
            yield make(Kind.READ_EMBEDDING, Lane.DISK_READ, accesses, slot=slot)
        self.embedding_slots[k] = slot
        if self.on_device:
            source, slot = slot, self.board.take_slot("embedding slot")
            accesses = [
                read("embedding rows", source, (sweep, k)),
                write("embedding slot", slot, (sweep, k), work.embedding_bytes),
            ]
            kind, lane = Kind.COPY_EMBEDDING, Lane.TO_DEVICE
            yield make(kind, lane, accesses, slot=slot, source_slot=source)
            self.embedding_slots[k] = slot

    def store_activations(self, sweep: int, step: Step) -> Iterator[Operation]:
        unit, work = step.unit, step.work
        if unit >= self.model.picks_at or not work.activation_slot_bytes:
            return
        k = work.batch.index
        slot = self.activation_slots.pop(k)
        if step.part == "begin":
            return
        make = partial(self.board.make, sweep=sweep, unit=unit, batch=work.batch)
        accesses = [read("activation slot", slot, (sweep, unit, k, 1))]
        source = slot
        if self.on_device:
            source = -1
            if work.activations.cpu:
                accesses.append(self.board.new_home("activations on cpu", k, (sweep, unit)))
            if work.activations.disk:
                source = self.board.take_slot("activations out")
                size = work.activation_slot_bytes
                accesses.append(write("activations out", source, (sweep, unit, k), size))
            yield make(
                Kind.COPY_BACK_HIDDEN,
                Lane.FROM_DEVICE,
                accesses,
                slot=source,
                source_slot=slot,
                num_bytes=work.activations.cpu + work.activations.disk,
            )
            accesses = [read("activations out", source, (sweep, unit, k))]
        if work.activations.disk:
            accesses.append(self.board.new_home("activations on disk", k, (sweep, unit)))
            moved = work.activations.disk
            yield make(
                Kind.WRITE_HIDDEN, Lane.DISK_WRITE, accesses, source_slot=source, num_bytes=moved
            )

    # -- computation -------------------------------------------------------------------------

    def compute(self, sweep: int, step: Step) -> Operation:
        unit, work = step.unit, step.work
        model_unit, k = self.model.units[unit], work.batch.index
        (own, *others), accesses = self.weights.places(sweep, step.members)
        if model_unit.needs_decode:
            accesses.append(read("decoded weights", 0, (sweep, unit)))
        num_recomputed = 0
        if self.passes_kv(step):
            passed = work.passed(model_unit)
            accesses += self.board.in_place(
                "kv slot", self.kv_slots[unit, k], (sweep, unit, k), passed.load
            )
            num_recomputed = passed.num_loaded if model_unit.recomputes else 0
        activation_slot = self.activation_slots.get(k, -1)
        accesses += self.activation_accesses(sweep, step)
        if step.part != "whole":
            accesses += self.delegation.accesses(unit, work, begins=step.part == "begin")
        if model_unit.kind == "router":
            accesses.append(self.board.new_home("routes", k, (sweep, unit)))
        if model_unit.expert is not None:
            accesses.append(self.board.home("routes", k))
        is_last = unit == len(self.model.units) - 1 and not self.model.sends
        if is_last:
            name = "made tokens" if self.model.receives else "tokens"
            accesses.append(self.board.new_home(name, k, (sweep,)))
        return self.board.make(
            _KINDS[step.part],
            Lane.COMPUTE,
            accesses,
            sweep=sweep,
            unit=unit,
            batch=work.batch,
            slot=own.slot,
            others=tuple(others),
            num_chosen=step.num_chosen,
            source_slot=self.place_of_rows(unit, k),
            activation_slot=activation_slot,
            is_last=is_last,
            num_delegated=0 if work.delegated is None else work.delegated.num_rows,
            num_recomputed=num_recomputed,
        )

    def place_of_rows(self, unit: int, k: int) -> int:
        """The slot with the rows that this unit needs beside the weights: KV or embedding rows."""
        kind = self.model.units[unit].kind
        if kind == "embedding":
            return self.embedding_slots.pop(k, -1)
        return self.kv_slots.get((unit, k), -1)

    def activation_accesses(self, sweep: int, step: Step) -> list[Access]:
        unit, work = step.unit, step.work
        k = work.batch.index
        if unit > self.model.picks_at:
            return [read("picked activations", k, (sweep,))]
        accesses: list[Access] = []
        kind = self.model.units[unit].kind
        if kind == "embedding" and work.embedding_bytes:
            ring = "embedding slot" if self.on_device else "embedding rows"
            accesses.append(read(ring, self.embedding_slots[k], (sweep, k)))
        elif kind == "embedding" and self.model.embeds_in_place:
            accesses.append(write("embedding rows", k, (sweep, k), 0))
        if work.activation_slot_bytes:
            slot, loaded = self.activation_slots[k], kind != "embedding"
            if step.part == "begin":
                return [*accesses, read("activation slot", slot, (sweep, unit, k, 2))]
            accesses += self.board.in_place("activation slot", slot, (sweep, unit, k), loaded)
        if unit == self.model.picks_at:
            self.activation_slots.pop(k, None)
            if self.model.embeds_in_place:
                accesses.append(read("embedding rows", k, (sweep, k)))
            departs = self.model.sends
            picked = write("picked activations", k, (sweep,), 0)
            accesses.append(self.handover.departure(sweep, work) if departs else picked)
        return accesses
