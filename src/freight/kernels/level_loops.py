"""Codes of 4 bits that stand for levels made plain: loops that numba compiles. Each works on some
rows, alone; threads are the caller's business."""

from __future__ import annotations

import numpy as np

from freight.kernels.compiled import uncounted
from freight.kernels.level_registers import load_high_levels, load_low_levels
from freight.kernels.vectors import WIDTH, multiply, splat, store
from freight.model.float_formats import LEVEL_COLUMNS

__all__ = ["make_plain", "scale_of"]

U = np.uintp


@uncounted
def scale_of(rows, source, column):  # type: ignore[no-untyped-def]
    """Of the group that a column is in, of the row that begins at byte ``source``; rows are as
    ``LevelRows`` has them."""
    raw, factors, eights, _, columns, _, bits = rows
    scales = source + U(columns // 2)
    if len(eights):
        factor = factors[(scales + U(columns >> bits)) // U(4)]
        return eights[raw[scales + U(column >> bits)]] * factor
    return factors[scales // U(4) + U(column >> bits)]


@uncounted
def make_plain(rows, first, last, out):  # type: ignore[no-untyped-def]
    """Rows ``first`` to ``last`` to those of out, flat: float32, or uint16 that are bfloat16."""
    raw, _, _, levels, columns, row_bytes, _ = rows
    for row in range(first, last):
        source, to = U(row * row_bytes), U(row * columns)
        for column in range(0, columns, LEVEL_COLUMNS):
            place = source + U(column // 2)
            low = splat(scale_of(rows, source, column))
            high = splat(scale_of(rows, source, column + WIDTH))
            store(out, to, multiply(load_low_levels(raw, place, levels), low))
            store(out, to + U(WIDTH), multiply(load_high_levels(raw, place, levels), high))
            to += U(LEVEL_COLUMNS)
