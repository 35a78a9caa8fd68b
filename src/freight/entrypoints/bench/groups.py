"""Memory control groups: a fresh one for each run, page cache counted. Version 1 and 2.

Knows processes and files of the kernel; no model and no system under test.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from freight.errors import InputError
from freight.quantities import format_bytes

__all__ = ["GroupMaker", "MemoryGroup", "drop_caches", "forget_files"]

_ROOT: Final = Path("/sys/fs/cgroup")
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
_NUMBERS: Final = count()
_TRIES: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A group that exists: processes enter it, and its peak can be read while it does."""

    path: Path
    peak_file: str

    def enter(self) -> None:
        """Move the calling process into the group; to be called between fork and exec."""
        (self.path / "cgroup.procs").write_text("0")

    def peak_bytes(self) -> int | None:
        """The most memory that was charged; None where the kernel does not say."""
        try:
            return int((self.path / self.peak_file).read_text())
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """Remove it; a process that was just killed may need a moment to leave."""
        for _ in range(_TRIES):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMaker:
    """Makes groups of ``limit_bytes`` each. InputError where the system lets us make none."""

    limit_bytes: int
    root: Path = _ROOT

    def check(self) -> None:
        """Make one and remove it."""
        self.make().remove()
        if not os.access(_DROP_CACHES, os.W_OK):
            raise self._refusal(f"{_DROP_CACHES} cannot be written, so caches stay warm")

    def make(self) -> MemoryGroup:
        old = self.root / "memory"
        name = f"freight-bench-{os.getpid()}-{next(_NUMBERS)}"
        try:
            if (old / "memory.limit_in_bytes").exists():
                return self._make(old / name, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
            if "memory" in (self.root / "cgroup.controllers").read_text().split():
                (self.root / "cgroup.subtree_control").write_text("+memory")
                return self._make(self.root / name, "memory.max", "memory.peak")
        except OSError as error:
            raise self._refusal(f"{error.filename}: {error.strerror}") from error
        raise self._refusal(f"no memory controller is mounted at {self.root}")

    def _make(self, path: Path, limit_file: str, peak_file: str) -> MemoryGroup:
        path.mkdir()
        group = MemoryGroup(path=path, peak_file=peak_file)
        try:
            (path / limit_file).write_text(str(self.limit_bytes))
            for file, value in (
                ("memory.swap.max", 0),
                ("memory.memsw.limit_in_bytes", self.limit_bytes),
            ):
                if (path / file).exists():
                    (path / file).write_text(str(value))
        except OSError:
            group.remove()
            raise
        return group

    def _refusal(self, reason: str) -> InputError:
        return InputError(
            f"--group {format_bytes(self.limit_bytes)} was given.",
            f"No memory control group can be used here ({reason}).",
            "Run as root where control groups are mounted for writing, or leave --group out: "
            "budgets are then given to each system, and its peak is reported.",
        )


def drop_caches() -> None:
    """Empty the system's page cache; what is in it would be free for whoever comes next."""
    os.sync()
    _DROP_CACHES.write_text("3")


def forget_files(directory: Path) -> None:
    """Drop a directory's weights from the page cache, which needs no rights."""
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.gguf")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
