"""What this process has of the machine's memory, what it may have, and what it can give back."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from freight.quantities import MIB

__all__ = [
    "LIBRARY_BYTES",
    "Keeper",
    "give_back",
    "process_bytes",
    "system_memory_bytes",
]

LIBRARY_BYTES: Final = 48 * MIB
"""What a run wants again of libraries' files after :func:`give_back`: 36 to 38 MiB were seen."""

_MARGIN_BYTES: Final = 32 * MIB
"""What a sweep may take between two looks at it."""

_MADV_DONTNEED: Final = 4
_NO_LIMIT: Final = 2**63
_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_MAPS: Final = Path("/proc/self/smaps")
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p [0-9a-f]+ \S+ \d+ +(/.*\.so[.0-9]*)")
"""Of a library, not to be written, for this process alone: its first byte, its end, its path."""


def give_back(libraries: str = "") -> None:
    """Give back what lies free in the heap, and pages of libraries that are as in their files, of
    those whose path has ``libraries`` in it: most are read while a library starts, and count as
    this process's memory for as long as they are mapped. Those that are wanted again come from the
    page cache."""
    _trim_heap()
    _let_go_of_files(libraries)


class Keeper:
    """Gives back what can be when the process has come near ``limit_bytes``: results of ever new
    sizes leave holes in the heap, which glibc keeps resident. What is used again is faulted in
    again. Of libraries only ``with_libraries``."""

    def __init__(self, limit_bytes: int, *, with_libraries: bool) -> None:
        self._limit_bytes = limit_bytes
        self._library_bytes = LIBRARY_BYTES if with_libraries else None

    def keep(self) -> None:
        if process_bytes() < self._limit_bytes - _MARGIN_BYTES:
            return
        _trim_heap()
        of_files = _resident_pages()[1] * mmap.PAGESIZE
        if self._library_bytes is not None and of_files > self._library_bytes:
            _let_go_of_files("")
            # A run that wants so much of them would have them brought again and again.
            self._library_bytes *= 2


def _trim_heap() -> None:
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _let_go_of_files(libraries: str) -> None:
    libc = ctypes.CDLL(None)
    with suppress(OSError, AttributeError):  # another system
        for first, end in _as_in_files(libraries):
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)


def _as_in_files(libraries: str) -> Iterator[tuple[int, int]]:
    """Stretches of memory, first byte and end, that are as the files they were read from: no page
    was changed, as a loader changes addresses, neither one that is here nor one that was swapped
    out."""
    found, changed = None, False
    for line in _MAPS.read_text().splitlines():
        if (mapping := _MAPPING.fullmatch(line)) is not None:
            found, changed = mapping, libraries not in mapping[3]
        elif line.startswith(("Anonymous:", "Swap:")):
            changed |= line.split()[1] != "0"
        elif line.startswith("VmFlags:"):  # the last of a mapping
            if found is not None and not changed:
                yield int(found[1], 16), int(found[2], 16)
            found = None


def process_bytes() -> int:
    """Resident memory of this process, libraries included."""
    return _resident_pages()[0] * mmap.PAGESIZE


def _resident_pages() -> tuple[int, int]:
    """All, and those of files."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]), int(fields[2])


def system_memory_bytes() -> int:
    """What this process may still take: what the machine has free, or its control groups less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return min(meminfo["MemAvailable"] + process_bytes(), *_group_limits(), _NO_LIMIT)


def _group_limits() -> Iterator[int]:
    """What the control groups that this process is in still give it, from its own up to the root:
    their limits, less what others in them hold. Cached files are given back when memory is short.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    own = process_bytes()
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "memory":
            root, files = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif controllers == "":
            root, files = _GROUPS, ("memory.max", "memory.current")
        else:
            continue
        group = root / name.lstrip("/")
        for path in (group, *(p for p in group.parents if p.is_relative_to(root))):
            limit, used = (_read_count(path / file) for file in files)
            if limit is not None:
                others = max(0, (used or 0) - _cached_bytes(path) - own)
                yield max(0, limit - others)


def _read_count(path: Path) -> int | None:
    """The number in a control group's file; None where there is none, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached_bytes(group: Path) -> int:
    """Files in the page cache on a control group's account, those of groups below it included."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}
    # Version 1 counts groups below apart, under names of their own.
    prefix = "total_" if "total_inactive_file" in counts else ""
    return sum(counts.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
