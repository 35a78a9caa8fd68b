"""Lanes: links and compute units that work side by side, each in the order it was given work.

A host lane runs its work in a thread; its work is done when the call returns. A device lane issues
work on a CUDA stream; its work is done when the event recorded after it has happened. Waiting is
for one piece of work of one lane, by its index, never for a device. Knows bytes and no tensors.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["LaneTimeline", "LaneWorker", "Throttle", "copy_bytes"]


class LaneTimeline:
    """How far a lane has come; others wait on it."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self._reached = -1
        self._failed = False
        self._changed = threading.Condition()
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()

    def reach(self, index: int) -> None:
        """Say that work up to ``index`` is done (host) or issued (device)."""
        event = None
        if self.stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        with self._changed:
            if event is not None:
                while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
                    self._events.popleft()
                self._events.append((index, event))
            self._reached = index
            self._changed.notify_all()

    def fail(self) -> None:
        """Wake everybody who waits: what they wait for will never be done."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, index: int, waiter: torch.cuda.Stream | None = None) -> None:
        """Come after work ``index``: this thread, or what ``waiter`` is given from now on."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached >= index or self._failed)
            if self._failed:
                raise LaneStopped
            event = next((e for done, e in self._events if done >= index), None)
        if event is None:
            return
        if waiter is None:
            event.synchronize()
        else:
            waiter.wait_event(event)


class LaneStopped(Exception):
    """Raised in those who wait for a lane that failed; the cause is raised where it happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    index: int
    waits: Sequence[tuple[LaneTimeline, int]]
    work: Callable[[], None]


class LaneWorker:
    """A thread that works through a lane's tasks in order."""

    def __init__(self, name: str, timeline: LaneTimeline, on_error: Callable[[Exception], None]):
        self.timeline = timeline
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"freight {name}", daemon=True)
        self._thread.start()

    def submit(
        self, index: int, waits: Sequence[tuple[LaneTimeline, int]], work: Callable[[], None]
    ) -> None:
        self._tasks.put(_Task(index=index, waits=waits, work=work))

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                for timeline, index in task.waits:
                    timeline.wait(index, self.timeline.stream)
                if self.timeline.stream is None:
                    task.work()
                else:
                    with torch.cuda.stream(self.timeline.stream):
                        task.work()
            except LaneStopped:
                return
            except Exception as error:
                self._on_error(error)
                return
            self.timeline.reach(task.index)


class Throttle:
    """Makes a link of the simulated device as slow as asked: a copy lasts at least bytes / rate."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s

    def pace(self, started_s: float, num_bytes: int) -> None:
        if self.bytes_per_s is not None:
            left = started_s + num_bytes / self.bytes_per_s - time.perf_counter()
            if left > 0:
                time.sleep(left)


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy equal uint8 tensors: on a CUDA stream without waiting, on the host in this thread.

    On the host numpy copies, for torch would start a second team of threads beside the arithmetic.
    """
    if source.is_cuda or target.is_cuda:
        target.copy_(source, non_blocking=True)
    else:
        np.copyto(target.numpy(), source.numpy())
