"""Measures a disk: reads and writes past the page cache by request size, in a scratch file.

Knows no units and no links; what it finds are two links of a machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

from freight.hardware.curve import Curve
from freight.hardware.machine import Link
from freight.memory.disk import DirectFile, DiskRequest, Traffic, create_scratch
from freight.memory.tier import host_arena
from freight.memory.transfer import host_view
from freight.quantities import GIB, KIB, MIB

__all__ = ["DiskProbe", "Moved", "total"]

_REQUESTS: Final = (4 * KIB, 16 * KIB, 128 * KIB, 1 * MIB, 4 * MIB)
_SCRATCH_BYTES: Final = 1 * GIB
_RING_BYTES: Final = 128 * MIB
_MOST_MOVED_BYTES: Final = 256 * MIB
_LONG_BYTES: Final = 512 * MIB
_LONG_S: Final = 0.5
_MOST_REQUESTS: Final = 4000
_STRIDE: Final = 97

_MoveAll = Callable[[Sequence[DiskRequest], memoryview], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """So many bytes in so many seconds."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


def total(parts: Sequence[Moved]) -> Moved:
    """All of them, one after the other."""
    return Moved(sum(own.num_bytes for own in parts), sum(own.seconds for own in parts))


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
                self._read(size, _MOST_MOVED_BYTES).bytes_per_s
                if size >= MIB
                else self._rate_of_many(size, self._file.read_all)
            )
        )

    def measure_writes(self) -> Link:
        """From memory to the file, by request size, likewise."""
        return self._link(
            lambda size: (
                self._write(size, _MOST_MOVED_BYTES).bytes_per_s
                if size >= MIB
                else self._rate_of_many(size, self._file.write_all)
            )
        )

    def _link(self, rate: Callable[[int], float]) -> Link:
        """By request size; other places in the file every time."""
        self._turn += 1
        return Link(bytes_per_s=Curve(points=tuple((float(n), rate(n)) for n in _REQUESTS)))

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

    def read_some(self) -> Moved:
        """Reads of the largest pieces, with nothing else under way, for half a second at most."""
        return self._read(_REQUESTS[-1], _LONG_BYTES)

    def read_singly(self) -> Moved:
        """The same one piece at a time."""
        return self._read(_REQUESTS[-1], _MOST_MOVED_BYTES, at_once=1)

    def write_some(self) -> Moved:
        """Writes of the largest pieces, one after the other, with nothing else under way."""
        return self._write(_REQUESTS[-1], _LONG_BYTES)

    def write_until(self, stop: Event) -> Moved:
        """Write the largest pieces until told to stop."""
        return self._write(_REQUESTS[-1], stop=stop)

    def read_until(self, stop: Event) -> Moved:
        """Read the largest pieces until told to stop."""
        return self._read(_REQUESTS[-1], stop=stop)

    def _read(
        self,
        request: int,
        num_bytes: int = 0,
        *,
        stop: Event | None = None,
        at_once: int = 2,
    ) -> Moved:
        """Large reads, so many at a time, until so many bytes are read or it has taken long enough;
        or until it is told to stop."""
        return self._move(self._file.read, request, num_bytes, stop, at_once)

    def _write(self, request: int, num_bytes: int = 0, *, stop: Event | None = None) -> Moved:
        """Large writes, one after the other, likewise."""
        return self._move(self._file.write, request, num_bytes, stop, 1)

    def _move(
        self,
        move: Callable[[int, memoryview], object],
        request: int,
        num_bytes: int,
        stop: Event | None,
        at_once: int,
    ) -> Moved:
        views, count = self._views(request), _SCRATCH_BYTES // request
        places = itertools.count(self._turn * count // 4)
        turns = iter(range(num_bytes // request))

        def is_over() -> bool:
            if stop is not None:
                return stop.is_set()
            return time.perf_counter() - started_s > _LONG_S or next(turns, None) is None

        def move_some(_: int) -> int:
            moved = 0
            while not is_over():
                place = next(places)
                move(place % count * request, views[place % len(views)])
                moved += request
            return moved

        with ThreadPoolExecutor(at_once) as pool:
            started_s = time.perf_counter()
            moved = sum(pool.map(move_some, range(at_once)))
            return Moved(moved, time.perf_counter() - started_s)
