"""Schedules of random models and sweeps: legal at any speed of the lanes, complete, and ahead.

Legality is judged twice: by the verifier, and by replaying the operations in random orders that
lanes and waits allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.plan.operation import Kind, Lane, Operation
from freight.plan.schedule import schedule
from freight.plan.sweep import BatchWork, Moved, StreamModel, StreamPiece, StreamUnit, Sweep
from freight.plan.verify import verify

from .streams import Case, cases, is_legal, micro_batch, replay, some_order


@settings(deadline=None, max_examples=100)
@given(case=cases(), seed=st.integers(0, 1000))
def test_legal_at_any_speed(case: Case, seed: int) -> None:
    operations = [*verify(case.stream(), case.rings())]
    assert is_legal(operations, case.rings())
    for shift in range(3):
        assert not replay(operations, some_order(operations, seed + shift))


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_every_computation_once_and_in_order(case: Case) -> None:
    """Unit by unit; where the CPU attends, in two parts, and micro-batch by micro-batch."""
    found = [
        (op.sweep, unit, op.batch.index, op.is_last)
        for op in case.operations()
        if op.kind in (Kind.COMPUTE, Kind.FINISH_ATTENTION) and op.batch is not None
        for unit in (own.unit for own in op.unit_places)
    ]
    last = len(case.model.units) - 1
    runs = case.runs()
    expected = [(sweep, unit, work.batch.index, unit == last) for sweep, unit, work in runs]
    found = [own for own in found if own in {*expected}]  # of experts others may be wanted too
    if not any(work.delegated for _, _, work in runs):
        by_unit = [own for own in found if case.model.units[own[1]].expert is None]
        assert by_unit == [own for own in expected if case.model.units[own[1]].expert is None]
    by_batch = [[run for run in own if run[2] == k] for own in (found, expected) for k in range(4)]
    assert by_batch[:4] == by_batch[4:]


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_what_the_cpu_attends_goes_there_and_back(case: Case) -> None:
    """Once for each attention unit, in this order, at any speed of the lanes."""
    turns: dict[tuple[int, int, int], list[Kind]] = {}
    for op in case.operations():
        if op.num_delegated and op.batch is not None and op.kind is not Kind.COMPUTE:
            turns.setdefault((op.sweep, op.unit, op.batch.index), []).append(op.kind)
    expected = {
        (sweep, unit, work.batch.index): work.delegated
        for sweep, unit, work in case.runs()
        if work.delegated and case.model.units[unit].kind == "attention"
    }
    assert set(turns) == set(expected)
    through_ram = {Kind.READ_DELEGATED, Kind.WRITE_DELEGATED}
    for key, kinds in turns.items():
        delegated = expected[key]
        assert [kind for kind in kinds if kind not in through_ram] == [
            Kind.BEGIN_ATTENTION,
            Kind.COPY_QUERIES,
            Kind.ATTEND,
            Kind.COPY_ATTENDED,
            Kind.FINISH_ATTENTION,
        ]
        assert (through_ram <= set(kinds)) == bool(delegated and delegated.kv.slot_bytes)


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_every_piece_once_per_sweep(case: Case) -> None:
    """And nothing of experts that nobody chose, but where there are tokens enough for all."""
    kind = Kind.READ_WEIGHTS if case.model.compute_tier == "cpu" else Kind.COPY_WEIGHTS
    units, brought = case.model.units, Counter[tuple[int, int, int]]()
    for op in case.operations():
        if op.kind is kind:
            brought.update((op.sweep, own.unit, own.piece) for own in op.unit_places)
            pieces = [units[own.unit].pieces[own.piece] for own in op.unit_places]
            assert op.num_bytes == sum(piece.num_bytes for piece in pieces)
            from_tier = "disk" if case.model.compute_tier == "cpu" else "cpu"
            assert len(pieces) == 1 or {piece.tier for piece in pieces} == {from_tier}
    assert brought == Counter(
        (sweep, unit, index)
        for sweep, unit in case.coming()
        for index in range(len(units[unit].pieces))
    )


@settings(deadline=None, max_examples=100)
@given(case=cases())
def test_experts_come_in_groups(case: Case) -> None:
    """Neighbours of those that come, as many as take the blocks that a group may have; each
    micro-batch that chose any of them computes them all, where they are. What nobody chose is
    waited for."""
    model, found = case.model, []
    kind = Kind.READ_WEIGHTS if model.compute_tier == "cpu" else Kind.COPY_WEIGHTS
    for op in case.operations():
        if op.kind is not Kind.COMPUTE or model.units[op.unit].expert is None:
            assert op.kind is kind or not op.others
            continue
        assert op.batch is not None
        found.append((op.sweep, tuple(own.unit for own in op.unit_places), op.batch.index))
        held = [
            (place.slot + block) % model.ring_blocks
            for place in op.unit_places
            for block in range(model.num_blocks[place.unit])
        ]
        assert sorted(held) == sorted(a.place[1] for a in op.accesses if a.place[0] == "weights")
    assert found == [
        (sweep, units, work.batch.index)
        for sweep, units, work in case.steps()
        if model.units[units[0]].expert is not None
    ]


@settings(deadline=None, max_examples=100)
@given(case=cases())
def test_keys_are_fetched_while_those_before_them_are_used(case: Case) -> None:
    """Of the next micro-batch that has any, in a later layer where this was the last of its own:
    where one passes a unit its keys would otherwise wait until that layer has been attended."""
    issued: dict[tuple[int, int, int], int] = {}
    computed: dict[tuple[int, int, int], int] = {}
    for op in case.operations():
        if op.batch is None:
            continue
        own = op.sweep, op.unit, op.batch.index
        if any(a.is_write and a.place[0] == "kv slot" and a.owner[-1] == 0 for a in op.accesses):
            issued[own] = op.index
        elif op.lane is Lane.COMPUTE:
            computed.setdefault(own, op.index)
    for sweep in case.sweeps:
        turns = [
            (sweep.index, unit, work.batch.index)
            for unit, own in enumerate(case.model.units)
            for work in sweep.works
            if work.passes(own)
        ]
        for before, own in pairwise(turns):
            assert issued.get(own, -1) < computed[before]
        for too_early, own in zip(turns, turns[2:], strict=False):
            assert issued.get(own, computed[too_early]) >= computed[too_early]


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_bytes_of_keys_and_activations(case: Case) -> None:
    """Each layer moves a micro-batch's KV in and out once; each unit its activations."""
    moved: Counter[Kind] = Counter()
    for op in case.operations():
        moved[op.kind] += op.num_bytes
    units = case.model.units
    runs = [(units[own[0]], own[0], work) for _, own, work in case.steps()]
    attended = [work for unit, _, work in runs if unit.kind == "attention"]
    far = [work.passed(unit) for unit, _, work in runs if unit.kind == "attention"]
    embedded = [work for _, number, work in runs if number == 0]
    mixing = "embedding", "attention", "recurrence"
    picks_at = 1 + max(i for i, unit in enumerate(units) if unit.kind in mixing)
    # In before all units but the embedding until what the head needs is picked, out after all
    # before that.
    passed = [work for _, number, work in runs if 0 < number <= picks_at]
    on_device = case.model.compute_tier == "gpu"
    expected = {
        Kind.READ_KV: sum(own.load.disk for own in far),
        Kind.WRITE_KV: sum(own.store.disk for own in far),
        Kind.READ_HIDDEN: sum(w.activations.disk for w in passed),
        Kind.WRITE_HIDDEN: sum(w.activations.disk for w in passed),
        Kind.READ_EMBEDDING: sum(w.embedding_bytes for w in embedded),
    }
    if on_device:
        expected |= {
            Kind.COPY_KV: sum(_sum(own.load) for own in far),
            Kind.COPY_BACK_KV: sum(_sum(own.store) for own in far),
            Kind.COPY_HIDDEN: sum(_sum(w.activations) for w in passed),
            Kind.COPY_BACK_HIDDEN: sum(_sum(w.activations) for w in passed),
            Kind.COPY_EMBEDDING: sum(w.embedding_bytes for w in embedded),
        }
        delegated = [w.delegated for w in attended if w.delegated]
        again = [w for w in attended if w.delegated]  # begun, then finished
        expected |= {
            Kind.COPY_QUERIES: sum(d.query_bytes for d in delegated),
            Kind.COPY_ATTENDED: sum(d.attended_bytes for d in delegated),
            Kind.READ_DELEGATED: sum(d.kv.load.disk for d in delegated),
            Kind.WRITE_DELEGATED: sum(d.kv.store.disk for d in delegated),
        }
        expected[Kind.READ_HIDDEN] += sum(w.activations.disk for w in again)
        expected[Kind.COPY_HIDDEN] += sum(_sum(w.activations) for w in again)
    for kind in set(Kind) - {Kind.READ_WEIGHTS, Kind.COPY_WEIGHTS}:
        assert moved[kind] == expected.get(kind, 0), kind


def _sum(moved: Moved) -> int:
    return moved.cpu + moved.disk + moved.tails


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_waits_are_for_earlier_operations_of_other_lanes(case: Case) -> None:
    operations = case.operations()
    for place, operation in enumerate(operations):
        assert operation.index == place
        lanes = [lane for lane, _ in operation.after]
        assert len(set(lanes)) == len(lanes) and operation.lane not in lanes
        for lane, index in operation.after:
            assert index < place and operations[index].lane is lane


# -- running ahead: four equal units of four pieces, three micro-batches, three sweeps -------------

K, PIECES, SWEEPS = 3, 4, 3


def even_case(*, ring_units: int, compute_tier: str = "cpu") -> Case:
    pieces = tuple(StreamPiece(tier="disk", num_bytes=8, offset=8 * i) for i in range(PIECES))
    kinds = ("attention", "mlp", "head", "head")
    units = (
        StreamUnit(kind="embedding", layer=None),
        *(
            StreamUnit(kind=kind, layer=0 if place < 2 else None, pieces=pieces)  # type: ignore[arg-type]
            for place, kind in enumerate(kinds)
        ),
    )
    model = StreamModel(
        units=units,
        compute_tier=compute_tier,  # type: ignore[arg-type]
        ring_blocks=ring_units * PIECES,
        block_bytes=8,
    )
    sweeps = tuple(
        Sweep(
            index=index,
            works=tuple(BatchWork(batch=micro_batch(k), continues=index > 0) for k in range(K)),
        )
        for index in range(SWEEPS)
    )
    return Case(model=model, sweeps=sweeps)


def loads_between_computations(operations: list[Operation]) -> dict[tuple[int, int], set[int]]:
    """Per (sweep, unit): after how many computations its pieces are issued."""
    places: dict[tuple[int, int], set[int]] = {}
    num_computed = 0
    for op in operations:
        if op.kind is Kind.COMPUTE:
            num_computed += 1
        elif op.kind is Kind.READ_WEIGHTS:
            places.setdefault((op.sweep, op.unit), set()).add(num_computed)
    return places


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
@pytest.mark.parametrize("ring_units", [2, 3])
def test_loads_run_ahead_over_the_border_of_a_sweep(ring_units: int, tier: str) -> None:
    operations = even_case(ring_units=ring_units, compute_tier=tier).operations()
    for sweep in range(SWEEPS - 1):
        last = max(op.index for op in operations if op.is_last and op.sweep == sweep)
        first_loads = [
            op.index
            for op in operations
            if op.lane is Lane.DISK_READ and op.sweep == sweep + 1 and op.unit == 1
        ]
        assert len(first_loads) == PIECES and max(first_loads) < last


@pytest.mark.parametrize("ring_units", [2, 3])
def test_slices_are_spread_over_the_micro_batches(ring_units: int) -> None:
    """In the steady state what comes during a unit is spread over its three computations."""
    places = loads_between_computations(even_case(ring_units=ring_units).operations())
    later = [places[sweep, unit] for sweep in (1, 2) for unit in (2, 3, 4)]
    assert all(len(slices) == K for slices in later)


def test_a_unit_never_comes_late() -> None:
    """With room for two units each is issued whole before the unit ahead of it has ended."""
    places = loads_between_computations(even_case(ring_units=2).operations())
    for sweep in (1, 2):
        for unit in (2, 3, 4):
            begins = (sweep * 5 + unit) * K
            assert max(places[sweep, unit]) < begins


@pytest.mark.parametrize("ring_units", [3, 12])
def test_nothing_is_brought_that_nobody_expects(ring_units: int) -> None:
    """However much room there is: that one sweep follows says nothing of the one after it."""
    operations = even_case(ring_units=ring_units).operations()
    assert max(op.sweep for op in operations) == SWEEPS - 1


def test_a_sweep_is_asked_for_when_its_predecessor_has_been_taken() -> None:
    """Rows can depend on the tokens of the sweep before, and no load may need the sweep itself."""
    case = even_case(ring_units=2)
    asked: list[int] = []

    def sweeps() -> Iterator[Sweep]:
        for sweep in case.sweeps:
            asked.append(sweep.index)
            yield sweep

    for operation in schedule(sweeps(), case.model, lambda: len(asked) < SWEEPS):
        if operation.batch is not None:
            assert asked[-1] == operation.sweep
    assert asked == [*range(SWEEPS)]
