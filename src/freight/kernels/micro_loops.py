"""MXFP4 made plain: loops that numba compiles. Each works on some rows, alone; threads are the
caller's business."""

from __future__ import annotations

import numpy as np

from freight.kernels.compiled import uncounted
from freight.kernels.micro_registers import load_high_fours, load_low_fours, power_of_two
from freight.kernels.vectors import WIDTH, multiply, store

__all__ = ["make_plain"]

U = np.uintp


@uncounted
def make_plain(raw, columns, first, last, out):  # type: ignore[no-untyped-def]
    """Rows ``first`` to ``last`` of raw uint8 [rows, row bytes], flat, to those of out, flat too:
    float32, or uint16 that are bfloat16."""
    groups = columns // (2 * WIDTH)
    for row in range(first, last):
        source = U(row * (columns // 2 + groups))
        exponents, to = source + U(columns // 2), U(row * columns)
        for group in range(groups):
            scale = power_of_two(raw, exponents + U(group))
            store(out, to, multiply(load_low_fours(raw, source), scale))
            store(out, to + U(WIDTH), multiply(load_high_fours(raw, source), scale))
            source += U(WIDTH)
            to += U(2 * WIDTH)
