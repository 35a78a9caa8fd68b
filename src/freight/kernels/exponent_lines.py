"""Rows of bfloat16 with short exponents made plain, a line of 32 numbers at a time, for loops over
pairs or over float32: loops that numba compiles.

Rows are (bytes, columns, bytes of a row), as ``model.number_format`` has them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.exponent_registers import (
    HAS_EXPANSION,
    first_one,
    ones_in,
    put_line,
    put_wide_line,
    spared_in,
)
from freight.model.number_format import LINE_COLUMNS, NOTED_COLUMNS

__all__ = ["LINE_COLUMNS", "lay_exponents", "lay_wide"]

U = np.uintp
_WORDS_BYTES = 12
"""Of a line's codes."""
_LINES_NOTED = NOTED_COLUMNS // LINE_COLUMNS


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _row_places(raw, source, columns, begin):  # type: ignore[no-untyped-def]
    """Of the row whose bytes begin at ``source``: the largest exponent that has a code, where the
    codes of the columns from ``begin`` on are, and where their exponents without a code."""
    codes = source + U(columns)
    notes = codes + U(_WORDS_BYTES * (columns // LINE_COLUMNS))
    top = notes + U(2 * ((columns + NOTED_COLUMNS - 1) // NOTED_COLUMNS))
    note = notes + U(2 * (begin // NOTED_COLUMNS))
    before = U(raw[note]) + (U(raw[note + U(1)]) << U(8))
    line = begin // NOTED_COLUMNS * _LINES_NOTED
    while line < begin // LINE_COLUMNS:
        before += ones_in(spared_in(raw, codes + U(_WORDS_BYTES * line)))
        line += 1
    return raw[top], codes + U(_WORDS_BYTES * line), top + U(1) + before


@njit(nogil=True, cache=True, boundscheck=False)
def lay_exponents(rows, top, height, begin, width, out, start, row_apart, line_apart):  # type: ignore[no-untyped-def]
    """``width`` columns from ``begin`` on, whole lines, of rows from ``top`` on, to out from
    ``start`` on as bfloat16. Rows come ``row_apart`` there and lines ``line_apart``, counted in
    out's own elements."""
    raw, columns, row_bytes = rows
    for row in range(height):
        source = U((top + row) * row_bytes)
        largest, codes, others = _row_places(raw, source, columns, begin)
        low, to = source + U(begin), U(start + row * row_apart)
        for _ in range(width // LINE_COLUMNS):
            spared = put_line(out, to, raw, low, codes, others, largest)
            if not HAS_EXPANSION:
                _put_spared(out, to, raw, low, others, spared)
            others += ones_in(spared)
            low += U(LINE_COLUMNS)
            codes += U(_WORDS_BYTES)
            to += U(line_apart)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _bits(raw, low, others):  # type: ignore[no-untyped-def]
    """A number by its sign and mantissa and an exponent without a code."""
    own = np.uint32(raw[low])
    sign, mantissa = (own & np.uint32(0x80)) << np.uint32(8), own & np.uint32(0x7F)
    return sign | np.uint32(raw[others]) << np.uint32(7) | mantissa


@njit(nogil=True, cache=True, boundscheck=False)
def _put_spared(out, place, raw, low, others, spared):  # type: ignore[no-untyped-def]
    """Those of a line that have exponents without a code, one by one."""
    while spared:
        lane = first_one(spared)
        bits = _bits(raw, low + lane, others)
        if out.itemsize == 2:
            out[place + lane] = bits
        else:
            at, shift = place + (lane >> U(1)), np.uint32((lane & U(1)) << U(4))
            words = out.view(np.uint32)
            kept = words[at] & ~(np.uint32(0xFFFF) << shift)
            words[at] = kept | bits << shift
        spared &= spared - np.uint32(1)
        others += U(1)


@njit(nogil=True, cache=True, boundscheck=False)
def lay_wide(rows, top, height, begin, width, out, start, row_apart):  # type: ignore[no-untyped-def]
    """Likewise as float32, which out is."""
    raw, columns, row_bytes = rows
    words = out.view(np.uint32)
    for row in range(height):
        source = U((top + row) * row_bytes)
        largest, codes, others = _row_places(raw, source, columns, begin)
        low, to = source + U(begin), U(start + row * row_apart)
        for _ in range(width // LINE_COLUMNS):
            spared = put_wide_line(out, to, raw, low, codes, others, largest)
            own, next_others = spared, others + ones_in(spared)
            if not HAS_EXPANSION:
                while own:
                    lane = first_one(own)
                    words[to + lane] = _bits(raw, low + lane, others) << np.uint32(16)
                    own &= own - np.uint32(1)
                    others += U(1)
            others = next_others
            low += U(LINE_COLUMNS)
            codes += U(_WORDS_BYTES)
            to += U(LINE_COLUMNS)
