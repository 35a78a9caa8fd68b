"""Runs operations: each lane in order, lanes side by side, waits on what an operation names.

The compute lane is the caller's thread; every link has a thread of its own. What is issued on a
CUDA stream and need not be waited for here is issued by the caller's thread as well: a thread that
only issues copies fights the arithmetic's for the interpreter, and both were seen to take ten times
as long. Without overlap the same operations run one after the other. Knows no tensors: the work
itself comes as a function.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from freight.memory.transfer import LaneStopped, LaneTimeline, LaneWorker
from freight.plan.operation import Lane, Operation

__all__ = ["Executor"]

Made = TypeVar("Made")
"""What the last computation of a micro-batch makes: its new tokens, whatever form they have."""

_DEVICE_LANES: Final = (Lane.COMPUTE, Lane.TO_DEVICE, Lane.FROM_DEVICE)
"""Those that have a stream on a CUDA device: their work is issued, and done later."""
_TOLD_AT_ONCE: Final = 32
"""Operations of a stream, after each computation: between sweeps the device would wait for it."""


class _Issued(NamedTuple):
    """Work on a stream, between two events."""

    operation: Operation
    begin: Any
    end: Any


class Executor(Generic[Made]):
    """``perform`` does an operation's work, on the lane's CUDA stream where it has one, and
    returns the new tokens after the last computation of a micro-batch. ``record`` is told when each
    began and ended (``time.perf_counter``): on a stream not when it was issued, and later."""

    def __init__(
        self,
        perform: Callable[[Operation], Made | None],
        *,
        device: torch.device,
        overlap: bool,
        record: Callable[[Operation, float, float], None] | None = None,
    ) -> None:
        self._perform = perform
        self._overlap = overlap
        self._record = record
        self._noting = threading.Lock()
        self._noted_s: dict[Lane, float] = {}
        self._error: Exception | None = None
        streams: Mapping[Lane, Any] = {}
        if device.type == "cuda":
            streams = {lane: _stream(device, lane) for lane in _DEVICE_LANES}
        self._timelines = {lane: LaneTimeline(streams.get(lane)) for lane in Lane}
        self._workers: dict[Lane, LaneWorker] = {}
        self._handed: dict[Lane, int] = {}
        self._issued: dict[Lane, deque[_Issued]] = {lane: deque() for lane in streams}
        self._begin: tuple[float, Any] | None = None
        self._submitted: dict[int, dict[Lane, int]] = {}

    def run(self, operations: Iterable[Operation]) -> Iterator[tuple[Operation, Made]]:
        """Run all; yields (operation, new tokens) whenever a micro-batch's tokens are known."""
        try:
            for operation in operations:
                self._raise_error()
                if self._overlap and not self._is_done_here(operation):
                    self._submit(operation)
                    continue
                tokens = self._run_here(operation)
                if operation.is_last:
                    assert tokens is not None
                    self._catch_up(operation.sweep - 1)
                    yield operation, tokens
            self._finish()
            self._raise_error()
            self._note_rest()
        finally:
            self._stop()

    def _is_done_here(self, operation: Operation) -> bool:
        """Whether this thread does it: a computation, or what can be issued at once, behind all
        that its lane was given."""
        if operation.lane is Lane.COMPUTE:
            return True
        own = self._timelines[operation.lane]
        return (
            own.stream is not None
            and own.has_reached(self._handed.get(operation.lane, -1))
            and all(self._timelines[lane].has_reached(index) for lane, index in operation.after)
        )

    def _run_here(self, operation: Operation) -> Made | None:
        timeline = self._timelines[operation.lane]
        stream = timeline.stream
        self._submitted.setdefault(operation.sweep, {})[operation.lane] = operation.index
        self._wait(operation.after, stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            tokens = self._work(operation)
        if stream is not None and not self._overlap:
            stream.synchronize()  # what was issued would overlap all the same
        timeline.reach(operation.index)
        return tokens

    def _work(self, operation: Operation) -> Made | None:
        stream = self._timelines[operation.lane].stream
        if self._record is not None and stream is not None:
            return self._work_on(stream, operation)
        started_s = time.perf_counter()
        tokens = self._perform(operation)
        if self._record is not None:
            self._note(operation, started_s, time.perf_counter())
        return tokens

    def _work_on(self, stream: torch.cuda.Stream, operation: Operation) -> Made | None:
        """Between two events, which say when it was done."""
        if self._begin is None:
            event = _event(stream)
            event.synchronize()
            self._begin = time.perf_counter(), event
        begin = _event(stream)
        tokens = self._perform(operation)
        self._issued[operation.lane].append(_Issued(operation, begin, _event(stream)))
        if operation.lane is Lane.COMPUTE and not operation.is_last:
            self._note_issued(_TOLD_AT_ONCE)
        return tokens

    def _note_issued(self, most: int | None = None) -> None:
        """Tell of what streams have done meanwhile, of each ``most`` at once."""
        for issued in self._issued.values():
            for _ in range(len(issued) if most is None else min(most, len(issued))):
                if not issued[0].end.query():
                    break
                assert self._begin is not None
                operation, begin, end = issued.popleft()
                first_s, first = self._begin
                times = (first_s + first.elapsed_time(event) / 1e3 for event in (begin, end))
                self._note(operation, *times)

    def _note_rest(self) -> None:
        """Tell of all that streams were given."""
        for lane, issued in self._issued.items():
            if issued:
                self._timelines[lane].stream.synchronize()  # type: ignore[union-attr]
        self._note_issued()

    def _note(self, operation: Operation, started_s: float, ended_s: float) -> None:
        """A lane's work counts once where two operations were under way."""
        assert self._record is not None
        with self._noting:
            started_s = max(started_s, self._noted_s.get(operation.lane, 0.0))
            self._noted_s[operation.lane] = ended_s
            self._record(operation, started_s, ended_s)

    def _wait(
        self, waits: Iterable[tuple[Lane, int]], waiter: torch.cuda.Stream | None = None
    ) -> None:
        try:
            for lane, index in waits:
                self._timelines[lane].wait(index, waiter)
        except LaneStopped:
            self._raise_error()
            raise

    def _catch_up(self, sweep: int) -> None:
        """Wait for what all lanes were given up to this sweep: a sweep's description is kept until
        the one after it has ended. Stores that nobody reads back must not outlast it, and neither
        must a device's arithmetic that no token is taken from."""
        for old in [number for number in self._submitted if number <= sweep]:
            self._wait(self._submitted.pop(old).items())

    def _submit(self, operation: Operation) -> None:
        lane = operation.lane
        self._submitted.setdefault(operation.sweep, {})[lane] = operation.index
        if lane not in self._workers:
            self._workers[lane] = LaneWorker(lane.value, self._timelines[lane], self._fail)
        waits = [(self._timelines[other], index) for other, index in operation.after]
        work = partial(self._work_in_lane, operation)
        self._handed[lane] = operation.index
        self._workers[lane].submit(operation.index, waits, work, pairs=operation.pairs)

    def _work_in_lane(self, operation: Operation) -> None:
        self._work(operation)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        for timeline in self._timelines.values():
            timeline.fail()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        """Let the lanes finish what they were given."""
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.close()

    def _stop(self) -> None:
        """End the lanes' threads, also when the caller has stopped in the middle. What a device was
        given is done then, whether anybody waits for it or not: its memory may be used anew."""
        if self._workers:
            for timeline in self._timelines.values():
                timeline.fail()
            self._finish()
        for timeline in self._timelines.values():
            if timeline.stream is not None:
                timeline.stream.synchronize()


def _event(stream: torch.cuda.Stream) -> Any:
    """A mark on a stream of when it comes there."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@cache
def _stream(device: torch.device, lane: Lane) -> torch.cuda.Stream:
    """One for all runs of a process: libraries keep memory for each stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
