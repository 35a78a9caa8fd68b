"""Lanes: order within one, waits between them, what happens when one fails, and the link's pace."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.memory.disk import Traffic
from freight.memory.transfer import (
    LaneStopped,
    LaneTimeline,
    LaneWorker,
    Link,
    copy_bytes,
    copy_pages,
)


def no_error(error: Exception) -> None:
    raise AssertionError(error)


def test_a_lane_keeps_its_order_and_close_waits_for_it() -> None:
    done: list[int] = []
    worker = LaneWorker("test", LaneTimeline(), no_error)
    for index in range(200):
        worker.submit(index, [], lambda index=index: done.append(index))
    worker.close()
    assert done == [*range(200)]


@settings(deadline=None, max_examples=25)
@given(
    tasks=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 30), max_size=3)), max_size=30
    )
)
def test_waits_between_lanes(tasks: list[tuple[int, list[int]]]) -> None:
    """Whatever the lanes' speeds, work begins after the work of other lanes that it waits for."""
    timelines = [LaneTimeline() for _ in range(3)]
    workers = [LaneWorker(f"test {i}", timeline, no_error) for i, timeline in enumerate(timelines)]
    finished: set[int] = set()
    late: list[tuple[int, int]] = []

    def work(index: int, waits: list[int]) -> None:
        late.extend((index, earlier) for earlier in waits if earlier not in finished)
        time.sleep(0.0005 * (index % 3))
        finished.add(index)

    for index, (lane, wanted) in enumerate(tasks):
        waits = [i for i in wanted if i < index]
        workers[lane].submit(
            index,
            [(timelines[tasks[i][0]], i) for i in waits],
            lambda index=index, waits=waits: work(index, waits),
        )
    for worker in workers:
        worker.close()
    assert not late and finished == {*range(len(tasks))}


@settings(deadline=None, max_examples=40)
@given(tasks=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_pairs_of_a_lane(tasks: list[tuple[bool, int]]) -> None:
    """Work that pairs has at most one neighbour beside it, other work none; what is reached is
    done, and so is all before it."""
    timeline, lock = LaneTimeline(), threading.Lock()
    worker = LaneWorker("test", timeline, no_error)
    begun: list[int] = []
    under_way: set[int] = set()
    done: set[int] = set()
    wrong: list[tuple[int, set[int]]] = []

    def work(index: int, pairs: bool, pause: int) -> None:
        with lock:
            begun.append(index)
            under_way.add(index)
            alone = not pairs or not all(tasks[other][0] for other in under_way)
            if len(under_way) > (1 if alone else 2):
                wrong.append((index, {*under_way}))
        time.sleep(0.0004 * pause)
        with lock:
            under_way.remove(index)
            done.add(index)

    for index, (pairs, pause) in enumerate(tasks):
        worker.submit(
            index,
            [],
            lambda index=index, pairs=pairs, pause=pause: work(index, pairs, pause),
            pairs=pairs,
        )
    for index in range(len(tasks)):
        timeline.wait(index)
        assert {*range(index + 1)} <= done
    worker.close()
    assert not wrong and sorted(begun) == [*range(len(tasks))]


def test_two_of_a_pair_are_under_way_at_once() -> None:
    both = threading.Barrier(2, timeout=5)
    worker = LaneWorker("test", LaneTimeline(), no_error)
    for index in range(4):
        worker.submit(index, [], lambda: both.wait() and None, pairs=True)
    worker.close()
    assert not both.broken


def test_a_failure_beside_another_ends_the_lane() -> None:
    timeline, errors = LaneTimeline(), []
    late = threading.Event()

    def on_error(error: Exception) -> None:
        errors.append(str(error))
        timeline.fail()
        late.set()

    def fail() -> None:
        raise ValueError("the disk is gone")

    done: list[int] = []
    worker = LaneWorker("test", timeline, on_error)
    worker.submit(0, [], lambda: late.wait(5) and None, pairs=True)
    worker.submit(1, [], fail, pairs=True)
    worker.submit(2, [], lambda: done.append(2), pairs=True)
    worker.submit(3, [], lambda: done.append(3))
    worker.close()
    assert errors == ["the disk is gone"] and done == []
    with pytest.raises(LaneStopped):
        timeline.wait(1)


def test_reaching_a_later_index_includes_the_earlier() -> None:
    timeline = LaneTimeline()
    timeline.reach(7)
    timeline.wait(3)
    timeline.wait(7)


def test_a_failure_is_told_and_wakes_those_who_wait() -> None:
    failing, other = LaneTimeline(), LaneTimeline()
    errors: list[Exception] = []
    is_told = threading.Event()

    def on_error(error: Exception) -> None:
        errors.append(error)
        failing.fail()
        is_told.set()

    done: list[str] = []
    first = LaneWorker("failing", failing, on_error)
    second = LaneWorker("waiting", other, on_error)
    second.submit(1, [(failing, 0)], lambda: done.append("after a failure"))

    def fail() -> None:
        raise ValueError("the disk is gone")

    first.submit(0, [], fail)
    first.submit(2, [], lambda: done.append("in a failed lane"))
    assert is_told.wait(5)
    first.close()
    second.close()
    assert [str(error) for error in errors] == ["the disk is gone"]
    assert done == []
    with pytest.raises(LaneStopped):
        failing.wait(0)


def test_a_link_counts_what_it_copies() -> None:
    traffic = Traffic()
    link = Link("host to device", traffic)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    link.move([(source[:30], target[:30]), (source[50:], target[50:])])
    assert torch.equal(target[:30], source[:30]) and torch.equal(target[50:], source[50:])
    assert not target[30:50].any()
    assert traffic.moved == traffic.wanted == {"host to device": 80}


def test_a_link_keeps_its_pace() -> None:
    link = Link("host to device", Traffic(), 10_000_000)
    source, target = torch.ones(400_000, dtype=torch.uint8), torch.zeros(400_000, dtype=torch.uint8)
    started_s = time.perf_counter()
    for _ in range(5):
        link.move([(source, target)])
    taken_s = time.perf_counter() - started_s
    assert 0.2 <= taken_s < 2.0
    assert target.all()


def test_copies_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="could not broadcast"):
        copy_bytes(torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))


@settings(deadline=None, max_examples=20)
@given(
    places=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 59)), max_size=40),
    page_bytes=st.sampled_from([0, 3, 4096, 100 << 10, 600 << 10]),
)
def test_pages_go_where_they_are_told(places: list[tuple[int, int]], page_bytes: int) -> None:
    """Also those that come in several steps, one that is longer than a step among them."""
    homes = {slot: home for home, slot in places}
    source = torch.arange(40, dtype=torch.uint8)[:, None].expand(40, page_bytes).contiguous()
    target = torch.full((60, page_bytes), 255, dtype=torch.uint8)
    numbers = np.array([*homes.values()], np.int64), np.array([*homes], np.int64)
    copy_pages(source, numbers[0], target, numbers[1])
    assert all((target[slot] == homes.get(slot, 255)).all() for slot in range(60))
