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

from freight.kernels.cache_lines import prefetch, whole_lines, zero_lines
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.exponent_lines import lay_wide
from freight.kernels.group_blocks import CODE_ROWS_OF_TOKENS, codes_by_tokens
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


@uncounted
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


_ONE, _TWO = (codes_by_tokens(ROWS_TOGETHER, count, bits=4) for count in (1, 2))
_ONE_BY_BYTES, _TWO_BY_BYTES = (codes_by_tokens(ROWS_TOGETHER, count, bits=8) for count in (1, 2))
_FOUR, _FOUR_BY_BYTES = (
    codes_by_tokens(CODE_ROWS_OF_TOKENS, TOKENS_TOGETHER, bits=bits) for bits in (4, 8)
)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _multiply_codes(bits, count, raw, factors, x, shared, target):  # type: ignore[no-untyped-def]
    """Some rows' codes times 1, 2 or TOKENS_TOGETHER tokens, as ``codes_by_tokens`` has them."""
    if bits == 4:
        if count == 1:
            _ONE(raw, factors, x, shared, target)
        elif count == 2:
            _TWO(raw, factors, x, shared, target)
        else:
            _FOUR(raw, factors, x, shared, target)
    elif count == 1:
        _ONE_BY_BYTES(raw, factors, x, shared, target)
    elif count == 2:
        _TWO_BY_BYTES(raw, factors, x, shared, target)
    else:
        _FOUR_BY_BYTES(raw, factors, x, shared, target)


@njit(nogil=True, cache=True, boundscheck=False)
def few_tokens(rows, top, bottom, x, bias, adds, out, pitch):  # type: ignore[no-untyped-def]
    """Rows ``top`` to ``bottom`` times tokens [tokens * columns], to the same columns of out, whose
    rows are ``pitch`` apart: plus the bias [all rows] unless it is empty, added to what is there
    where it ``adds``. Rows are (numbers, columns), which are flat and whole vectors; or, with short
    exponents, as ``lay_wide`` has them; or, in groups of whole vectors, as ``many_tokens`` has
    them, and the sums of each group of a token's columns, flat, each token's followed by zeros to
    whole vectors: what minima add is their product."""
    tokens = x.shape[0] // rows.columns
    sums, room = np.empty(ROWS_TOGETHER * tokens, np.float32), _room_for(rows, tokens)
    for first in range(top, bottom, ROWS_TOGETHER):
        height = min(ROWS_TOGETHER, bottom - first)
        _add_up(rows, first, height, x, sums, room)
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


@uncounted
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
    sums = whole_lines(num_tiles * most * WIDTH)
    panel = zero_lines(PANEL_ROWS * PANEL_COLUMNS)
    turned = whole_lines(WIDTH * WIDTH)
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


def _room_for(rows: Any, tokens: Any) -> Any:
    """Numbers that ``_add_up`` wants for itself, zeros at first."""


@overload(_room_for, jit_options={"nogil": True, "boundscheck": False})
def _room_for_of(rows, tokens):  # type: ignore[no-untyped-def]
    own = {ExponentRows: _room_for_exponents, SummedCodeRows: _room_for_codes}
    return own.get(kind_of(rows), _no_room)


def _no_room(rows, tokens):  # type: ignore[no-untyped-def]
    return np.zeros(0, np.float32)


def _room_for_exponents(rows, tokens):  # type: ignore[no-untyped-def]
    return zero_lines(ROWS_TOGETHER * rows.columns)


def _room_for_codes(rows, tokens):  # type: ignore[no-untyped-def]
    return zero_lines(2 * ROWS_TOGETHER * (rows.sums.shape[0] // tokens))


def _add_up(rows: Any, first: Any, height: Any, x: Any, sums: Any, room: Any) -> None:
    """Sums of some rows with each token, all of a row side by side."""


@overload(_add_up, jit_options=UNCOUNTED, inline="always")
def _add_up_of(rows, first, height, x, sums, room):  # type: ignore[no-untyped-def]
    own = {
        NumberRows: _add_up_numbers,
        PairRows: _add_up_numbers,
        ExponentRows: _add_up_exponents,
        SummedCodeRows: _add_up_codes,
    }
    return own[kind_of(rows)]


def _add_up_numbers(rows, first, height, x, sums, room):  # type: ignore[no-untyped-def]
    flat, columns = rows
    multiply_few(flat, first * columns, height, columns, x, True, sums, 0)


def _add_up_exponents(rows, first, height, x, sums, room):  # type: ignore[no-untyped-def]
    columns = rows.columns
    lay_wide(rows, first, height, 0, columns, room, 0, columns)
    multiply_few(room, 0, height, columns, x, False, sums, 0)


def _add_up_codes(rows, first, height, x, sums, room):  # type: ignore[no-untyped-def]
    """No row is made plain."""
    raw, numbers, size, bits, columns, line, shared = rows
    groups, tokens = columns // size, x.shape[0] // columns
    wide, start, step = shared.shape[0] // tokens, first * line, size * bits // 8
    for row in range(height):
        factors = U((start + row * line + columns * bits // 8) // numbers.itemsize)
        widen_factors(numbers, factors, U(groups), room, U(row * wide))
        to = U((ROWS_TOGETHER + row) * wide)
        widen_factors(numbers, factors + U(groups), U(groups), room, to)
    token = 0
    while token < tokens:
        left = tokens - token
        count = TOKENS_TOGETHER if left >= TOKENS_TOGETHER else min(left, 2)
        together = CODE_ROWS_OF_TOKENS if count == TOKENS_TOGETHER else ROWS_TOGETHER
        own_x = x, U(token * columns), U(columns)
        own_shared = shared, U(token * wide)
        row = 0
        while row < height:
            there = U(start + row * line), U(line), U(min(together, height - row)), U(step)
            _multiply_codes(
                bits,
                count,
                (raw, *there),
                (room, U(row * wide), U(wide), U(groups)),
                own_x,
                own_shared,
                (sums, U(row * tokens + token), U(tokens)),
            )
            row += together
        token += count


def _fill(rows: Any, top: Any, height: Any, begin: Any, width: Any, ahead: Any, panel: Any) -> None:
    """Some columns of a panel's rows as float32, side by side."""


@overload(_fill, jit_options=UNCOUNTED)
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


@uncounted
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
