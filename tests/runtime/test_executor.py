"""The executor: order within and between lanes, errors from any lane, threads that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from freight.model.batch import MicroBatch, RowKey, RowSpan
from freight.plan.operation import Kind, Lane, Operation
from freight.runtime.executor import Executor

LINKS = [lane for lane in Lane if lane is not Lane.COMPUTE]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline_s = time.monotonic() + 5
    while lanes_alive() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not lanes_alive()


def lanes_alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("freight")]


def operation(
    index: int,
    lane: Lane,
    *,
    after: Sequence[tuple[Lane, int]] = (),
    is_last: bool = False,
    sweep: int = 0,
    kind: Kind = Kind.READ_HIDDEN,
) -> Operation:
    span = RowSpan(row=RowKey(index), start=0, num_new=1, kv_len=0, logit_positions=(0,))
    return Operation(
        index=index,
        kind=Kind.COMPUTE if lane is Lane.COMPUTE else kind,
        lane=lane,
        sweep=sweep,
        unit=0,
        batch=MicroBatch(index=0, rows=(span,), token_ids=[0]),
        accesses=(),
        after=tuple(after),
        is_last=is_last,
    )


def chain(length: int) -> list[Operation]:
    """Each operation waits for the one before it; every fifth one yields tokens."""
    lanes = [Lane.DISK_READ, Lane.TO_DEVICE, Lane.COMPUTE, Lane.FROM_DEVICE, Lane.DISK_WRITE]
    return [
        operation(
            index,
            lanes[index % 5],
            after=[(lanes[(index - 1) % 5], index - 1)] if index else [],
            is_last=index % 5 == 2,
        )
        for index in range(length)
    ]


class Work:
    """Notes what was done, slowly on some lanes; fails at one operation."""

    def __init__(self, fails_at: int = -1) -> None:
        self.begun: list[int] = []
        self.done: list[int] = []
        self._fails_at = fails_at

    def __call__(self, operation: Operation) -> list[int] | None:
        self.begun.append(operation.index)
        if operation.lane in (Lane.DISK_READ, Lane.FROM_DEVICE):
            time.sleep(0.001)
        if operation.index == self._fails_at:
            raise OSError("the disk is gone")
        self.done.append(operation.index)
        return [operation.index] if operation.is_last else None


def executor(work: Work, overlap: bool = True) -> Executor:
    return Executor(work, device=torch.device("cpu"), overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_waits_are_kept_and_tokens_come_in_order(overlap: bool) -> None:
    work = Work()
    found = [(op.index, ids) for op, ids in executor(work, overlap).run(chain(60))]
    assert work.done == [*range(60)]
    assert found == [(index, [index]) for index in range(2, 60, 5)]


def test_lanes_work_side_by_side_and_each_in_order() -> None:
    """Two lanes that meet can only do so if neither waits for the other to end."""
    meeting = threading.Barrier(2, timeout=5)
    done: dict[Lane, list[int]] = {lane: [] for lane in Lane}

    def work(operation: Operation) -> None:
        if operation.index < 2:
            meeting.wait()
        done[operation.lane].append(operation.index)

    lanes = [Lane.DISK_READ, Lane.DISK_WRITE]
    operations = [operation(index, lanes[index % 2]) for index in range(40)]
    assert not [*Executor(work, device=torch.device("cpu"), overlap=True).run(operations)]
    assert done[Lane.DISK_READ] == [*range(0, 40, 2)]
    assert done[Lane.DISK_WRITE] == [*range(1, 40, 2)]


@pytest.mark.parametrize(
    "kinds",
    [
        (Kind.READ_WEIGHTS, Kind.READ_WEIGHTS),
        (Kind.READ_KV, Kind.READ_WEIGHTS),
        (Kind.READ_WEIGHTS, Kind.READ_KV),
    ],
)
def test_two_reads_are_under_way_at_once(kinds: tuple[Kind, Kind]) -> None:
    """And their lane's time counts once."""
    meeting = threading.Barrier(2, timeout=5)
    times: list[tuple[float, float]] = []

    def work(operation: Operation) -> None:
        meeting.wait()
        time.sleep(0.01)

    operations = [operation(i, Lane.DISK_READ, kind=kinds[i % 2]) for i in range(6)]
    running = Executor(
        work,
        device=torch.device("cpu"),
        overlap=True,
        record=lambda _, started_s, ended_s: times.append((started_s, ended_s)),
    )
    assert not [*running.run(operations)]
    assert len(times) == 6 and not meeting.broken
    assert all(second[0] >= first[1] for first, second in pairwise(times))


def test_without_overlap_there_are_no_threads() -> None:
    names = set()

    def work(operation: Operation) -> list[int] | None:
        names.add(threading.current_thread().name)
        return [0] if operation.is_last else None

    assert [*Executor(work, device=torch.device("cpu"), overlap=False).run(chain(20))]
    assert names == {threading.current_thread().name}


class FakeStream:
    """A CUDA stream that only counts how often it was waited for."""

    waits = 0

    def synchronize(self) -> None:
        FakeStream.waits += 1


class FakeEvent:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "who waits sleeps"

    def record(self, stream: FakeStream) -> None: ...

    def query(self) -> bool:
        return True


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_a_device_finishes_each_operation(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is issued on CUDA streams one after the other would run side by side. At the end all of
    them have done what they were given, whether anybody waits for it or not."""
    monkeypatch.setattr(FakeStream, "waits", 0)
    monkeypatch.setattr("freight.runtime.executor._stream", lambda device, lane: FakeStream())
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    lanes = [Lane.DISK_READ, Lane.TO_DEVICE, Lane.COMPUTE, Lane.FROM_DEVICE]
    work = Work()
    running = Executor(work, device=torch.device("cuda", 0), overlap=overlap)
    assert [*running.run(operation(index, lane) for index, lane in enumerate(lanes))] == []
    assert sorted(work.done) == [0, 1, 2, 3]
    assert FakeStream.waits == 3 + (0 if overlap else 3)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fails_at", range(20, 25))
def test_an_error_in_any_lane_surfaces(fails_at: int, overlap: bool) -> None:
    work = Work(fails_at)
    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        for op, _ in executor(work, overlap).run(chain(200)):
            found.append(op.index)
    # What waits for the failed operation, directly or not, was never begun.
    assert work.done == [*range(fails_at)]
    assert max(work.begun) == fails_at
    assert found == [*range(2, fails_at, 5)]


@pytest.mark.parametrize("lane", LINKS)
def test_an_error_in_the_last_operation_surfaces(lane: Lane) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        assert not [*executor(Work(0)).run([operation(0, lane)])]


def test_an_error_in_the_stream_ends_the_lanes() -> None:
    def stream() -> Iterator[Operation]:
        yield from chain(33)
        raise ValueError("no more sweeps")

    work = Work()
    with pytest.raises(ValueError, match="no more sweeps"):
        for _ in executor(work).run(stream()):
            pass


@pytest.mark.parametrize("overlap", [True, False])
def test_stopping_in_the_middle(overlap: bool) -> None:
    work = Work()
    running = executor(work, overlap).run(chain(10_000))
    assert next(running)[0].index == 2
    running.close()
    assert len(work.done) < 1000


def test_all_that_was_given_is_done_at_the_end() -> None:
    """Stores after the last computation, which nobody waits for."""
    work = Work()
    operations = [
        operation(0, Lane.COMPUTE, is_last=True),
        *(operation(index, Lane.DISK_WRITE) for index in range(1, 30)),
    ]
    assert len([*executor(work).run(operations)]) == 1
    assert work.done == [*range(30)]


def test_stores_lag_behind_by_less_than_two_sweeps() -> None:
    """Even those that nobody waits for: what describes a sweep is not kept for ever."""
    done: set[int] = set()

    def work(operation: Operation) -> list[int] | None:
        if operation.lane is Lane.DISK_WRITE:
            time.sleep(0.005)
        done.add(operation.index)
        return [0] if operation.is_last else None

    operations = [
        operation(2 * sweep + step, lane, is_last=step == 1, sweep=sweep)
        for sweep in range(20)
        for step, lane in enumerate([Lane.DISK_WRITE, Lane.COMPUTE])
    ]
    for op, _ in Executor(work, device=torch.device("cpu"), overlap=True).run(operations):
        assert done >= {2 * sweep for sweep in range(op.sweep)}


class TimedEvent:
    """An event of a device whose clock goes on by one millisecond for each that is recorded."""

    recorded = 0

    def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self.at_ms = -1.0

    def record(self, stream: FakeStream) -> None:
        TimedEvent.recorded += 1
        self.at_ms = float(TimedEvent.recorded)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: TimedEvent) -> float:
        return other.at_ms - self.at_ms


class TimedStream(FakeStream):
    def wait_event(self, event: TimedEvent) -> None: ...


def test_a_device_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stream was given is told of once it is done, with the times of the events around it;
    what nobody need wait for is issued without a thread, what waits for the disk by one."""
    monkeypatch.setattr(TimedEvent, "recorded", 0)
    monkeypatch.setattr("freight.runtime.executor._stream", lambda device, lane: TimedStream())
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    told: list[tuple[int, float]] = []
    threads: dict[int, str] = {}

    def work(operation: Operation) -> list[int] | None:
        threads[operation.index] = threading.current_thread().name
        if operation.lane is Lane.DISK_READ:
            time.sleep(0.05)
        return [] if operation.is_last else None

    operations = [
        operation(0, Lane.TO_DEVICE),
        operation(1, Lane.COMPUTE, after=[(Lane.TO_DEVICE, 0)]),
        operation(2, Lane.DISK_READ),
        operation(3, Lane.TO_DEVICE, after=[(Lane.DISK_READ, 2)]),
        operation(4, Lane.TO_DEVICE),
        operation(5, Lane.COMPUTE, after=[(Lane.TO_DEVICE, 4)], is_last=True),
    ]
    running = Executor(
        work,
        device=torch.device("cuda", 0),
        overlap=True,
        record=lambda op, started_s, ended_s: told.append((op.index, ended_s - started_s)),
    )
    assert [op.index for op, _ in running.run(operations)] == [5]
    main = threading.current_thread().name
    assert {index for index, name in threads.items() if name == main} == {0, 1, 5}
    assert sorted(index for index, _ in told) == [*range(6)]
    # One event is recorded for each that others wait on, between two of the next operation.
    assert all(0.9e-3 <= seconds < 10e-3 for index, seconds in told if index != 2)


class PendingEvent:
    """Of a device that has done nothing until somebody waits for it."""

    done: ClassVar[list[int]] = []
    issued = -1

    def __init__(self, *, blocking: bool) -> None:
        self.own = -1

    def record(self, stream: FakeStream) -> None:
        self.own = PendingEvent.issued

    def query(self) -> bool:
        return self.own in PendingEvent.done

    def synchronize(self) -> None:
        PendingEvent.done.append(self.own)


def test_a_device_is_less_than_two_sweeps_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where no token is taken from a sweep, which would be waited for: tensors that say where
    its keys are would be given to another one while they are read."""
    monkeypatch.setattr(PendingEvent, "done", [])
    monkeypatch.setattr("freight.runtime.executor._stream", lambda device, lane: FakeStream())
    monkeypatch.setattr(torch.cuda, "Event", PendingEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def work(operation: Operation) -> list[int] | None:
        PendingEvent.issued = operation.index
        return [] if operation.is_last else None

    operations = [
        operation(2 * sweep + step, Lane.COMPUTE, is_last=step == 1, sweep=sweep)
        for sweep in range(20)
        for step in range(2)
    ]
    executor = Executor(work, device=torch.device("cuda", 0), overlap=True)
    for op, _ in executor.run(operations):
        # A stream works in order: its last event stands for all before it.
        assert max(PendingEvent.done, default=-1) >= 2 * op.sweep - 1
        assert op.index not in PendingEvent.done
