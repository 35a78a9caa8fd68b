"""What the process has, and what it gives back when it comes near its budget."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from freight.memory import process
from freight.memory.process import give_back, process_bytes, system_memory_bytes
from freight.quantities import MIB

PROT_READ = 1

HOLES = """
from freight.memory.process import Keeper, process_bytes
from freight.runtime.device import quiet_allocator

MIB = 1 << 20
quiet_allocator()
pieces = [bytearray(100_000) for _ in range(2_000)]
full = process_bytes()
del pieces[: len(pieces) - 1]  # the last one holds the heap's end
held = process_bytes()
Keeper(held + 100 * MIB, with_libraries=True).keep()
far = process_bytes()
Keeper(held + 8 * MIB, with_libraries=True).keep()
print((full - held) // MIB, (held - far) // MIB, (held - process_bytes()) // MIB)
"""

LIBRARIES = """
import torch
from freight.memory.process import LIBRARY_BYTES, _resident_pages, give_back

def of_files():
    return _resident_pages()[1] * 4096

had = of_files()
give_back()
left = of_files()
x = torch.randn(300, 300, dtype=torch.float64)
error = (torch.linalg.inv(x) @ x - torch.eye(300, dtype=torch.float64)).abs().max()
print(had, left, of_files() < LIBRARY_BYTES, error.item() < 1e-6)
"""


def printed(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_holes_go_back_near_the_budget() -> None:
    """200 MB in small pieces, all but the last of them free."""
    kept, given_far, given_near = map(int, printed(HOLES))
    assert kept < 10 and given_far < 10, "glibc gives back by itself: nothing is seen"
    assert given_near > 150


def test_pages_of_libraries_go_back_and_come_again() -> None:
    had, left, is_within, is_right = printed(LIBRARIES)
    assert int(left) < 0.3 * int(had), "most of what was read to start is not wanted again"
    assert is_within == is_right == "True"


SMAPS = """
7f00-7f10 r--p 00000000 fe:00 1 /lib/libsame.so.6
Rss: 4 kB
Anonymous: 0 kB
Swap: 0 kB
VmFlags: rd
7f10-7f20 r--p 00000000 fe:00 2 /lib/libchanged.so
Anonymous: 4 kB
Swap: 0 kB
VmFlags: rd
7f20-7f30 r--p 00000000 fe:00 2 /lib/libchanged.so
Anonymous: 0 kB
Swap: 4 kB
VmFlags: rd
7f30-7f40 rw-p 00000000 fe:00 2 /lib/libchanged.so
Anonymous: 0 kB
Swap: 0 kB
VmFlags: rd wr
7f40-7f50 r--s 00000000 fe:00 3 /lib/libshared.so
Anonymous: 0 kB
Swap: 0 kB
VmFlags: rd
7f50-7f60 r-xp 00000000 00:00 0
Anonymous: 0 kB
Swap: 0 kB
VmFlags: rd
7f60-7f70 r-xp 00000000 fe:00 4 /lib/libother.so
Anonymous: 0 kB
Swap: 0 kB
VmFlags: rd
"""


def test_only_what_a_file_has_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed pages that were swapped out are no longer among those in memory."""
    (tmp_path / "smaps").write_text(SMAPS)
    monkeypatch.setattr(process, "_MAPS", tmp_path / "smaps")
    same, other = (0x7F00, 0x7F10), (0x7F60, 0x7F70)
    assert list(process._as_in_files("")) == [same, other]
    assert list(process._as_in_files("libother")) == [other]


def test_what_was_changed_of_a_file_stays(tmp_path: Path) -> None:
    """As a loader changes addresses, and then forbids to write: the file does not have them."""
    path = tmp_path / "library.so.1"
    path.write_bytes(b"old." * 4096)
    with path.open("r+b") as file:
        changed = mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_PRIVATE)
        same = mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_PRIVATE, prot=PROT_READ)
    changed[:4] = b"new."
    assert same[:4] == b"old."
    view = (ctypes.c_char * 8192).from_buffer(changed)
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(ctypes.addressof(view)), 8192, PROT_READ) == 0
    give_back("another")
    give_back()
    assert view[:8] == b"new.old."
    assert same[:8] == b"old.old."


def test_a_process_is_part_of_what_the_system_has() -> None:
    assert process_bytes() < system_memory_bytes()


@pytest.mark.parametrize("version", [1, 2])
def test_what_others_in_a_control_group_hold_is_not_there(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of 1 GiB: this process, another one's 300 MiB, and 200 MiB of cached files."""
    root = tmp_path / "memory" if version == 1 else tmp_path
    limit, usage = "memory.max", "memory.current"
    stat = f"anon 1\ninactive_file {150 * MIB}\nactive_file {50 * MIB}\n"
    if version == 1:
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        stat = f"inactive_file 7\ntotal_inactive_file {150 * MIB}\ntotal_active_file {50 * MIB}\n"
    own = process_bytes()
    (tmp_path / "own").write_text("4:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    monkeypatch.setattr(process, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(process, "_GROUPS", tmp_path)
    monkeypatch.setattr(process, "process_bytes", lambda: own)
    root.mkdir(exist_ok=True)
    (root / limit).write_text(f"{1024 * MIB}\n")
    (root / usage).write_text(f"{own + 500 * MIB}\n")
    (root / "memory.stat").write_text(stat)
    assert system_memory_bytes() == 724 * MIB
    (root / limit).write_text("max\n")
    assert system_memory_bytes() > 1024 * MIB
