"""Measures a disk: reads and writes past the page cache by request size, in a scratch file.

Knows no units and no links; what it finds are two links of a machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Final

from freight.hardware.curve import Curve
from freight.hardware.machine import Link
from freight.memory.disk import DirectFile, DiskRequest, Traffic, create_scratch
from freight.memory.tier import host_arena
from freight.memory.transfer import host_view
from freight.quantities import GIB, KIB, MIB

__all__ = ["DiskProbe"]

_REQUESTS: Final = (4 * KIB, 16 * KIB, 128 * KIB, 1 * MIB, 4 * MIB)
_SCRATCH_BYTES: Final = 1 * GIB
_RING_BYTES: Final = 128 * MIB
_MOST_MOVED_BYTES: Final = 256 * MIB
_MOST_REQUESTS: Final = 4000
_STRIDE: Final = 97

_MoveAll = Callable[[Sequence[DiskRequest], memoryview], None]


class DiskProbe:
    """A scratch file, written once; reads and writes of it at several request sizes."""

    def __init__(self, directory: Path) -> None:
        self._file: DirectFile = create_scratch(directory, _SCRATCH_BYTES, Traffic())
        self._memory = host_arena(_RING_BYTES).take(_RING_BYTES, "profile")
        self._memory.random_(0, 256)
        self._turn = 0

    def __enter__(self) -> DiskProbe:
        for place in range(0, _SCRATCH_BYTES, _RING_BYTES):
            self._file.write(place, host_view(self._memory))
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def measure_reads(self) -> Link:
        """From the file into memory, by request size; of large ones two at a time, as weights are
        read, of small ones many, as keys and values are."""
        return self._link(
            lambda size: (
                self._pair_rate(size)
                if size >= MIB
                else self._rate_of_many(size, self._file.read_all)
            )
        )

    def measure_writes(self) -> Link:
        """From memory to the file, by request size, likewise."""
        return self._link(
            lambda size: (
                self._rate(size) if size >= MIB else self._rate_of_many(size, self._file.write_all)
            )
        )

    def _link(self, rate: Callable[[int], float]) -> Link:
        """By request size; other places in the file every time."""
        self._turn += 1
        return Link(bytes_per_s=Curve(points=tuple((float(n), rate(n)) for n in _REQUESTS)))

    def _rate(self, request: int) -> float:
        """Bytes per second of large writes, one after the other."""
        views = self._views(request)
        count = _MOST_MOVED_BYTES // request
        started_s = time.perf_counter()
        for i in range(count):
            place = (self._turn * count + i) % (_SCRATCH_BYTES // request)
            self._file.write(place * request, views[i % len(views)])
        return count * request / (time.perf_counter() - started_s)

    def _rate_of_many(self, request: int, move_all: _MoveAll) -> float:
        """Bytes per second of small requests that are far apart."""
        count = min(_MOST_MOVED_BYTES // request, _MOST_REQUESTS)
        requests = [
            DiskRequest(
                offset=(self._turn * count + i) * _STRIDE % (_SCRATCH_BYTES // request) * request,
                place=i % (_RING_BYTES // request) * request,
                num_bytes=request,
            )
            for i in range(count)
        ]
        started_s = time.perf_counter()
        move_all(requests, host_view(self._memory))
        return count * request / (time.perf_counter() - started_s)

    def _views(self, request: int) -> list[memoryview]:
        places = range(0, _RING_BYTES, request)
        return [host_view(self._memory[i : i + request]) for i in places]

    def _pair_rate(self, request: int) -> float:
        """Bytes per second of large reads, two at a time, one after the other."""
        turns = iter(range(_MOST_MOVED_BYTES // request))
        return self._read_pairs(request, lambda: next(turns, None) is None)

    def _read_pairs(self, request: int, is_over: Callable[[], bool]) -> float:
        views, count = self._views(request), _SCRATCH_BYTES // request
        places = itertools.count(self._turn * count // 4)

        def read() -> int:
            moved = 0
            while not is_over():
                place = next(places)
                self._file.read(place % count * request, views[place % len(views)])
                moved += request
            return moved

        started_s = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(read)
            moved = read() + other.result()
        return moved / (time.perf_counter() - started_s)

    def read_rate(self) -> float:
        """Bytes per second of the largest requests, with nothing else under way."""
        return self._pair_rate(_REQUESTS[-1])

    def read_until(self, stop: Event) -> float:
        """Read large pieces until told to stop; bytes per second."""
        return self._read_pairs(_REQUESTS[-1], stop.is_set)
