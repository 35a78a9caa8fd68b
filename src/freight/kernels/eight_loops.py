"""Floats of 8 bits made plain: loops that numba compiles. Each works on some rows, alone; threads
are the caller's business."""

from __future__ import annotations

import numpy as np

from freight.kernels.compiled import uncounted
from freight.kernels.micro_registers import load_eights
from freight.kernels.vectors import WIDTH, multiply, splat, store
from freight.model.number_format import EIGHT_COLUMNS

__all__ = ["make_plain"]

U = np.uintp


@uncounted
def make_plain(rows, first, last, out):  # type: ignore[no-untyped-def]
    """Rows ``first`` to ``last`` of rows, as ``lay_eights`` has them, to those of out, flat:
    float32, or uint16 that are bfloat16."""
    raw, factors, columns, row_bytes = rows
    for row in range(first, last):
        source, to = U(row * row_bytes), U(row * columns)
        scales = (source + U(columns)) // U(4)
        for column in range(0, columns, WIDTH):
            scale = splat(factors[scales + U(column // EIGHT_COLUMNS)])
            own = load_eights(raw, source + U(column))
            store(out, to + U(column), multiply(own, scale))
