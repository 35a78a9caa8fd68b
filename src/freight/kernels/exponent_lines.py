"""Rows of bfloat16 with short exponents made plain, a line of 64 numbers at a time, for loops over
pairs or over float32: loops that numba compiles.

Rows are (bytes, columns, bytes of a row), as ``model.number_format`` has them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.cache_lines import prefetch
from freight.kernels.compiled import uncounted
from freight.kernels.exponent_registers import (
    HAS_EXPANSION,
    first_one,
    ones_in,
    put_line,
    put_wide_line,
    spared_in,
)
from freight.model.number_format import LINE_CODE_BYTES, LINE_COLUMNS, NOTED_COLUMNS

__all__ = ["LINE_COLUMNS", "ROWS_AHEAD", "lay_exponents", "lay_wide"]

U = np.uintp
_HALF = LINE_COLUMNS // 2
ROWS_AHEAD = 32
"""Where nobody knows better, how far ahead rows are fetched while others are laid."""
_LINES_NOTED = NOTED_COLUMNS // LINE_COLUMNS


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _row_places(raw, source, columns, begin):  # type: ignore[no-untyped-def]
    """Of the row whose bytes begin at ``source``: the largest exponent that has a code, where the
    codes of the columns from ``begin`` on are, and where their exponents without a code."""
    codes = source + U(columns)
    notes = codes + U(LINE_CODE_BYTES * (columns // LINE_COLUMNS))
    top = notes + U(2 * ((columns + NOTED_COLUMNS - 1) // NOTED_COLUMNS))
    note = notes + U(2 * (begin // NOTED_COLUMNS))
    before = U(raw[note]) + (U(raw[note + U(1)]) << U(8))
    line = begin // NOTED_COLUMNS * _LINES_NOTED
    while line < begin // LINE_COLUMNS:
        before += ones_in(spared_in(raw, codes + U(LINE_CODE_BYTES * line)))
        line += 1
    return raw[top], codes + U(LINE_CODE_BYTES * line), top + U(1) + before


@uncounted
def lay_exponents(rows, top, height, begin, width, out, start, row_apart, half_apart, ahead):  # type: ignore[no-untyped-def]
    """``width`` columns from ``begin`` on, whole lines, of rows from ``top`` on, to out from
    ``start`` on as bfloat16. Rows come ``row_apart`` there and halves of lines, 32 numbers,
    ``half_apart``, counted in out's own elements. What comes ``ahead`` rows further is fetched:
    parts of many rows come in turn, too many for the processor to see what comes next."""
    raw, columns, row_bytes = rows
    for row in range(height):
        source = U((top + row) * row_bytes)
        largest, codes, others = _row_places(raw, source, columns, begin)
        low, to = source + U(begin), U(start + row * row_apart)
        further = U(ahead * row_bytes)
        for _ in range(width // LINE_COLUMNS):
            prefetch(raw, low + further)
            prefetch(raw, codes + further)
            spared = put_line(out, to, U(half_apart), raw, low, codes, others, largest)
            if not HAS_EXPANSION:
                _put_spared(out, to, U(half_apart), raw, low, others, spared)
            others += ones_in(spared)
            low += U(LINE_COLUMNS)
            codes += U(LINE_CODE_BYTES)
            to += U(2 * half_apart)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _bits(raw, low, others):  # type: ignore[no-untyped-def]
    """A number by its sign and mantissa and an exponent without a code."""
    own = np.uint32(raw[low])
    sign, mantissa = (own & np.uint32(0x80)) << np.uint32(8), own & np.uint32(0x7F)
    return sign | np.uint32(raw[others]) << np.uint32(7) | mantissa


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _place_of(byte):  # type: ignore[no-untyped-def]
    """Which half of a line, and which number of it, has its byte there."""
    return (byte >> U(3)) & U(1), (byte >> U(4) << U(3)) + (byte & U(7))


@uncounted
def _put_spared(out, place, half_apart, raw, low, others, spared):  # type: ignore[no-untyped-def]
    """Those of a line that have exponents without a code, one by one."""
    while spared:
        byte = first_one(spared)
        half, lane = _place_of(byte)
        bits, at = _bits(raw, low + byte, others), place + half * half_apart
        if out.itemsize == 2:
            out[at + lane] = bits
        else:
            words, shift = out.view(np.uint32), np.uint32((lane & U(1)) << U(4))
            kept = words[at + (lane >> U(1))] & ~(np.uint32(0xFFFF) << shift)
            words[at + (lane >> U(1))] = kept | bits << shift
        spared &= spared - np.uint64(1)
        others += U(1)


@uncounted
def _put_spared_wide(out, place, raw, low, others, spared):  # type: ignore[no-untyped-def]
    """Likewise of a line of float32."""
    words = out.view(np.uint32)
    while spared:
        byte = first_one(spared)
        half, lane = _place_of(byte)
        words[place + half * U(_HALF) + lane] = _bits(raw, low + byte, others) << np.uint32(16)
        spared &= spared - np.uint64(1)
        others += U(1)


@uncounted
def lay_wide(rows, top, height, begin, width, out, start, row_apart):  # type: ignore[no-untyped-def]
    """As ``lay_exponents`` as float32, which out is, side by side."""
    raw, columns, row_bytes = rows
    for row in range(height):
        source = U((top + row) * row_bytes)
        largest, codes, others = _row_places(raw, source, columns, begin)
        low, to = source + U(begin), U(start + row * row_apart)
        further = U(ROWS_AHEAD * row_bytes)
        for _ in range(width // LINE_COLUMNS):
            prefetch(raw, low + further)
            prefetch(raw, codes + further)
            spared = put_wide_line(out, to, raw, low, codes, others, largest)
            if not HAS_EXPANSION:
                _put_spared_wide(out, to, raw, low, others, spared)
            others += ones_in(spared)
            low += U(LINE_COLUMNS)
            codes += U(LINE_CODE_BYTES)
            to += U(LINE_COLUMNS)
