"""Loops over rows of plain numbers times tokens, in float32, which numba compiles. Each works on
some rows, alone; threads are the caller's business.

Rows are float32, or 16 bits that are widened where they are used: uint16 that are bfloat16, int16
that are float16. For few tokens, both may be uint32 that are pairs of bfloat16, and columns count
those. Tokens in tiles, and results, are float32 or bfloat16, rounded once. Many tokens
are multiplied as Goto and van de Geijn do it (2008): a panel of rows, some columns of it at a time,
lies in the nearest cache and meets tokens by sixteens, whose sums stay in registers. Few tokens are
multiplied some rows at a time, as fast as rows can be read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.exponent_lines import lay_wide
from freight.kernels.group_blocks import TOKENS as TOKENS_OF_CODES
from freight.kernels.group_blocks import by_tokens
from freight.kernels.group_blocks import rows_by_tokens as code_rows_by_tokens
from freight.kernels.group_loops import plain_groups, widen_factors
from freight.kernels.open_mp import share_ranges
from freight.kernels.register_blocks import (
    FEW_TOKENS,
    PANEL_ROWS,
    ROWS_OF_TOKENS,
    ROWS_TOGETHER,
    TILES_TOGETHER,
    TOKENS_TOGETHER,
    add_products,
    add_products_of_tiles,
    row_by_token,
    row_by_tokens,
    rows_by_token,
    rows_by_token_fetching,
    rows_by_tokens,
    rows_by_tokens_fetching,
)
from freight.kernels.row_kinds import (
    CodeRows,
    ExponentRows,
    NumberRows,
    PairRows,
    SummedCodeRows,
    kind_of,
)
from freight.kernels.sums import ADDS, GATES
from freight.kernels.token_loops import silu
from freight.kernels.vectors import (
    WIDTH,
    add,
    load,
    multiply,
    number_at,
    prefetch,
    put_number,
    store,
    transpose,
)

__all__ = [
    "FEW_TOKENS",
    "PANEL_COLUMNS",
    "PANEL_ROWS",
    "ROWS_TOGETHER",
    "few_together",
    "few_tokens",
    "lay_in_tiles",
    "many_together",
    "many_tokens",
    "multiply_few",
    "put_sums",
]

U = np.uintp
F = np.float32
PANEL_COLUMNS = 256
"""Of a panel, at a time: with as many of sixteen tokens they stay in the nearest cache."""
_PANELS = 16
"""Whose sums are kept at once. They meet the same columns of many tokens one after the other, so
that these stay in a core's own cache."""
_LINE = 64
"""Bytes."""
_KEPT = 1 << 17
"""Numbers of the tokens that stay there altogether."""


@njit(nogil=True, cache=True, boundscheck=False)
def multiply_few(rows, start, count, columns, x, fetches, sums, place):  # type: ignore[no-untyped-def]
    """sums[place:] = ``count`` rows, which are flat and of whole vectors, from ``start`` on, times
    each token of x, which is flat; all of a row side by side. The rows after them are brought where
    it ``fetches`` and there are ROWS_TOGETHER of them."""
    tokens = x.shape[0] // columns
    wide, pitch, fours = U(columns), U(tokens), tokens // TOKENS_TOGETHER * TOKENS_TOGETHER
    for token in range(0, fours, TOKENS_TOGETHER):
        at = U(token * columns)
        if count < ROWS_TOGETHER:
            for row in range(count):
                own, to = U(start + row * columns), U(place + row * tokens + token)
                row_by_tokens(rows, own, wide, x, at, sums, to, pitch)
            continue
        for row in range(0, ROWS_TOGETHER, ROWS_OF_TOKENS):
            own, to = U(start + row * columns), U(place + row * tokens + token)
            if fetches and token == 0:
                rows_by_tokens_fetching(rows, own, wide, x, at, sums, to, pitch)
            else:
                rows_by_tokens(rows, own, wide, x, at, sums, to, pitch)
    for token in range(fours, tokens):
        at = U(token * columns)
        if count < ROWS_TOGETHER:
            for row in range(count):
                own, to = U(start + row * columns), U(place + row * tokens + token)
                row_by_token(rows, own, wide, x, at, sums, to, pitch)
        elif fetches and token == 0:
            rows_by_token_fetching(rows, U(start), wide, x, at, sums, U(place + token), pitch)
        else:
            rows_by_token(rows, U(start), wide, x, at, sums, U(place + token), pitch)


_ONE, _TWO = (by_tokens(count, bits=4) for count in (1, 2))
_ONE_BY_BYTES, _TWO_BY_BYTES = (by_tokens(count, bits=8) for count in (1, 2))
_ROWS, _ROWS_BY_BYTES = (code_rows_by_tokens(bits=bits) for bits in (4, 8))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _codes_by_tokens(count, raw, start, scales, size, bits, x, at, columns, sums, place):  # type: ignore[no-untyped-def]
    """Codes of a row times one or two tokens."""
    groups, step, pitch = U(scales.shape[0]), U(size * bits // 8), U(columns)
    start, at, place = U(start), U(at), U(place)
    if bits == 4:
        if count == 2:
            _TWO(raw, start, scales, groups, step, x, at, pitch, sums, place)
        else:
            _ONE(raw, start, scales, groups, step, x, at, pitch, sums, place)
    elif count == 2:
        _TWO_BY_BYTES(raw, start, scales, groups, step, x, at, pitch, sums, place)
    else:
        _ONE_BY_BYTES(raw, start, scales, groups, step, x, at, pitch, sums, place)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _code_rows_by_tokens(raw, start, line, scales, size, bits, own_x, target):  # type: ignore[no-untyped-def]
    """Codes of two rows, which begin every ``line``, times four tokens. Of x and of the target are
    told: numbers, where they begin, and how far those of two tokens, or two rows, are apart."""
    groups, step = U(scales.shape[0] // 2), U(size * bits // 8)
    starts = U(start), U(start + line)
    x, at, columns = own_x[0], U(own_x[1]), U(own_x[2])
    sums, place, apart = target[0], U(target[1]), U(target[2])
    if bits == 4:
        _ROWS(raw, starts, scales, groups, step, x, at, columns, sums, place, apart)
    else:
        _ROWS_BY_BYTES(raw, starts, scales, groups, step, x, at, columns, sums, place, apart)


@njit(nogil=True, cache=True, boundscheck=False)
def few_tokens(rows, top, bottom, x, bias, adds, out, pitch):  # type: ignore[no-untyped-def]
    """Rows ``top`` to ``bottom`` times tokens [tokens * columns], to the same columns of out, whose
    rows are ``pitch`` apart: plus the bias [all rows] unless it is empty, added to what is there
    where it ``adds``. Rows are (numbers, columns), which are flat and whole vectors; or, with short
    exponents, as ``lay_wide`` has them; or, in groups of whole vectors, as ``many_tokens`` has
    them, and the sums of each group of a token's columns, flat, each token's followed by zeros to
    whole vectors: what minima add is their product."""
    tokens = x.shape[0] // rows.columns
    sums = np.empty(ROWS_TOGETHER * tokens, np.float32)
    for first in range(top, bottom, ROWS_TOGETHER):
        height = min(ROWS_TOGETHER, bottom - first)
        _add_up(rows, first, height, x, sums)
        for row in range(height):
            place = first + row
            own = bias[place] if bias.shape[0] else F(0.0)
            for token in range(tokens):
                before = number_at(out, token * pitch + place) if adds else F(0.0)
                found = sums[row * tokens + token] + own + before
                put_number(out, token * pitch + place, found)


@njit(nogil=True, cache=True)
def few_together(threads, counters, borders, rows, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(few_tokens, (counters, borders), (rows,), others, threads)


@njit(nogil=True, cache=True, boundscheck=False)
def lay_in_tiles(x, pitch, columns, tokens, length, first, last, out):  # type: ignore[no-untyped-def]
    """Tiles ``first`` to ``last`` of sixteen tokens of x, whose rows are ``pitch`` apart, to out:
    ``length`` columns of all tiles, then the next ones; of a tile a column's sixteen side by side,
    zeros where there is no token."""
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    for begin in range(0, columns, length):
        width = min(length, columns - begin)
        for tile in range(first, last):
            at, token = (begin * num_tiles + tile * width) * WIDTH, tile * WIDTH
            if token + WIDTH <= tokens:
                for column in range(0, width, WIDTH):
                    start = U(token * pitch + begin + column)
                    transpose(x, start, U(pitch), out, U(at + column * WIDTH))
            else:
                for place in range(WIDTH):
                    is_there = token + place < tokens
                    source = (token + place) * pitch + begin
                    for column in range(width):
                        own = number_at(x, source + column) if is_there else F(0.0)
                        out[at + column * WIDTH + place] = own


@njit(nogil=True, cache=True, boundscheck=False)
def many_tokens(rows, top, bottom, tiles, tokens, bias, adds, out, pitch):  # type: ignore[no-untyped-def]
    """Rows ``top`` to ``bottom`` times tokens that lie in tiles, otherwise as ``few_tokens``. Rows
    are (numbers, columns), which are flat; or, with short exponents, as ``lay_wide`` has them; or,
    in groups whose size divides PANEL_COLUMNS, (bytes, the same as ``plain_groups`` has them, size,
    bits, columns, bytes of a row); these are made plain where they are used."""
    columns = rows.columns
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    most = min(_PANELS, (bottom - top + PANEL_ROWS - 1) // PANEL_ROWS) * PANEL_ROWS
    sums = np.empty(num_tiles * most * WIDTH, np.float32)
    panel = np.zeros(PANEL_ROWS * PANEL_COLUMNS, np.float32)
    turned = np.empty(WIDTH * WIDTH, np.float32)
    # Rows are read as they lie where a core's own cache keeps the tokens.
    length = columns if num_tiles * WIDTH * columns <= _KEPT else PANEL_COLUMNS
    for first in range(top, bottom, most):
        height = min(most, bottom - first)
        sums[:] = F(0.0)
        for begin in range(0, columns, length):
            end = min(begin + length, columns)
            for row in range(0, height, PANEL_ROWS):
                own_rows = min(PANEL_ROWS, height - row)
                for column in range(begin, end, PANEL_COLUMNS):
                    width = min(PANEL_COLUMNS, end - column)
                    ahead = width if column + width < end else PANEL_ROWS * columns - column + begin
                    _fill(rows, first + row, own_rows, column, width, ahead, panel)
                    _add_panel(panel, tiles, column, width, num_tiles, sums, most, row)
        own = bias[first : first + height]
        put_sums(sums, most, tokens, height, own, adds, out[first:], pitch, turned)


@njit(nogil=True, cache=True)
def many_together(threads, counters, borders, rows, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(many_tokens, (counters, borders), (rows,), others, threads)


def _add_up(rows: Any, first: Any, height: Any, x: Any, sums: Any) -> None:
    """Sums of some rows with each token, all of a row side by side."""


@overload(_add_up, jit_options={"nogil": True, "boundscheck": False})
def _add_up_of(rows, first, height, x, sums):  # type: ignore[no-untyped-def]
    own = {
        NumberRows: _add_up_numbers,
        PairRows: _add_up_numbers,
        ExponentRows: _add_up_exponents,
        SummedCodeRows: _add_up_codes,
    }
    return own[kind_of(rows)]


def _add_up_numbers(rows, first, height, x, sums):  # type: ignore[no-untyped-def]
    flat, columns = rows
    multiply_few(flat, first * columns, height, columns, x, True, sums, 0)


def _add_up_exponents(rows, first, height, x, sums):  # type: ignore[no-untyped-def]
    columns = rows.columns
    plain = np.empty(ROWS_TOGETHER * columns, np.float32)
    lay_wide(rows, first, height, 0, columns, plain, 0, columns)
    multiply_few(plain, 0, height, columns, x, False, sums, 0)


def _add_up_codes(rows, first, height, x, sums):  # type: ignore[no-untyped-def]
    """No row is made plain."""
    raw, numbers, size, bits, columns, line, shared = rows
    groups, tokens = columns // size, x.shape[0] // columns
    wide = shared.shape[0] // tokens
    scales, minima = np.empty(2 * groups, np.float32), np.zeros(wide, np.float32)
    scales_of = scales[:groups], scales[groups:]
    added = np.empty(2 * tokens, np.float32)
    by_rows = tokens // TOKENS_OF_CODES * TOKENS_OF_CODES
    for row in range(height):
        start, number = (first + row) * line, row % 2
        is_first_of_two = number == 0 and row + 1 < height
        factors = U((start + columns * bits // 8) // numbers.itemsize)
        own = scales_of[number]
        widen_factors(numbers, factors, U(groups), own, U(0))
        widen_factors(numbers, factors + U(groups), U(groups), minima, U(0))
        token = by_rows
        while token < tokens:
            count = 2 if tokens - token >= 2 else 1
            at, place = token * columns, row * tokens + token
            _codes_by_tokens(count, raw, start, own, size, bits, x, at, columns, sums, place)
            token += count
        multiply_few(minima, 0, 1, wide, shared, False, added, number * tokens)
        if is_first_of_two:
            continue
        begin, apart = start - number * line, number * line
        if number == 0:  # a row without another is both, so that its sums are what they would be
            scales[groups:] = scales[:groups]
        for token in range(0, by_rows, TOKENS_OF_CODES):
            place = (row - number) * tokens + token
            own_x, target = (x, token * columns, columns), (sums, place, number * tokens)
            _code_rows_by_tokens(raw, begin, apart, scales, size, bits, own_x, target)
        for place in range((number + 1) * tokens):
            sums[(row - number) * tokens + place] += added[place]


def _fill(rows: Any, top: Any, height: Any, begin: Any, width: Any, ahead: Any, panel: Any) -> None:
    """Some columns of a panel's rows as float32, side by side."""


@overload(_fill, jit_options={"nogil": True, "boundscheck": False})
def _fill_of(rows, top, height, begin, width, ahead, panel):  # type: ignore[no-untyped-def]
    own = {NumberRows: _widen, ExponentRows: _make_exponents_plain, CodeRows: _make_plain}
    return own[kind_of(rows)]


def _widen(rows, top, height, begin, width, ahead, panel):  # type: ignore[no-untyped-def]
    """Plain rows, and those ``ahead`` are fetched."""
    flat, columns = rows
    for row in range(height):
        at = (top + row) * columns + begin
        for column in range(0, width, WIDTH):
            prefetch(flat, U(at + ahead + column))
            store(panel, U(row * PANEL_COLUMNS + column), load(flat, U(at + column)))


def _make_exponents_plain(rows, top, height, begin, width, ahead, panel):  # type: ignore[no-untyped-def]
    lay_wide(rows, top, height, begin, width, panel, 0, PANEL_COLUMNS)


def _make_plain(rows, top, height, begin, width, ahead, panel):  # type: ignore[no-untyped-def]
    """Rows in groups, and those ``ahead`` are fetched, with their scales and minima."""
    raw, numbers, size, bits, columns, line = rows
    groups, first, last = U(columns // size), begin // size, (begin + width) // size
    # Further columns of these rows, or columns of rows that are a whole number of rows on.
    skipped = (ahead + columns - 1) // columns if ahead >= columns else 0
    next_rows, there = skipped * line, (begin + ahead - skipped * columns) * bits // 8
    for row in range(height):
        start = (top + row) * line
        factors = U((start + columns * bits // 8) // numbers.itemsize)
        to = U(row * PANEL_COLUMNS)
        for place in range(0, width * bits // 8, _LINE):
            prefetch(raw, U(start + next_rows + there + place))
        if next_rows:
            prefetch(numbers, factors + U(next_rows // numbers.itemsize))
            prefetch(numbers, factors + groups + U(next_rows // numbers.itemsize))
        plain_groups(raw, U(start), numbers, factors, groups, size, bits, first, last, panel, to)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _add_panel(panel, tiles, begin, width, num_tiles, sums, most, row):  # type: ignore[no-untyped-def]
    """A panel's columns times those of all tiles, to sums [tiles, most, 16] from ``row`` on."""
    together = num_tiles // TILES_TOGETHER * TILES_TOGETHER
    pitch, apart, sums_apart = U(PANEL_COLUMNS), U(width * WIDTH), U(most * WIDTH)
    start = begin * num_tiles * WIDTH
    for tile in range(0, together, TILES_TOGETHER):
        at, own = U(start + tile * width * WIDTH), U((tile * most + row) * WIDTH)
        add_products_of_tiles(panel, pitch, tiles, at, apart, U(width), sums, own, sums_apart)
    for tile in range(together, num_tiles):
        at, own = U(start + tile * width * WIDTH), U((tile * most + row) * WIDTH)
        add_products(panel, pitch, tiles, at, apart, U(width), sums, own, sums_apart)


@njit(nogil=True, cache=True, boundscheck=False)
def put_sums(sums, most, tokens, height, bias, adds, out, pitch, turned):  # type: ignore[no-untyped-def]
    """Sums [tiles, most, 16] of ``height`` rows to the first columns of out, sixteen at a time:
    added to what is there where it is told ADDS, times its silu where it is told GATES."""
    whole = height // WIDTH * WIDTH
    for begin in range(0, tokens, WIDTH):
        count = min(WIDTH, tokens - begin)
        for row in range(0, whole, WIDTH):
            transpose(sums, U(begin * most + row * WIDTH), U(WIDTH), turned, U(0))
            for token in range(count):
                place, found = U((begin + token) * pitch + row), load(turned, U(token * WIDTH))
                if bias.shape[0]:
                    found = add(found, load(bias, U(row)))
                if adds == ADDS:
                    found = add(found, load(out, place))
                elif adds == GATES:
                    found = multiply(found, silu(load(out, place)))
                store(out, place, found)
        for token in range(count):
            for row in range(whole, height):
                place = (begin + token) * pitch + row
                found = sums[begin * most + row * WIDTH + token]
                if bias.shape[0]:
                    found += bias[row]
                if adds == ADDS:
                    found += number_at(out, place)
                elif adds == GATES:
                    number = number_at(out, place)
                    found *= number / (F(1.0) + np.exp(min(-number, F(87.0))))
                put_number(out, place, found)
