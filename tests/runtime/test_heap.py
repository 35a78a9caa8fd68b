"""What lies free in the heap goes back when the process has come near its budget, and only then."""

from __future__ import annotations

import subprocess
import sys

HOLES = """
from freight.memory.tier import process_bytes
from freight.runtime.device import quiet_allocator, trim_heap

MIB = 1 << 20
quiet_allocator()
pieces = [bytearray(100_000) for _ in range(2_000)]
full = process_bytes()
del pieces[: len(pieces) - 1]  # the last one holds the heap's end
held = process_bytes()
trim_heap(held + 100 * MIB)
far = process_bytes()
trim_heap(held + 8 * MIB)
print((full - held) // MIB, (held - far) // MIB, (held - process_bytes()) // MIB)
"""


def test_holes_go_back_near_the_budget() -> None:
    """200 MB in small pieces, all but the last of them free."""
    done = subprocess.run(
        [sys.executable, "-c", HOLES],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, given_far, given_near = map(int, done.stdout.split())
    assert kept < 10 and given_far < 10, "glibc gives back by itself: nothing is seen"
    assert given_near > 150
