"""The virtual clock against a longest path, a sum, and two operations reckoned by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.plan.operation import Kind, Lane, Operation
from freight.plan.simulate import Demand, Step, simulate

from .streams import Case, cases


def demands(operations: Sequence[Operation], seed: int) -> dict[int, float]:
    dice = random.Random(seed)
    return {op.index: dice.choice([0.0, 0.5, 1.0, 3.25]) for op in operations}


def run(
    operations: Sequence[Operation],
    seconds: dict[int, float],
    *,
    overlap: bool = True,
    is_inline: bool = False,
) -> list[Step]:
    steps = simulate(
        operations,
        lambda op: Demand(seconds=seconds[op.index]),
        overlap=overlap,
        is_inline=is_inline,
    )
    return [*steps]


def ended_s(steps: Sequence[Step]) -> float:
    return max((step.end_s for step in steps), default=0.0)


def longest_path(
    operations: Sequence[Operation], seconds: dict[int, float], is_inline: bool
) -> dict[int, float]:
    """When each operation ends, as a recurrence over lanes and waits."""
    ends: dict[int, float] = {}
    last: dict[Lane, float] = {}
    by_lane: dict[Lane, list[tuple[int, float]]] = {}
    for op in operations:
        start = last.get(op.lane, 0.0)
        for lane, index in op.after:
            start = max([start, *(end for i, end in by_lane.get(lane, []) if i <= index)])
        if is_inline:
            start = max(start, last.get(Lane.COMPUTE, 0.0))
        ends[op.index] = last[op.lane] = start + seconds[op.index]
        by_lane.setdefault(op.lane, []).append((op.index, ends[op.index]))
    return ends


@settings(deadline=None, max_examples=80)
@given(case=cases(), seed=st.integers(0, 1000), is_inline=st.booleans())
def test_every_operation_ends_at_its_longest_path(case: Case, seed: int, is_inline: bool) -> None:
    operations = case.operations()
    seconds = demands(operations, seed)
    steps = run(operations, seconds, is_inline=is_inline)
    assert len(steps) == len(operations)
    expected = longest_path(operations, seconds, is_inline)
    for step in steps:
        assert step.end_s == pytest.approx(expected[step.operation.index], abs=1e-9)
    assert ended_s(steps) == pytest.approx(max(expected.values(), default=0.0), abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(case=cases(), seed=st.integers(0, 1000))
def test_without_overlap_times_add_up(case: Case, seed: int) -> None:
    operations = case.operations()
    seconds = demands(operations, seed)
    steps = run(operations, seconds, overlap=False)
    assert ended_s(steps) == pytest.approx(sum(seconds.values()))
    for step in steps:
        assert step.end_s - step.start_s == pytest.approx(seconds[step.operation.index])


def operation(index: int, lane: Lane, *after: tuple[Lane, int]) -> Operation:
    return Operation(
        index=index,
        kind=Kind.COMPUTE,
        lane=lane,
        sweep=0,
        unit=0,
        batch=None,
        accesses=(),
        after=after,
    )


def test_parts_slow_each_other_down_while_both_work() -> None:
    """4 s of reading and 2 s of computing at half speed beside it: 4 s both, in which reading at
    three quarters has 1 s left, then that alone."""
    stream = [operation(0, Lane.DISK_READ), operation(1, Lane.COMPUTE)]
    seconds = {0: 4.0, 1: 2.0}

    def share(lane: Lane, others: frozenset[Lane], size: float) -> float:
        if not others:
            return 1.0
        return 0.5 if lane is Lane.COMPUTE else 0.75

    steps = simulate(
        stream,
        lambda op: Demand(seconds=seconds[op.index]),
        overlap=True,
        is_inline=False,
        share=share,
    )
    ends = {step.operation.index: step.end_s for step in steps}
    assert ends == pytest.approx({1: 4.0, 0: 5.0})


def test_a_stream_that_waits_for_itself_is_noticed() -> None:
    stream = [
        operation(0, Lane.DISK_READ, (Lane.COMPUTE, 1)),
        operation(1, Lane.COMPUTE, (Lane.DISK_READ, 0)),
    ]
    with pytest.raises(AssertionError, match="wait for each other"):
        run(stream, {0: 1.0, 1: 1.0})
