"""The disk tier: files read and written past the page cache, in whole blocks.

With O_DIRECT where the file system takes it (probed per file), else buffered, dropping the pages
from the cache after each request. Every byte that crosses is counted at the call that moves it.
Knows files and offsets, no tensors.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from freight.errors import BudgetError, ModelError
from freight.memory.request_queue import DiskRequest, RequestQueue
from freight.quantities import align_up, format_bytes

__all__ = ["BLOCK", "DirectFile", "DiskRequest", "Traffic", "create_scratch"]

BLOCK: Final = 4096
_REQUEST_BYTES: Final = 8 << 20
_Run = Callable[[RequestQueue, int, Sequence[DiskRequest], memoryview], npt.NDArray[np.int64]]
_DISK_FAILED: Final = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO)


class Traffic:
    """Bytes over each link: ``moved`` as the link saw them, ``wanted`` without alignment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.moved: Counter[str] = Counter()
        self.wanted: Counter[str] = Counter()

    def add(self, link: str, moved: int, wanted: int | None = None) -> None:
        with self._lock:
            self.moved[link] += moved
            self.wanted[link] += moved if wanted is None else wanted


class DirectFile:
    """One file, read and written in whole blocks at block offsets."""

    def __init__(self, path: Path, traffic: Traffic, *, writable: bool = False) -> None:
        self.path = path
        self._traffic = traffic
        flags = os.O_RDWR if writable else os.O_RDONLY
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT)
            self.is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = os.open(path, flags)
            self.is_direct = False
        self.num_bytes = os.fstat(self._descriptor).st_size
        self._queues: dict[str, RequestQueue | None] = {}
        self._opening = threading.Lock()

    def close(self) -> None:
        for queue in self._queues.values():
            if queue is not None:
                queue.close()
        self._queues.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, into: memoryview, wanted: int | None = None) -> None:
        """Fill ``into`` from ``offset``; what lies past the end of the file may become anything."""
        end = min(offset + len(into), self.num_bytes)
        place = offset
        while place < end:
            request = into[place - offset : place - offset + _REQUEST_BYTES]
            try:
                count = os.preadv(self._descriptor, [request], place)
            except OSError as error:
                if error.errno not in _DISK_FAILED:
                    raise
                raise ModelError(
                    f"{self.path} was read at byte {place}.",
                    f"The system refused: {error.strerror}.",
                    "Check the disk and the file system, then run the same command again.",
                ) from error
            if count <= 0:
                raise ModelError(
                    f"{self.path} was read at byte {place}.",
                    f"It ended there; it had {self.num_bytes} bytes when it was opened.",
                    "Do not change the model's files while they are in use.",
                )
            self._forget(place, count)
            self._traffic.add("disk read", count, 0)
            place += count
        self._traffic.add("disk read", 0, len(into) if wanted is None else wanted)

    def read_all(self, requests: Sequence[DiskRequest], into: memoryview) -> None:
        """Read several stretches of the file, many at a time: small ones wait for the disk's
        answer longer than for their bytes."""
        for request in self._left(requests, into, RequestQueue.read, "disk read"):
            self.read(request.offset, _place(into, request), request.wanted_bytes)

    def write_all(self, requests: Sequence[DiskRequest], data: memoryview) -> None:
        """Write several stretches, likewise."""
        for request in self._left(requests, data, RequestQueue.write, "disk write"):
            self.write(request.offset, _place(data, request), request.wanted_bytes)

    def _left(
        self, requests: Sequence[DiskRequest], buffer: memoryview, run: _Run, link: str
    ) -> Iterator[DiskRequest]:
        """What is left to do one by one: all of it without a queue, else what did not go through
        it whole, which will end in an error that says why."""
        queue = self._queue(link) if self.is_direct and len(requests) > 1 else None
        if queue is None:
            yield from requests
            return
        counts = run(queue, self._descriptor, requests, buffer).tolist()
        whole = [
            count >= min(own.num_bytes, self.num_bytes - own.offset)
            for own, count in zip(requests, counts, strict=True)
        ]
        self._traffic.add(
            link,
            sum(compress(counts, whole)),
            sum(o.wanted_bytes for o in compress(requests, whole)),
        )
        yield from (own for own, is_whole in zip(requests, whole, strict=True) if not is_whole)

    def _queue(self, link: str) -> RequestQueue | None:
        """One for each direction, which have threads of their own."""
        with self._opening:
            if link not in self._queues:
                self._queues[link] = RequestQueue.open()
            return self._queues[link]

    def write(self, offset: int, data: memoryview, wanted: int | None = None) -> None:
        """Write all of ``data`` at ``offset``."""
        place = 0
        while place < len(data):
            try:
                count = os.pwritev(
                    self._descriptor, [data[place : place + _REQUEST_BYTES]], offset + place
                )
            except OSError as error:
                raise _disk_full(self.path, len(data), error) from error
            self._traffic.add("disk write", count, 0)
            self._forget(offset + place, count)
            place += count
        self._traffic.add("disk write", 0, len(data) if wanted is None else wanted)

    def _forget(self, offset: int, count: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def _place(buffer: memoryview, request: DiskRequest) -> memoryview:
    return buffer[request.place : request.place + request.num_bytes]


def _disk_full(path: Path, num_bytes: int, error: OSError) -> BudgetError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return BudgetError(
        f"{format_bytes(num_bytes)} was to be written to {path.parent}.",
        f"The system refused: {error.strerror}.",
        "Free some space there, name another directory with --disk-dir, or give the disk less."
        if is_full
        else "Name a directory that can be written to with --disk-dir.",
    )


def create_scratch(directory: Path, num_bytes: int, traffic: Traffic) -> DirectFile:
    """A private file of this size, all blocks reserved, that vanishes with the process."""
    size = align_up(num_bytes, BLOCK)
    try:
        descriptor, name = tempfile.mkstemp(prefix="freight-", dir=directory)
    except OSError as error:
        raise _disk_full(directory / "scratch", size, error) from error
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
        return DirectFile(Path(name), traffic, writable=True)
    except OSError as error:
        raise _disk_full(Path(name), size, error) from error
    finally:
        os.close(descriptor)
        os.unlink(name)
