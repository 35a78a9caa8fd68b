"""The verifier rejects a mutated stream exactly when it is illegal.

Streams of the schedule are mutated at random: waits dropped, operations removed or swapped, slots
and owners changed, places overfilled. Whether the result is legal is told by the closure of
happens-before; some mutations never are, and are rejected always.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from freight.plan.operation import Access, Lane, Operation
from freight.plan.verify import IllegalSchedule, Ring, verify

from .streams import Case, cases, is_legal
from .test_schedule import even_case

Operations = list[Operation]
Mutation = Callable[[Operations, random.Random], Operations]


def is_accepted(operations: Operations, rings: Mapping[str, Ring]) -> bool:
    try:
        passed = [*verify(operations, rings)]
    except IllegalSchedule:
        return False
    assert passed == operations
    return True


def renumber(operations: Operations) -> Operations:
    """Indices as they come; waits follow what they named, or fall away with it."""
    places = {operation.index: place for place, operation in enumerate(operations)}
    return [
        operation._replace(
            index=place,
            after=tuple((lane, places[i]) for lane, i in operation.after if i in places),
        )
        for place, operation in enumerate(operations)
    ]


def put(operations: Operations, changed: Operation) -> Operations:
    return [changed if operation.index == changed.index else operation for operation in operations]


def drop_a_wait(operations: Operations, dice: random.Random) -> Operations:
    waiting = [operation for operation in operations if operation.after]
    if not waiting:
        return operations
    chosen = dice.choice(waiting)
    waits = [*chosen.after]
    waits.pop(dice.randrange(len(waits)))
    return put(operations, chosen._replace(after=tuple(waits)))


def wait_for_an_earlier_one(operations: Operations, dice: random.Random) -> Operations:
    waiting = [operation for operation in operations if operation.after]
    if not waiting:
        return operations
    chosen = dice.choice(waiting)
    number = dice.randrange(len(chosen.after))
    lane, index = chosen.after[number]
    earlier = [op.index for op in operations[:index] if op.lane is lane]
    if not earlier:
        return operations
    waits = [*chosen.after]
    waits[number] = (lane, earlier[-1])
    return put(operations, chosen._replace(after=tuple(waits)))


def swap_two(operations: Operations, dice: random.Random) -> Operations:
    first = dice.randrange(len(operations))
    second = min(len(operations) - 1, first + dice.randint(1, 6))
    swapped = [*operations]
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return renumber(swapped)


def remove_one(operations: Operations, dice: random.Random) -> Operations:
    gone = dice.choice(operations)
    return renumber([operation for operation in operations if operation is not gone])


def change_access(
    operations: Operations, dice: random.Random, change: Callable[[Access], Access]
) -> Operations:
    chosen = dice.choice([operation for operation in operations if operation.accesses])
    accesses = [*chosen.accesses]
    number = dice.randrange(len(accesses))
    accesses[number] = change(accesses[number])
    return put(operations, chosen._replace(accesses=tuple(accesses)))


def another_slot(operations: Operations, dice: random.Random) -> Operations:
    step = dice.choice([-1, 1, 2])
    return change_access(
        operations, dice, lambda a: a._replace(place=(a.place[0], a.place[1] + step))
    )


def another_owner(operations: Operations, dice: random.Random) -> Operations:
    return change_access(operations, dice, lambda a: a._replace(owner=(a.owner[0] + 1, 9)))


def another_lane(operations: Operations, dice: random.Random) -> Operations:
    """Same waits, on a lane that does not keep the order that the operation relied on."""
    chosen = dice.choice(operations)
    lane = dice.choice([lane for lane in Lane if lane is not chosen.lane])
    return put(operations, chosen._replace(lane=lane))


def one_piece_more(operations: Operations, dice: random.Random) -> Operations:
    return change_access(operations, dice, lambda a: a._replace(num_pieces=a.num_pieces + 1))


MUTATIONS: list[Mutation] = [
    drop_a_wait,
    wait_for_an_earlier_one,
    swap_two,
    remove_one,
    another_slot,
    another_owner,
    another_lane,
    one_piece_more,
]


@pytest.mark.parametrize("mutation", MUTATIONS)
@settings(deadline=None, max_examples=30)
@given(case=cases(), seed=st.integers(0, 10_000))
def test_rejected_exactly_when_illegal(mutation: Mutation, case: Case, seed: int) -> None:
    operations = case.operations()
    assume(operations)
    mutated = mutation(operations, random.Random(seed))
    assert is_accepted(mutated, case.rings()) == is_legal(mutated, case.rings())


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_do_harm(mutation: Mutation) -> None:
    """Each kind of mutation is illegal at times, so that the test above can fail."""
    case = even_case(ring_units=2, compute_tier="gpu")
    operations = case.operations()
    accepted = [
        is_accepted(mutation(operations, random.Random(seed)), case.rings()) for seed in range(40)
    ]
    assert not all(accepted)


# -- what is never legal ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(case=cases(), seed=st.integers(0, 10_000))
def test_reading_another_owner_is_rejected(case: Case, seed: int) -> None:
    operations = case.operations()
    readers = [op for op in operations if any(not a.is_write for a in op.accesses)]
    assume(readers)
    chosen = random.Random(seed).choice(readers)
    accesses = tuple(a if a.is_write else a._replace(owner=(*a.owner, 7)) for a in chosen.accesses)
    assert not is_accepted(put(operations, chosen._replace(accesses=accesses)), case.rings())


@settings(deadline=None, max_examples=30)
@given(case=cases(), seed=st.integers(0, 10_000))
def test_a_load_that_somebody_needs_cannot_be_removed(case: Case, seed: int) -> None:
    operations = case.operations()
    places = {a.place: op for op in operations for a in op.accesses if a.place[0] == "weights"}
    loads = [op for op in operations if op.lane is not Lane.COMPUTE and op.accesses]
    loads = [op for op in loads if any(a.place in places and a.is_write for a in op.accesses)]
    assume(loads)
    gone = random.Random(seed).choice(loads)
    assert not is_accepted(renumber([op for op in operations if op is not gone]), case.rings())


@settings(deadline=None, max_examples=30)
@given(case=cases(), seed=st.integers(0, 10_000))
def test_a_ring_that_is_too_small_is_rejected(case: Case, seed: int) -> None:
    """One slot fewer than the highest that is used, and one byte fewer than the fullest has."""
    operations, rings = case.operations(), case.rings()
    writes = [a for op in operations for a in op.accesses if a.is_write and a.place[0] in rings]
    assume(writes)
    name = random.Random(seed).choice(sorted({a.place[0] for a in writes}))
    most_slots = 1 + max(a.place[1] for a in writes if a.place[0] == name)
    filled: dict[object, int] = {}
    for access in (a for a in writes if a.place[0] == name):
        key = (access.place, access.owner)
        filled[key] = filled.get(key, 0) + access.num_bytes
    most_bytes = max(filled.values())
    fits = {**rings, name: Ring(num_slots=most_slots, slot_bytes=most_bytes)}
    assert is_accepted(operations, fits)
    fewer = {**rings, name: Ring(num_slots=most_slots - 1, slot_bytes=most_bytes)}
    assert not is_accepted(operations, fewer)
    if most_bytes:
        smaller = {**rings, name: Ring(num_slots=most_slots, slot_bytes=most_bytes - 1)}
        assert not is_accepted(operations, smaller)


def test_an_operation_out_of_turn_is_rejected() -> None:
    case = even_case(ring_units=2)
    operations = case.operations()
    assert not is_accepted(operations[1:], case.rings())
    operations[3], operations[4] = operations[4], operations[3]
    assert not is_accepted(operations, case.rings())


def test_waiting_for_what_comes_later_is_rejected() -> None:
    case = even_case(ring_units=2)
    operations = case.operations()
    waiting = next(op for op in operations if op.after)
    lane = waiting.after[0][0]
    later = next(op.index for op in operations[waiting.index :] if op.lane is lane)
    mutated = put(operations, waiting._replace(after=((lane, later),)))
    assert not is_accepted(mutated, case.rings())


def test_legal_operations_pass_before_the_first_illegal_one() -> None:
    """The verifier is in the path of the executor: what it has passed on may have been run."""
    case = even_case(ring_units=2)
    operations = case.operations()
    last = operations[-1]
    operations[-1] = last._replace(after=((last.lane, last.index + 1),))
    passed = []
    with pytest.raises(IllegalSchedule, match="which is not earlier"):
        for operation in verify(operations, case.rings()):
            passed.append(operation)
    assert passed == operations[:-1]


def test_pieces_that_pair_are_not_in_order() -> None:
    """A piece may not rely on its neighbour's end: neither may overwrite what the other writes."""
    reads = [op for op in even_case(ring_units=2).operations() if op.pairs][:2]
    place = reads[0].accesses[0].place
    first, second = (
        op._replace(
            index=index,
            after=(),
            accesses=(Access(place=place, owner=op.accesses[0].owner, is_write=True),),
        )
        for index, op in enumerate(reads)
    )
    alike = second.accesses[0]._replace(owner=("another",))
    assert is_accepted([first], {})
    assert not is_accepted([first, second._replace(accesses=(alike,))], {})
