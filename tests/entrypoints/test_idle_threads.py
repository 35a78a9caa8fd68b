"""What the environment is set to, seen in a process that multiplies."""

from __future__ import annotations

import os
import subprocess
import sys

PRODUCTS = """
import ctypes
from freight.entrypoints.idle_threads import wait_briefly
wait_briefly()
import torch

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
mallinfo2.restype = Info
x, weight = torch.zeros(600, 512).bfloat16(), torch.zeros(512, 512).bfloat16()
out, used = torch.zeros(600, 512).bfloat16(), []
for count in range(200, 600):
    torch.mm(x[:count], weight.t(), out=out[:count])
    used.append(mallinfo2().uordblks)
print((used[-1] - used[99]) >> 20)
"""


def test_products_of_ever_new_shapes_do_not_take_ever_more_memory() -> None:
    """Three hundred more shapes than are kept: each takes a part of a MiB where all are."""
    own = {k: v for k, v in os.environ.items() if not k.endswith("CACHE_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        env={**own, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 16
