"""Loops over rows of bfloat16 times tokens of bfloat16, by pairs of neighbours, which numba
compiles. Threads that call them with the same counters take turns.

Arrays of uint32 hold the pairs. Rows are read as they lie, and sixteen tokens side by side meet
each of their pairs. Products and sums are float32; results are rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.addresses import floats_at, halves_at, words_at
from freight.kernels.cache_lines import whole_lines, zero_lines
from freight.kernels.code_lines import extent_of, lay_rows, pairs_of_a_part
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.open_mp import call_together
from freight.kernels.pair_blocks import MOST_TILES, ROWS, add_pair_products
from freight.kernels.product_loops import lay_in_tiles, put_sums
from freight.kernels.product_tables import gates_before, place_of, rows_of
from freight.kernels.row_kinds import PairRows, kind_of
from freight.kernels.sums import GATES
from freight.kernels.turns import take, wait_for
from freight.kernels.vectors import WIDTH, load, splat, store, transpose

__all__ = [
    "FEW_TOKENS_OF_CODES",
    "MOST_OF_EACH",
    "MOST_TOGETHER",
    "MOST_TOKENS",
    "columns_together",
    "lay_in_turns",
    "lay_together",
    "many_in_turns",
    "many_together",
    "plain_in_turns",
    "plain_together",
    "rows_of_a_turn",
    "several_in_turns",
    "several_together",
    "wait_for",
]

U = np.uintp
F = np.float32
MOST_TOGETHER = 512
"""Tokens that are multiplied at once: as many as there is room for."""
MOST_TOKENS = 1 << 30
"""Up to which plain rows had better be multiplied so: any number."""
MOST_OF_EACH = 64
"""Tokens that each thread lays for itself: with more it takes too long, and there is enough to do
that who waits for others waits little."""
_MOST_COLUMNS = 1024
"""Pairs of a row that meet all tokens before the next ones do."""
FEW_TOKENS_OF_CODES = 10
"""Up to which codes had better be multiplied as they are."""
_GROUPS = 2
"""Of tiles that meet all rows of a turn before the next ones do: a core's own cache holds them and
the rows. Others wait in a cache that other guests of the machine use, too."""
_MANY_ROWS = 8 * ROWS
_LAST_TURNS = 2
_LAST_ROWS = 2 * WIDTH
"""Of the turns into which what these would have is cut. Whole vectors, as all turns' rows are, so
that none is rounded otherwise for being near the end."""
_TILES = 2


def columns_together(columns: int, tokens: int) -> int:
    """Pairs of a row that had better meet all tokens before the next ones do: as few parts as there
    can be, of whole groups and about the same size."""
    return pairs_of_a_part(columns, -(-columns // _MOST_COLUMNS))


def rows_of_a_turn(rows: int, columns: int, length: int, cores: int) -> int:
    """Whole panels, and whole vectors of results."""
    return _MANY_ROWS


_ONE, _TWO, _THREE, _FOUR = (add_pair_products(count) for count in range(1, MOST_TILES + 1))


@uncounted
def lay_in_turns(counters, x, pitch, columns, tokens, length, tiles):  # type: ignore[no-untyped-def]
    """As ``lay_in_tiles`` of all tokens: the first counter says how many tiles are taken, the
    second how many lie there, which all do when this returns. Pairs are moved as if they were
    numbers."""
    count = (tokens + WIDTH - 1) // WIDTH
    first = take(counters, U(0), _TILES)
    while first < count:
        last = min(first + _TILES, count)
        lay_in_tiles(x, pitch, columns, tokens, length, first, last, tiles)
        take(counters, U(1), last - first)
        first = take(counters, U(0), _TILES)
    wait_for(counters, U(1), count)


@njit(nogil=True, cache=True)
def lay_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(lay_in_turns, arguments, threads)


@njit(nogil=True, cache=True, boundscheck=False)
def many_in_turns(counters, number, most, rows, tiles, tokens, length, bias, adds, out, pitch):  # type: ignore[no-untyped-def]
    """Rows times tokens, to the same columns of out, whose rows are ``pitch`` apart: plus the bias
    [all rows] unless it is empty, as ``put_sums`` has it. The counter ``number`` says how many
    turns of ``most`` rows, or fewer, are taken, and the third one how many rows are done. Rows are
    as ``extent_of`` has them. Tokens lie in tiles, ``length`` columns of all of them, then the next
    ones; of a tile a column's sixteen side by side."""
    count, columns = extent_of(rows)
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    sums = whole_lines(num_tiles * most * WIDTH)
    laid = zero_lines(_rows_laid(rows, most) * length).view(np.uint32)
    turned = whole_lines(WIDTH * WIDTH)
    first, height = _next_rows(counters, number, count, most)
    while height > 0:
        sums[:] = F(0.0)
        for begin in range(0, columns, length):
            part = first, height, begin, min(length, columns - begin)
            _add_rows(rows, part, laid, length, tiles, num_tiles, sums, most)
        own_bias = bias[first : first + height]
        put_sums(sums, most, tokens, height, own_bias, adds, out[first:], pitch, turned)
        take(counters, U(2), height)
        first, height = _next_rows(counters, number, count, most)


@njit(nogil=True, cache=True)
def _next_rows(counters, number, count, most):  # type: ignore[no-untyped-def]
    """The first row of the next turn, and how many it has: fewer near the end, for whoever takes
    the last one is waited for, and the same whoever takes it when."""
    turn = take(counters, U(number), 1)
    whole = max(0, count // most - _LAST_TURNS)
    if turn < whole:
        return turn * most, most
    first = whole * most + (turn - whole) * _LAST_ROWS
    return first, min(_LAST_ROWS, count - first)


@njit(nogil=True, cache=True, boundscheck=False)
def plain_in_turns(counters, table):  # type: ignore[no-untyped-def]
    """Products of the same tokens and plain rows, from laying the tokens to the last of all
    results, which are there when this returns, whoever made them. The first line of the table says
    of the tokens where they are, pairs from one to the next, how many pairs and tokens, how many
    pairs meet all tokens at once, and where they are to be laid; each further one of a product
    where rows are and how many, where float32 are to be added or 0, what becomes of sums, where
    results are, and numbers from one to the next."""
    pitch, columns, tokens, length = table[0, 1], table[0, 2], table[0, 3], table[0, 4]
    room = (tokens + WIDTH - 1) // WIDTH * WIDTH * columns
    x, laid = floats_at(table[0, 0], (tokens - 1) * pitch + columns), floats_at(table[0, 5], room)
    lay_in_turns(counters, x, pitch, columns, tokens, length, laid)
    tiles = words_at(table[0, 5], room)
    made = 0
    for line in range(1, table.shape[0]):
        count, added, adds, apart = table[line, 1], table[line, 2], table[line, 3], table[line, 5]
        if adds == GATES:
            # What it gates must be there: products before this one make it.
            wait_for(counters, U(2), made)
        rows = PairRows(words_at(table[line, 0], count * columns), columns)
        bias = floats_at(added, count if added else 0)
        out = halves_at(table[line, 4], (tokens - 1) * apart + count)
        place = 2 + line
        many_in_turns(
            counters, place, _MANY_ROWS, rows, tiles, tokens, length, bias, adds, out, apart
        )
        made += count
    wait_for(counters, U(2), made)


@uncounted
def _lay_padded(x, pitch, columns, tokens, length, padded, tiles):  # type: ignore[no-untyped-def]
    """As ``lay_in_tiles`` of all tokens, the last ones through room for sixteen, which is as fast
    for few of them as for all."""
    whole, num_tiles = tokens // WIDTH, (tokens + WIDTH - 1) // WIDTH
    lay_in_tiles(x, pitch, columns, tokens, length, 0, whole, tiles)
    if whole == num_tiles:
        return
    for place in range(WIDTH):
        source, to = (whole * WIDTH + place) * pitch, place * columns
        for column in range(0, columns, WIDTH):
            pairs = splat(F(0.0))
            if whole * WIDTH + place < tokens:
                pairs = load(x, U(source + column))
            store(padded, U(to + column), pairs)
    for first in range(0, columns, length):
        width = min(length, columns - first)
        at = (first * num_tiles + whole * width) * WIDTH
        for column in range(0, width, WIDTH):
            transpose(padded, U(first + column), U(columns), tiles, U(at + column * WIDTH))


@njit(nogil=True, cache=True, boundscheck=False)
def several_in_turns(counters, table):  # type: ignore[no-untyped-def]
    """Products of tokens, MOST_OF_EACH at most with the same rows, and plain rows, all of which are
    there when this returns, whoever made them. Each thread lays tokens for itself, and so waits for
    nobody before the end. The first line of the table also says how many pairs of rows meet all
    tokens at once. Of two counters the first says how many turns are taken, the second how many
    rows are done."""
    columns, length, known = table[0, 2], table[0, 4], np.int64(-1)
    tiles, padded = whole_lines(MOST_OF_EACH * columns), whole_lines(WIDTH * columns)
    sums = whole_lines(MOST_OF_EACH * _MANY_ROWS)
    laid, turned = zero_lines(ROWS * length).view(np.uint32), whole_lines(WIDTH * WIDTH)
    line, first, before = place_of(table, take(counters, U(0), 1), 1, 0, _MANY_ROWS)
    while line > 0:
        if table[line, 6] != known:
            known = table[line, 6]
            begin, pitch, tokens = table[known, 0], table[known, 1], table[known, 3]
            x = floats_at(begin, (tokens - 1) * pitch + columns)
            _lay_padded(x, pitch, columns, tokens, length, padded, tiles)
        words, height = tiles.view(np.uint32), min(_MANY_ROWS, table[line, 1] - first)
        gates = gates_before(table, line + 1)
        for own in range(line, line + 1 + gates):
            place = own, first, height
            _put_rows(table, place, tokens, length, words, laid, sums, turned)
        take(counters, U(1), (1 + gates) * height)
        line, first, before = place_of(table, take(counters, U(0), 1), line, before, _MANY_ROWS)
    wait_for(counters, U(1), rows_of(table))


@njit(nogil=True, cache=True, boundscheck=False)
def _put_rows(table, place, tokens, length, tiles, laid, sums, turned):  # type: ignore[no-untyped-def]
    """So many rows of a line from the first on, and all tokens."""
    line, first, height = place
    columns, added, adds, apart = table[0, 2], table[line, 2], table[line, 3], table[line, 5]
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    rows = PairRows(words_at(table[line, 0], (first + height) * columns), columns)
    sums[: num_tiles * _MANY_ROWS * WIDTH] = F(0.0)
    for begin in range(0, columns, length):
        part = first, height, begin, min(length, columns - begin)
        _add_rows(rows, part, laid, length, tiles, num_tiles, sums, _MANY_ROWS)
    bias = floats_at(added + 4 * first if added else 0, height if added else 0)
    out = halves_at(table[line, 4] + 2 * first, (tokens - 1) * apart + height)
    put_sums(sums, _MANY_ROWS, tokens, height, bias, adds, out, apart, turned)


@njit(nogil=True, cache=True)
def several_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(several_in_turns, arguments, threads)


@njit(nogil=True, cache=True)
def plain_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(plain_in_turns, arguments, threads)


@njit(nogil=True, cache=True)
def many_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(many_in_turns, arguments, threads)


def _rows_laid(rows: Any, most: Any) -> Any:
    """How many rows of a turn are laid before they meet tokens: those of a panel that is not whole,
    or all that are compressed."""


@overload(_rows_laid, jit_options=UNCOUNTED)
def _rows_laid_of(rows, most):  # type: ignore[no-untyped-def]
    if kind_of(rows) is PairRows:
        return lambda rows, most: ROWS
    return lambda rows, most: most


def _add_rows(  # type: ignore[no-untyped-def]
    rows, part, laid, length, tiles, num_tiles, sums, most
) -> None:
    """Add the products of rows as they lie, or else laid, and all tiles to sums; a part is the
    first row, how many, the first pair, how many."""


@overload(_add_rows, jit_options=UNCOUNTED)
def _add_rows_of(rows, part, laid, length, tiles, num_tiles, sums, most):  # type: ignore[no-untyped-def]
    return _add_pairs if kind_of(rows) is PairRows else _add_compressed


def _add_pairs(rows, part, laid, length, tiles, num_tiles, sums, most):  # type: ignore[no-untyped-def]
    (flat, columns), (top, height, begin, width) = rows, part
    whole = height // ROWS * ROWS
    for row in range(whole, height):
        start = (top + row) * columns + begin
        for column in range(width):
            laid[U((row - whole) * length + column)] = flat[U(start + column)]
    groups = (num_tiles + MOST_TILES - 1) // MOST_TILES
    for group in range(0, groups, _GROUPS):
        some = num_tiles, groups, group, min(group + _GROUPS, groups)
        start = top * columns + begin
        _add_panels(flat, start, columns, tiles, begin, width, some, sums, 0, whole, most)
        _add_panels(laid, 0, length, tiles, begin, width, some, sums, whole, height, most)


def _add_compressed(rows, part, laid, length, tiles, num_tiles, sums, most):  # type: ignore[no-untyped-def]
    top, height, begin, width = part
    for row in range(0, height, ROWS):
        own, place = min(ROWS, height - row), row * length
        lay_rows(rows, top + row, own, 2 * begin, 2 * width, laid, place, length, WIDTH, ROWS)
    groups = (num_tiles + MOST_TILES - 1) // MOST_TILES
    for group in range(0, groups, _GROUPS):
        some = num_tiles, groups, group, min(group + _GROUPS, groups)
        _add_panels(laid, 0, length, tiles, begin, width, some, sums, 0, height, most)


@uncounted
def _add_panels(rows, start, pitch, tiles, begin, width, some, sums, row, bottom, most):  # type: ignore[no-untyped-def]
    """``width`` columns of the rows from ``row`` to ``bottom``, the first of which begins at
    ``start``, and of some of the tiles, to sums [tiles, rows of a turn, 16]; some are (all tiles,
    in how many groups, the first of these, the one after the last). Groups differ by one tile at
    most."""
    num_tiles, groups, first_group, last_group = some
    wide, apart, count, sums_apart = U(pitch), U(width * WIDTH), U(width), U(most * WIDTH)
    ahead = wide * U(ROWS)
    for panel in range(row, bottom, ROWS):
        first = U(start + (panel - row) * pitch)
        for group in range(first_group, last_group):
            tile = num_tiles * group // groups
            together = num_tiles * (group + 1) // groups - tile
            at = U((begin * num_tiles + tile * width) * WIDTH)
            own = U((tile * most + panel) * WIDTH)
            if together == 4:
                _FOUR(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
            elif together == 3:
                _THREE(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
            elif together == 2:
                _TWO(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
            else:
                _ONE(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
