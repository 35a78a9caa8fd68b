"""When a rank computes and when its messages are under way, as a picture for Perfetto.

A message is under way from when it is begun until what comes with it is there, whoever waits for
it and when. Knows ranks and names, no layouts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

import torch

from freight.distributed.tensor.ranks import Parts, Pending, Ranks
from freight.runtime.trace import open_trace

__all__ = ["Timeline", "TracedRanks"]

_COMPUTATION: Final = 0
_DISK: Final = 1000
_MOST_WAITING: Final = 16


class Timeline:
    """One rank's spans, written as they end. Messages that are under way at once have rows of their
    own. InputError where the file cannot be written."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._num_rows = 0
        self._reads = False
        self._file = open_trace(path)
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}}, 0)
        self._name(_COMPUTATION, "computation")

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """What is done inside is a computation."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._span(name, _COMPUTATION, started_s)

    def take_row(self) -> int:
        """A row for a message."""
        with self._lock:
            if self._free:
                return heappop(self._free)
            self._num_rows += 1
            self._name(self._num_rows, f"messages {self._num_rows}")
            return self._num_rows

    def note_message(self, name: str, row: int, started_s: float) -> None:
        """It has come now, and its row is free."""
        with self._lock:
            self._span(name, row, started_s)
            heappush(self._free, row)

    def note_read(self, name: str, started_s: float) -> None:
        """It has come from the disk now."""
        with self._lock:
            if not self._reads:
                self._name(_DISK, "disk")
            self._reads = True
            self._span(name, _DISK, started_s)

    def close(self) -> None:
        """The file is whole. What ends later is left out."""
        with self._lock:
            if not self._file.closed:
                self._file.write("{}]\n")
                self._file.close()

    def _name(self, row: int, name: str) -> None:
        self._write({"name": "thread_name", "ph": "M", "args": {"name": name}}, row)

    def _span(self, name: str, row: int, started_s: float) -> None:
        ended_s = time.perf_counter()
        times = {"ts": started_s * 1e6, "dur": (ended_s - started_s) * 1e6}
        self._write({"name": name, "ph": "X", **times}, row)

    def _write(self, event: dict[str, object], row: int) -> None:
        if not self._file.closed:
            self._file.write(json.dumps({"pid": self._rank, "tid": row, **event}) + ",\n")


@dataclass(frozen=True, slots=True)
class _Traced:
    """Tensors under way, which another thread waits for."""

    come: Future[Parts]

    def wait(self) -> Parts:
        return self.come.result()


class TracedRanks(Ranks):
    """The same ranks, whose messages are noted."""

    def __init__(self, ranks: Ranks, timeline: Timeline, name: str = "activations") -> None:
        self._ranks = ranks
        super().__init__(ranks.mesh, ranks.own, ranks.device)
        self._timeline = timeline
        self._name = name
        self._waiting = ThreadPoolExecutor(_MOST_WAITING, "freight trace")

    def apart(self) -> TracedRanks:
        """For weights, which are gathered ahead."""
        return TracedRanks(self._ranks.apart(), self._timeline, "weights")

    def shift(self, parts: Parts, axes: str, steps: int, like: Parts | None = None) -> _Traced:
        started_s, before = time.perf_counter(), self._ranks.sent_bytes
        row = self._timeline.take_row()
        pending = self._ranks.shift(parts, axes, steps, like)
        size = self._ranks.sent_bytes - before
        self.sent_bytes += size
        name = f"{self._name}, {size} bytes along {axes or 'nothing'}"
        return _Traced(self._waiting.submit(self._wait, pending, name, row, started_s))

    def _wait(self, pending: Pending, name: str, row: int, started_s: float) -> Parts:
        try:
            with torch.inference_mode():  # of this thread: what comes is put where such a tensor is
                return pending.wait()
        finally:
            self._timeline.note_message(name, row, started_s)
