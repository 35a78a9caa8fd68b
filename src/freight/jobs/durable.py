"""Bytes that reach the disk, or an error that says what to do.

Knows nothing of rows or jobs. A full disk and a forbidden path are the user's to mend, so they
become ``BudgetError`` and ``JobError`` here, in one place.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freight.errors import BudgetError, JobError

__all__ = ["disk_errors", "sync_directory", "write_all", "write_atomically"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_KEPT = "rows that are done are kept"


@contextmanager
def disk_errors(path: Path | str, *, kept: str = _KEPT) -> Iterator[None]:
    """Turn the operating system's refusals to write ``path`` into Freight's errors; ``kept`` says
    what becomes of rows that are done."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise BudgetError(
                f"{path} was being written.",
                f"The disk has no room for it: {os.strerror(error.errno)}.",
                f"Free some space and run the same command again; {kept}.",
            ) from error
        raise JobError(
            f"{path} was being written.",
            f"The system refused: {error.strerror or error}.",
            "Choose a directory that can be written, then run the same command again.",
        ) from error


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """``os.write`` until everything is written: a filling disk takes part of it at first."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` so that a kill or a power cut leaves the old content or the new."""
    temporary = path.with_name(path.name + ".new")
    with disk_errors(path):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names created in or removed from a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
