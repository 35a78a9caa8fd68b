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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.memory.disk import Traffic

__all__ = [
    "LaneStopped",
    "LaneTimeline",
    "LaneWorker",
    "Link",
    "copy_bytes",
    "copy_pages",
    "host_view",
]

_BYTES_OF_A_STEP: Final = 512 << 10
"""Of pages that are copied together: they pass through memory that a core's cache holds."""


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
            # Who waits for it sleeps: cores have other work.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self.stream)
        with self._changed:
            if event is not None:
                while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
                    self._events.popleft()
                self._events.append((index, event))
            self._reached = index
            self._changed.notify_all()

    @property
    def has_failed(self) -> bool:
        return self._failed

    def has_reached(self, index: int) -> bool:
        """Whether nobody waits here for work ``index``: it is done (host) or issued (device)."""
        return self._reached >= index

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
    pairs: bool


class LaneWorker:
    """Works through a lane's tasks, which begin in order and are done in order. Two that follow
    each other and both ``pair`` may be under way at once, in threads of their own: a disk that is
    asked for one piece at a time idles until the next is asked for."""

    def __init__(self, name: str, timeline: LaneTimeline, on_error: Callable[[Exception], None]):
        self.timeline = timeline
        self._name = name
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._beginning = threading.Lock()
        self._ended = threading.Condition()
        self._under_way: deque[int] = deque()
        self._early: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"freight {self._name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(
        self,
        index: int,
        waits: Sequence[tuple[LaneTimeline, int]],
        work: Callable[[], None],
        *,
        pairs: bool = False,
    ) -> None:
        if pairs and len(self._threads) == 1:
            self._add_thread()
        self._tasks.put(_Task(index=index, waits=waits, work=work, pairs=pairs))

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except LaneStopped:
            return
        except Exception as error:
            self._on_error(error)

    def _do_next(self) -> bool:
        """Whether there was a next one."""
        with self._beginning:
            task = self._tasks.get()
            if task is None:
                self._tasks.put(None)  # for the other thread
                return False
            for timeline, index in task.waits:
                timeline.wait(index, self.timeline.stream)
            self._begin(task)
            if not task.pairs:
                self._do(task)
        if task.pairs:
            self._do(task)
        return True

    def _begin(self, task: _Task) -> None:
        """Take a place in the order; what does not pair waits for all before it."""
        with self._ended:
            if not task.pairs:
                self._ended.wait_for(lambda: not self._under_way or self.timeline.has_failed)
            if self.timeline.has_failed:
                raise LaneStopped
            self._under_way.append(task.index)

    def _do(self, task: _Task) -> None:
        try:
            if self.timeline.stream is None:
                task.work()
            else:
                with torch.cuda.stream(self.timeline.stream):
                    task.work()
        except BaseException:
            self.timeline.fail()
            with self._ended:
                self._ended.notify_all()
            raise
        with self._ended:
            self._early.add(task.index)
            while self._under_way and self._under_way[0] in self._early:
                index = self._under_way.popleft()
                self._early.remove(index)
                self.timeline.reach(index)
            self._ended.notify_all()


class Link:
    """Copies between host and device memory, counted; of the simulated device, no faster than
    ``bytes_per_s``."""

    def __init__(self, name: str, traffic: Traffic, bytes_per_s: float | None = None) -> None:
        self._name = name
        self._traffic = traffic
        self._bytes_per_s = bytes_per_s

    def move(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each (source, target), uint8 tensors of equal size."""
        started_s = time.perf_counter()
        num_bytes = 0
        for source, target in pairs:
            copy_bytes(source, target)
            num_bytes += source.numel()
        self._traffic.add(self._name, num_bytes)
        if self._bytes_per_s is not None:
            left_s = started_s + num_bytes / self._bytes_per_s - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy equal uint8 tensors: on a CUDA stream without waiting, on the host in this thread.

    On the host numpy copies, for torch would start a second team of threads beside the arithmetic.
    """
    if source.is_cuda or target.is_cuda:
        target.copy_(source, non_blocking=True)
    else:
        np.copyto(target.numpy(), source.numpy())


def copy_pages(
    source: torch.Tensor,
    from_pages: npt.NDArray[np.int64],
    target: torch.Tensor,
    to_pages: npt.NDArray[np.int64],
) -> None:
    """Copy pages of uint8 tensors [P, page bytes] in host memory by their numbers, some in one
    step: a call for each takes longer than its bytes, while a disk waits for this thread."""
    pages, targets = source.numpy(), target.numpy()
    some = max(1, _BYTES_OF_A_STEP // max(1, source.shape[1]))
    for first in range(0, len(from_pages), some):
        last = first + some
        targets[to_pages[first:last]] = pages[from_pages[first:last]]


def host_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor in host memory, for reading and writing files."""
    return memoryview(tensor.view(-1).numpy())  # type: ignore[arg-type]
