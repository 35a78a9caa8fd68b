"""The output: rows copied from the journal to a file or a stream.

The output is a function of the journal: rows in input order as the finished prefix grows, or in
the order in which they finished. So after a kill it needs no record of its own: what agrees with
the journal stays, the rest is written again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from freight.errors import JobError
from freight.jobs.durable import disk_errors, sync_directory, write_all
from freight.jobs.journal import Journal

__all__ = ["Output"]

_WRITE_BYTES: Final = 1 << 20


class Output:
    """Writes rows to a stream's descriptor, which stays the caller's, or to a file, each once."""

    def __init__(self, sink: Path | int, *, journal: Journal, unordered: bool) -> None:
        self._journal = journal
        self._unordered = unordered
        self._next = journal.start if unordered else 0  # position or index of the next row
        self._hash = hashlib.blake2b(digest_size=16)
        self._path = sink if isinstance(sink, Path) else None
        if isinstance(sink, Path):
            with disk_errors(sink):
                self._descriptor = os.open(sink, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._lock(sink)
            self._resume(sink)
        else:
            self._descriptor = sink

    def _lock(self, path: Path) -> None:
        """Runs with job directories of their own would otherwise write over each other's rows."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise JobError(
                f"The output {path} was to be written.",
                "Another run is writing it now.",
                "Wait for that run, or choose another output.",
            ) from error

    def _resume(self, path: Path) -> None:
        """Keep what a file holds already as far as it agrees with the journal."""
        kept = 0
        with open(path, "rb") as existing, disk_errors(path):
            for row, after in self._ready():
                if existing.read(len(row) + 1) != row + b"\n":
                    break
                self._hash.update(row + b"\n")
                kept += len(row) + 1
                self._next = after
            os.ftruncate(self._descriptor, kept)
            os.lseek(self._descriptor, kept, os.SEEK_SET)

    @property
    def digest(self) -> str:
        """The blake2b of all that the output holds, as ``hash_stream`` finds it in a file."""
        return self._hash.hexdigest()

    def emit(self) -> None:
        """Write every row that is ready."""
        parts: list[bytes] = []
        num_bytes, reached = 0, self._next
        for row, after in self._ready():
            parts += (row, b"\n")
            num_bytes, reached = num_bytes + len(row) + 1, after
            if num_bytes >= _WRITE_BYTES:
                self._write(parts, reached)
                parts, num_bytes = [], 0
        if parts:
            self._write(parts, reached)

    def sync(self) -> None:
        """Bring a file to the disk; a stream has no such thing."""
        if self._path is not None:
            with disk_errors(self._path):
                os.fsync(self._descriptor)
                sync_directory(self._path.parent)

    def close(self) -> None:
        """Close a file; a stream is left open."""
        if self._path is not None:
            os.close(self._descriptor)

    def _write_errors(self) -> AbstractContextManager[None]:
        if self._path is not None:
            return disk_errors(self._path)
        return disk_errors("the output stream", kept="rows of a stream are kept with --job-dir")

    def _ready(self) -> Iterator[tuple[bytes, int]]:
        if self._unordered:
            return self._journal.rows_from(self._next)
        return self._finished_prefix()

    def _finished_prefix(self) -> Iterator[tuple[bytes, int]]:
        index = self._next
        while index < self._journal.num_rows and (row := self._journal.row(index)) is not None:
            index += 1
            yield row, index

    def _write(self, parts: list[bytes], reached: int) -> None:
        with self._write_errors():
            data = b"".join(parts)
            write_all(self._descriptor, data)
        self._hash.update(data)
        self._next = reached
