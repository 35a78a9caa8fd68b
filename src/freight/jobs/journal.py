"""Finished rows, appended to a file that survives being killed at any byte.

The first line says whose rows these are (a fingerprint); each further line is one finished row:
``{"index":12,"row":{...}}``. A row is handed to the operating system at once, so a killed process
loses nothing, and to the disk at most every half second, which bounds what a power cut costs.
Memory holds a position and a length per row. Knows nothing of tokens, engines or the output file.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from freight.errors import JobError
from freight.jobs.durable import disk_errors, write_all, write_atomically

__all__ = ["INPUT", "Fingerprint", "Journal", "compare_fingerprints", "read_fingerprint"]

INPUT: Final = "the input"
"""The name, in a fingerprint, of the hash of the input's bytes."""

Fingerprint = Mapping[str, str]
"""What a job's rows depend on: a name for people -> a value that is equal for equal work."""

_LINE: Final = re.compile(rb'\{"index":(\d+),"row":(\{.*\})\}\n')
_SYNC_ROWS: Final = 1024
_SYNC_S: Final = 0.5


class Journal:
    """The journal of one job, open for appending and for reading back.

    Opening cuts off a torn last line. ``num_failed`` counts rows whose output row is an error.
    """

    def __init__(
        self,
        path: Path,
        *,
        fingerprint: Fingerprint,
        num_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fingerprint = fingerprint
        self._path = path
        self._clock = clock
        self._positions: npt.NDArray[np.int64] = np.full(num_rows, -1, dtype=np.int64)
        self._lengths: npt.NDArray[np.int32] = np.zeros(num_rows, dtype=np.int32)
        self.num_done = 0
        self.num_failed = 0
        if not path.exists():
            write_atomically(path, _header(fingerprint))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with open(path, "rb") as file, disk_errors(path):
            self.start = len(file.readline())
            self.end = self._recover(file)
            os.ftruncate(self._descriptor, self.end)
            os.lseek(self._descriptor, self.end, os.SEEK_SET)
        self._synced = self.end
        self._synced_at = clock()
        self._unsynced_rows = 0

    def _recover(self, file: BinaryIO) -> int:
        """Take in the rows that are whole; returns where they end."""
        position = self.start
        for line in file:
            match = _LINE.fullmatch(line)
            if match is None or not _is_json(match[2]) or int(match[1]) >= len(self._positions):
                # Bytes after a torn line were written by nobody we can trust: those rows are
                # computed again.
                break
            self._note(int(match[1]), position, line, failed=_is_error(match[2]))
            position += len(line)
        return position

    def _note(self, index: int, position: int, line: bytes, *, failed: bool) -> None:
        if self._positions[index] < 0:
            self._positions[index] = position
            self._lengths[index] = len(line)
            self.num_done += 1
            self.num_failed += failed

    @property
    def num_rows(self) -> int:
        return len(self._positions)

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """Per row, whether it is finished."""
        return self._positions >= 0

    def is_done(self, index: int) -> bool:
        return bool(self._positions[index] >= 0)

    def append(self, index: int, row: bytes, *, failed: bool = False) -> None:
        """Record the output row of a row that was not finished yet."""
        if self.is_done(index):
            raise RuntimeError(f"row {index} was finished twice")
        line = b'{"index":%d,"row":%s}\n' % (index, row)
        with disk_errors(self._path):
            write_all(self._descriptor, line)
        self._note(index, self.end, line, failed=failed)
        self.end += len(line)
        self._unsynced_rows += 1
        if self._unsynced_rows >= _SYNC_ROWS or self._clock() - self._synced_at >= _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Bring everything appended to the disk."""
        if self._synced < self.end:
            with disk_errors(self._path):
                os.fdatasync(self._descriptor)
        self._synced = self.end
        self._synced_at = self._clock()
        self._unsynced_rows = 0

    def row(self, index: int) -> bytes | None:
        """The output row of a finished row, without its newline; ``None`` if it is not done."""
        position = int(self._positions[index])
        if position < 0:
            return None
        return _row_of(os.pread(self._descriptor, int(self._lengths[index]), position))

    def rows_from(self, position: int) -> Iterator[tuple[bytes, int]]:
        """Output rows as they finished, from a position on, each with the position after it."""
        if position >= self.end:
            return
        with open(self._path, "rb") as file:
            file.seek(position)
            while position < self.end:
                line = file.readline()
                position += len(line)
                yield _row_of(line), position

    def close(self) -> None:
        """Sync and close."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)


def read_fingerprint(path: Path) -> Fingerprint | None:
    """Whose rows a journal holds; ``None`` if there is no journal or no row in it."""
    try:
        with open(path, "rb") as file:
            header, first_row = file.readline(), file.readline()
    except FileNotFoundError:
        return None
    if not first_row.endswith(b"\n"):
        return None
    try:
        fingerprint: dict[str, str] = json.loads(header)["fingerprint"]
        return dict(fingerprint)
    except (ValueError, TypeError, KeyError) as error:
        raise JobError(
            f"The journal {path} was opened.",
            "Its first line is damaged, so nobody can tell whose rows these are.",
            "Give --restart to throw it away, or choose another output.",
        ) from error


def compare_fingerprints(
    recorded: Fingerprint, wanted: Fingerprint, *, where: Path, source: str
) -> None:
    """Refuse to mix the rows of two jobs, naming exactly what differs. ``source`` is the input's
    name: of an input that is another one, hashes would tell nobody which."""
    names = [*wanted, *(name for name in recorded if name not in wanted)]
    different = [name for name in names if recorded.get(name) != wanted.get(name)]
    told = [
        f"the input was another, or {source} has changed since"
        if name == INPUT
        else f"{name} was {recorded.get(name, 'not recorded')}, now {wanted.get(name, 'not given')}"
        for name in different
    ]
    if told:
        added = " Rows that were added go into a file, and an output, of their own."
        raise JobError(
            f"The job in {where} was to be continued.",
            f"It was begun with something else: {'; '.join(told)}.",
            "Give --restart to throw its rows away and begin anew, or choose another output."
            + (added if INPUT in different else ""),
        )


def _header(fingerprint: Fingerprint) -> bytes:
    return json.dumps({"freight_journal": 1, "fingerprint": dict(fingerprint)}).encode() + b"\n"


def _row_of(line: bytes) -> bytes:
    return line[line.index(b'"row":') + 6 : -2]


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def _is_error(row: bytes) -> bool:
    return b'"error"' in row and json.loads(row).get("error") is not None
