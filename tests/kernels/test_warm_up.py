"""Warming up: what a run uses is compiled by then."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch

from freight.kernels import loops
from freight.kernels.grouped import GroupedRows, dequantise, small_product
from freight.kernels.warm_up import warm_up
from freight.model.number_format import Grouped

own = Grouped(bits=8, group_size=32, wide=True)
warm_up(torch.float32, weights=[None, own], kv_format=None)
used = (loops.product, loops.to_float32)
compiled = [len(loop.signatures) for loop in used]
assert compiled == [1, 1], compiled
rows = GroupedRows(
    raw=torch.zeros(40, own.row_bytes(96), dtype=torch.uint8), columns=96, number_format=own
)
dequantise(rows, torch.empty(40, 96))
assert small_product(torch.zeros(3, 96), rows) is not None
assert [len(loop.signatures) for loop in used] == compiled
"""


def test_nothing_is_left_to_compile() -> None:
    """For scales in float32, too; in a process that has compiled nothing else."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
