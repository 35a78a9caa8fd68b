"""Rows of bfloat16 looked at and given short exponents: loops that numba compiles. Each works on
some rows, alone; threads are the caller's business."""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.compiled import uncounted
from freight.model.number_format import (
    EXPONENT_BITS,
    EXPONENT_CODES,
    LINE_CODE_BYTES,
    LINE_COLUMNS,
    NOTED_COLUMNS,
)

__all__ = ["find_tops", "put_rows"]

_NUM_EXPONENTS = 256
_LINES_NOTED = NOTED_COLUMNS // LINE_COLUMNS


@njit(nogil=True, cache=True, boundscheck=False)
def find_tops(bits, first, last, tops, spared):  # type: ignore[no-untyped-def]
    """Of rows ``first`` to ``last`` of bits uint16 [rows, columns] the largest of the neighbours
    that most exponents are among, the first such if there are several, and how many are not."""
    columns = bits.shape[1]
    counts = np.empty(_NUM_EXPONENTS, np.int64)
    for row in range(first, last):
        counts[:] = 0
        for column in range(columns):
            counts[(bits[row, column] >> 7) & 0xFF] += 1
        among = 0
        for exponent in range(EXPONENT_CODES):
            among += counts[exponent]
        most, top = among, EXPONENT_CODES - 1
        for exponent in range(EXPONENT_CODES, _NUM_EXPONENTS):
            among += counts[exponent] - counts[exponent - EXPONENT_CODES]
            if among > most:
                most, top = among, exponent
        tops[row], spared[row] = top, columns - most


@uncounted
def put_rows(bits, tops, first, last, head, raw):  # type: ignore[no-untyped-def]
    """Rows ``first`` to ``last`` to raw uint8 [rows, row bytes], in which there is room for all and
    ``head`` bytes come before the exponents without a code."""
    columns = bits.shape[1]
    notes = columns + LINE_CODE_BYTES * (columns // LINE_COLUMNS)
    for row in range(first, last):
        own, source, top = raw[row], bits[row], np.int64(tops[row])
        own[head - 1] = top
        used = 0
        for line in range(columns // LINE_COLUMNS):
            if line % _LINES_NOTED == 0:
                note = notes + 2 * (line // _LINES_NOTED)
                own[note], own[note + 1] = used & 0xFF, used >> 8
            low, middle, high = np.uint64(0), np.uint64(0), np.uint64(0)
            for place in range(LINE_COLUMNS):
                half, lane = place // 8 % 2, place // 16 * 8 + place % 8
                number = source[line * LINE_COLUMNS + half * (LINE_COLUMNS // 2) + lane]
                own[line * LINE_COLUMNS + place] = (number >> 8 & 0x80) | (number & 0x7F)
                exponent = np.int64((number >> 7) & 0xFF)
                code = top - exponent
                if code < 0 or code >= EXPONENT_CODES:
                    code = np.int64(EXPONENT_CODES)
                    own[head + used] = exponent
                    used += 1
                mask = np.uint64(code)
                shift = np.uint64(place)
                low |= (mask & np.uint64(1)) << shift
                middle |= (mask >> np.uint64(1) & np.uint64(1)) << shift
                high |= (mask >> np.uint64(2)) << shift
            for word in range(EXPONENT_BITS):
                codes = low if word == 0 else middle if word == 1 else high
                at = columns + LINE_CODE_BYTES * line + word * (LINE_COLUMNS // 8)
                for byte in range(LINE_COLUMNS // 8):
                    own[at + byte] = np.uint8(codes >> np.uint64(8 * byte) & np.uint64(0xFF))
