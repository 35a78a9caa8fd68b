"""Loops over rows of bfloat16, of codes or of floats in 4 or 8 bits, times a few tokens of
bfloat16, by pairs of neighbours, which numba compiles: as fast as rows can be read. Threads that
call them with the same counters take turns.

Arrays of uint32 hold the pairs. Products and sums are float32; results are rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.addresses import floats_at, halves_at, words_at
from freight.kernels.cache_lines import whole_lines, zero_lines
from freight.kernels.code_few_loops import (
    lay_codes_tokens,
    multiply_codes,
    sum_groups,
)
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.eight_few_loops import multiply_eights
from freight.kernels.features import may_use_tiles
from freight.kernels.level_few_loops import lay_level_tokens, multiply_levels
from freight.kernels.open_mp import call_together
from freight.kernels.pair_few_blocks import ROWS, put_few_products
from freight.kernels.product_loops import put_sums
from freight.kernels.product_tables import gates_before, place_of, rows_of
from freight.kernels.row_kinds import (
    EXPONENT,
    KeptBytes,
    KeptCodes,
    KeptEights,
    KeptLevels,
    KeptPairs,
    KeptSixteens,
    kind_of,
)
from freight.kernels.turns import take, wait_for
from freight.kernels.vectors import WIDTH, load, splat, store

__all__ = ["FEW_TOKENS", "few_in_turns", "few_together"]

U = np.uintp
F = np.float32
_MOST_TOKENS = 12
FEW_TOKENS = 8 if may_use_tiles() else _MOST_TOKENS
"""Up to which rows had better meet them one by one."""
_TURN_ROWS = 2 * WIDTH
_AHEAD = 2 * ROWS
"""Rows that are fetched before they are wanted."""
_BYTES = 4
"""Of a pair."""
_ONE, _TWO, _FOUR, _SIX = (put_few_products(count) for count in (1, 2, 4, 6))
_HALF_OF_EIGHT, _HALF_OF_TWELVE = (put_few_products(count, ROWS // 2) for count in (4, 6))
"""That fetch as much in each of two blocks as others do in one."""


@uncounted
def _lay(x, pitch, columns, tokens, blocks, laid):  # type: ignore[no-untyped-def]
    """Tokens as blocks take them: of sixteen pairs each token's side by side, zeros of those that
    are not there. Pairs are moved as if they were numbers."""
    together = _together(tokens)
    for place in range(blocks * together):
        block, own = place // together, place % together
        for column in range(0, columns, WIDTH):
            pairs = splat(F(0.0))
            if place < tokens:
                pairs = load(x, U(place * pitch + column))
            store(laid, U((block * columns + column) * together + own * WIDTH), pairs)


@uncounted
def _together(tokens):  # type: ignore[no-untyped-def]
    """Of so many, how many a block has."""
    if tokens <= 2:
        return tokens
    return 6 if 4 < tokens <= 6 or tokens > 8 else 4


@uncounted
def _multiply(rows, start, pitch, tokens, laid, sums, place, ahead):  # type: ignore[no-untyped-def]
    """ROWS rows by all tokens: sums [ROWS, 16], of which lane t is of token t."""
    count = pitch // U(WIDTH)
    if tokens == 1:
        _ONE(rows, start, pitch, laid, count, sums, place, ahead)
    elif tokens == 2:
        _TWO(rows, start, pitch, laid, count, sums, place, ahead)
    elif tokens <= 4:
        _FOUR(rows, start, pitch, laid, count, sums, place, ahead)
    elif tokens <= 6:
        _SIX(rows, start, pitch, laid, count, sums, place, ahead)
    elif tokens <= 8:
        _HALF_OF_EIGHT(rows, start, pitch, laid, count, sums, place, ahead)
        others, half = laid[U(4) * pitch :], ahead + pitch * U(ROWS // 2)
        _HALF_OF_EIGHT(rows, start, pitch, others, count, sums, place + U(4), half)
    else:
        others, half = laid[U(6) * pitch :], ahead + pitch * U(ROWS // 2)
        _HALF_OF_TWELVE(rows, start, pitch, laid, count, sums, place, ahead)
        _HALF_OF_TWELVE(rows, start, pitch, others, count, sums, place + U(6), half)


def _lay_tokens(
    kind: Any, x: Any, halves: Any, given: Any, together: Any, laid: Any, shared: Any
) -> None:
    """Tokens as blocks take them; ``given`` are numbers of pairs from one token to the next, of
    their pairs, and of tokens."""


@overload(_lay_tokens, jit_options=UNCOUNTED)
def _lay_tokens_of(kind, x, halves, given, together, laid, shared):  # type: ignore[no-untyped-def]
    own = {
        KeptCodes: _lay_for_codes,
        KeptBytes: _lay_for_bytes,
        KeptLevels: _lay_for_levels,
        KeptSixteens: _lay_for_levels,
    }
    return own.get(kind_of(kind), _lay_pairs)


def _lay_for_codes(kind, x, halves, given, together, laid, shared):  # type: ignore[no-untyped-def]
    lay_codes_tokens(x, given, together, kind.size, laid)
    if kind.factor_bytes != EXPONENT:
        sum_groups(halves, given, kind.size, shared)


def _lay_for_bytes(kind, x, halves, given, together, laid, shared):  # type: ignore[no-untyped-def]
    pitch, columns, tokens = given
    _lay(x, pitch, columns, tokens, (tokens + together - 1) // together, laid)
    sum_groups(halves, given, kind.size, shared)


def _lay_for_levels(kind, x, halves, given, together, laid, shared):  # type: ignore[no-untyped-def]
    lay_level_tokens(x, given, together, laid)


def _lay_pairs(kind, x, halves, given, together, laid, shared):  # type: ignore[no-untyped-def]
    pitch, columns, tokens = given
    _lay(x, pitch, columns, tokens, (tokens + together - 1) // together, laid)


def _multiply_rows(
    kind: Any, begin: Any, height: Any, following: Any, given: Any, laid: Any, room: Any, sums: Any
) -> None:
    """Sums [rows, 16] of ``height`` rows that begin at the address ``begin``, behind which come
    those at ``following``; ``given`` are pairs of a row, and tokens."""


@overload(_multiply_rows, jit_options={"nogil": True, "boundscheck": False})
def _multiply_rows_of(kind, begin, height, following, given, laid, room, sums):  # type: ignore[no-untyped-def]
    own = {
        KeptPairs: _multiply_pairs,
        KeptCodes: _multiply_codes,
        KeptBytes: _multiply_bytes,
        KeptEights: _multiply_eights,
        KeptLevels: _multiply_levels,
        KeptSixteens: _multiply_levels,
    }
    return own[kind_of(kind)]


def _multiply_codes(kind, begin, height, following, given, laid, room, sums):  # type: ignore[no-untyped-def]
    (columns, tokens), (shared, left) = given, room
    own = columns, tokens, columns
    multiply_codes(kind, begin, height, following, own, laid, shared, left, sums)


def _multiply_bytes(kind, begin, height, following, given, laid, room, sums):  # type: ignore[no-untyped-def]
    (columns, tokens), (shared, left) = given, room
    own = columns, tokens, 2 * columns
    multiply_codes(kind, begin, height, following, own, laid, shared, left, sums)


def _multiply_eights(kind, begin, height, following, given, laid, room, sums):  # type: ignore[no-untyped-def]
    own = given[0], given[1], kind.row_bytes
    multiply_eights(begin, height, following, own, laid, sums)


def _multiply_levels(kind, begin, height, following, given, laid, room, sums):  # type: ignore[no-untyped-def]
    multiply_levels(kind, begin, height, following, given, laid, room[0], room[1], sums)


def _multiply_pairs(kind, begin, height, following, given, laid, room, sums):  # type: ignore[no-untyped-def]
    columns, tokens = given
    rows, pitch = words_at(begin, height * columns), U(columns)
    whole, behind = height // ROWS * ROWS, (following - begin) // _BYTES
    for row in range(0, whole, ROWS):
        beyond = row + _AHEAD - height
        ahead = (row + _AHEAD) * columns if beyond < 0 else behind + beyond * columns
        to = U(row * WIDTH)
        _multiply(rows, U(row * columns), pitch, tokens, laid, sums, to, U(ahead))
    if whole < height:
        left = room[1].view(np.uint32)
        for place in range((height - whole) * columns):
            left[U(place)] = rows[U(whole * columns + place)]
        _multiply(left, U(0), pitch, tokens, laid, sums, U(whole * WIDTH), U(0))


@njit(nogil=True, cache=True, boundscheck=False)
def _some_rows(kind, table, line, first, following, laid, room, sums, turned):  # type: ignore[no-untyped-def]
    """The rows of a turn from ``first`` on, behind which come those whose address is
    ``following``."""
    columns, tokens, apart = table[0, 2], table[table[line, 6], 3], table[line, 5]
    height = min(_TURN_ROWS, table[line, 1] - first)
    begin = table[line, 0] + first * kind.row_bytes
    _multiply_rows(kind, begin, height, following, (columns, tokens), laid, room, sums)
    added, adds = table[line, 2], table[line, 3]
    bias = floats_at(added + 4 * first if added else 0, height if added else 0)
    out = halves_at(table[line, 4] + 2 * first, (tokens - 1) * apart + height)
    put_sums(sums, _TURN_ROWS, tokens, height, bias, adds, out, apart, turned)


@njit(nogil=True, cache=True, boundscheck=False)
def few_in_turns(counters, table, kind):  # type: ignore[no-untyped-def]
    """Products of tokens, FEW_TOKENS at most with the same rows, and rows that are all kept in one
    way, all of which are there when this returns, whoever made them. All rows have as many
    columns. Of two counters the first says how many turns are taken, the second how many rows are
    done."""
    columns, known = table[0, 2], np.int64(-1)
    laid = whole_lines(_MOST_TOKENS * columns)
    # Of groups there are as many as sixteens of pairs at most, up to whole vectors.
    room = zero_lines(_MOST_TOKENS * (columns // WIDTH + WIDTH)), zero_lines(ROWS * columns)
    sums, turned = zero_lines(_TURN_ROWS * WIDTH), whole_lines(WIDTH * WIDTH)
    line, first, before = place_of(table, take(counters, U(0), 1), 1, 0, _TURN_ROWS)
    while line > 0:
        if table[line, 6] != known:
            known = table[line, 6]
            begin, pitch, tokens = table[known, 0], table[known, 1], table[known, 3]
            last = (tokens - 1) * pitch + columns
            x, halves = floats_at(begin, last), halves_at(begin, 2 * last)
            given, together = (pitch, columns, tokens), _together(tokens)
            _lay_tokens(kind, x, halves, given, together, laid, room[0])
        turn = take(counters, U(0), 1)
        next_line, next_first, before = place_of(table, turn, line, before, _TURN_ROWS)
        following = np.int64(0)
        if next_line > 0:
            following = table[next_line, 0] + next_first * kind.row_bytes
        gates = gates_before(table, line + 1)
        own = table[line + 1, 0] + first * kind.row_bytes if gates else following
        _some_rows(kind, table, line, first, own, laid, room, sums, turned)
        if gates:
            _some_rows(kind, table, line + 1, first, following, laid, room, sums, turned)
        height = min(_TURN_ROWS, table[line, 1] - first)
        take(counters, U(1), (2 if gates else 1) * height)
        line, first = next_line, next_first
    wait_for(counters, U(1), rows_of(table))


@njit(nogil=True, cache=True)
def few_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(few_in_turns, arguments, threads)
