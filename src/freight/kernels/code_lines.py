"""Compressed rows made pairs of bfloat16, 16 pairs at a time, which loops over pairs multiply:
loops that numba compiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from freight.kernels.cache_lines import prefetch
from freight.kernels.code_registers import (
    LINE,
    factors_at,
    fours_table,
    group_table,
    levels_table,
    put_bytes,
    put_eights,
    put_high_halves,
    put_low_halves,
    put_short_group,
    put_two_groups,
)
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.exponent_lines import lay_exponents
from freight.kernels.level_loops import scale_of
from freight.kernels.row_kinds import (
    CodeRows,
    EightRows,
    ExponentRows,
    FourRows,
    LevelRows,
    MicroRows,
    PairRows,
    kind_of,
)
from freight.kernels.vectors import WIDTH
from freight.model.number_format import EIGHT_COLUMNS, PAIR_COLUMNS

__all__ = [
    "LINE",
    "extent_of",
    "lay_codes",
    "lay_eights",
    "lay_fours",
    "lay_levels",
    "lay_rows",
    "pairs_of_a_part",
]

U = np.uintp


def pairs_of_a_part(pairs: int, parts: int) -> int:
    """Of a row in so many parts, of whole groups and about the same size."""
    whole = PAIR_COLUMNS // 2
    return -(-pairs // (parts * whole)) * whole


def extent_of(rows: Any) -> Any:
    """(How many rows, pairs of each, or fours)."""


@overload(extent_of, inline="always")
def _extent_of(rows):  # type: ignore[no-untyped-def]
    if kind_of(rows) is PairRows:
        return lambda rows: (rows.pairs.shape[0] // rows.columns, rows.columns)
    if kind_of(rows) is FourRows:
        return lambda rows: (rows.fours.shape[0] // rows.pitch, rows.width)
    return lambda rows: (rows.raw.shape[0] // rows.row_bytes, rows.columns // 2)


def lay_rows(
    rows: Any,
    top: Any,
    height: Any,
    begin: Any,
    width: Any,
    out: Any,
    start: Any,
    row_apart: Any,
    line_apart: Any,
    ahead: Any,
) -> None:
    """As ``lay_codes``, or another of those below, whichever they are.
    What comes ``ahead`` rows further is fetched."""


@overload(lay_rows, jit_options=UNCOUNTED)
def _lay_rows(rows, top, height, begin, width, out, start, row_apart, line_apart, ahead):  # type: ignore[no-untyped-def]
    lay = _LAYING[kind_of(rows)]

    def own(rows, top, height, begin, width, out, start, row_apart, line_apart, ahead):  # type: ignore[no-untyped-def]
        lay(rows, top, height, begin, width, out, start, row_apart, line_apart, ahead)

    return own


@uncounted
def lay_fours(rows, top, height, begin, width, out, start, row_apart, line_apart, ahead):  # type: ignore[no-untyped-def]
    """As ``lay_codes``, of MXFP4, of which a group is a line."""
    raw, columns, row_bytes = rows
    for row in range(height):
        source = U((top + row) * row_bytes)
        exponent = source + U(columns // 2) + U(begin // LINE)
        source += U(begin // 2)
        for byte in range(0, width // 2, 4 * WIDTH):
            prefetch(raw, source + U(ahead * row_bytes + byte))
        to = U(start + row * row_apart)
        for _ in range(width // LINE):
            put_short_group(out, to, raw, source, fours_table(raw, exponent))
            source += U(WIDTH)
            exponent += U(1)
            to += U(line_apart)


@uncounted
def lay_eights(rows, top, height, begin, width, out, start, row_apart, line_apart, ahead):  # type: ignore[no-untyped-def]
    """As ``lay_codes``, of floats of 8 bits."""
    raw, factors, columns, row_bytes = rows
    half = U(WIDTH * 2 // out.itemsize)
    for row in range(height):
        source = U((top + row) * row_bytes)
        scales = (source + U(columns)) // U(4)
        to = U(start + row * row_apart)
        for column in range(begin, begin + width, LINE):
            place, scale = source + U(column), factors[scales + U(column // EIGHT_COLUMNS)]
            prefetch(raw, place + U(ahead * row_bytes))
            put_eights(out, to, raw, place, scale)
            put_eights(out, to + half, raw, place + U(WIDTH), scale)
            to += U(line_apart)


@uncounted
def lay_levels(rows, top, height, begin, width, out, start, row_apart, line_apart, ahead):  # type: ignore[no-untyped-def]
    """As ``lay_codes``, of codes for levels, of which 32 are a line."""
    raw, _, _, levels, _, row_bytes, _ = rows
    for row in range(height):
        source, to = U((top + row) * row_bytes), U(start + row * row_apart)
        for column in range(begin, begin + width, LINE):
            place = source + U(column // 2)
            if column % (4 * LINE) == 0:
                prefetch(raw, place + U(ahead * row_bytes))
            first = scale_of(rows, source, column)
            table = levels_table(levels, first, scale_of(rows, source, column + WIDTH))
            put_two_groups(out, to, raw, place, table)
            to += U(line_apart)


@uncounted
def lay_codes(rows, top, height, begin, width, out, start, row_apart, line_apart, ahead):  # type: ignore[no-untyped-def]
    """``width`` columns from ``begin`` on, whole groups, of rows from ``top`` on, to out from
    ``start`` on. Rows are as ``many_tokens`` has them, and ``row_apart`` there; lines of 32
    columns are ``line_apart``, counted in out's own elements. Codes ``ahead`` rows further are
    fetched."""
    raw, numbers, size, bits, columns, line = rows
    groups, step = U(columns // size), size * bits // 8
    first, count = begin // size, width // size
    half_apart = U(line_apart * (step // LINE))
    for row in range(height):
        source = U((top + row) * line)
        factors = (source + U(columns * bits // 8)) // U(numbers.itemsize) + U(first)
        source += U(first * step)
        to = U(start + row * row_apart)
        for number in range(count):
            for byte in range(0, step, 4 * WIDTH):
                prefetch(raw, source + U(ahead * line + byte))
            if bits == 4:
                table = group_table(numbers, factors, factors + groups)
                if step < LINE:
                    put_short_group(out, to, raw, source, table)
                    to += U(line_apart)
                else:
                    for byte in range(0, step, LINE):
                        put_low_halves(out, to, raw, source + U(byte), table)
                        put_high_halves(out, to + half_apart, raw, source + U(byte), table)
                        to += U(line_apart)
                    to += half_apart
            elif step >= LINE:
                own = factors_at(numbers, factors, factors + groups)
                for byte in range(0, step, LINE):
                    put_bytes(out, to, raw, source + U(byte), own, own)
                    to += U(line_apart)
            elif number % 2 == 0:
                # Two groups are a line.
                own = factors_at(numbers, factors, factors + groups)
                other = factors_at(numbers, factors + U(1), factors + groups + U(1))
                put_bytes(out, to, raw, source, own, other)
                to += U(line_apart)
            source += U(step)
            factors += U(1)


_LAYING = {
    CodeRows: lay_codes,
    EightRows: lay_eights,
    ExponentRows: lay_exponents,
    LevelRows: lay_levels,
    MicroRows: lay_fours,
}
