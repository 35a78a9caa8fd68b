"""Loops over rows of bfloat16 times tokens of bfloat16, by pairs of neighbours, which numba
compiles. Threads that call them with the same counters take turns.

Arrays of uint32 hold the pairs. Rows are read as they lie, and sixteen tokens side by side meet
each of their pairs. Products and sums are float32; results are rounded once.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.code_lines import extent_of, lay_rows, pairs_of_a_part
from freight.kernels.open_mp import call_together
from freight.kernels.pair_blocks import MOST_TILES, ROWS, add_pair_products
from freight.kernels.product_loops import few_tokens, lay_in_tiles, put_sums
from freight.kernels.row_kinds import PairRows, kind_of
from freight.kernels.turns import take, wait_for
from freight.kernels.vectors import WIDTH

__all__ = [
    "FEW_TOKENS",
    "FEW_TOKENS_OF_CODES",
    "MOST_TOGETHER",
    "MOST_TOKENS",
    "columns_together",
    "few_in_turns",
    "few_together",
    "lay_in_turns",
    "lay_together",
    "many_in_turns",
    "many_together",
    "rows_of_a_turn",
    "wait_for",
]

U = np.uintp
F = np.float32
MOST_TOGETHER = 512
"""Tokens that are multiplied at once: as many as there is room for."""
MOST_TOKENS = 1 << 30
"""Up to which plain rows had better be multiplied so: any number."""
_MOST_COLUMNS = 1024
"""Pairs of a row that meet all tokens before the next ones do: of 128 tokens these stay in a core's
own cache."""
FEW_TOKENS = 16
"""Up to which rows had better meet them one by one."""
FEW_TOKENS_OF_CODES = 10
"""Up to which codes had better be multiplied as they are."""
_MANY_ROWS = 8 * ROWS
_FEW_ROWS = 64
_TILES = 2


def columns_together(columns: int, tokens: int) -> int:
    """Pairs of a row that had better meet all tokens before the next ones do: as few parts as there
    can be, of whole groups and about the same size."""
    return pairs_of_a_part(columns, -(-columns // _MOST_COLUMNS))


def rows_of_a_turn(rows: int, columns: int, length: int, cores: int) -> int:
    """Whole panels, and whole vectors of results."""
    return _MANY_ROWS


_ONE, _TWO, _THREE, _FOUR = (add_pair_products(count) for count in range(1, MOST_TILES + 1))


@njit(nogil=True, cache=True, boundscheck=False)
def few_in_turns(counters, number, rows, x, bias, adds, out, pitch):  # type: ignore[no-untyped-def]
    """As ``few_tokens`` of all rows, of which the counter ``number`` says how many are taken."""
    count = rows[0].shape[0] // rows[1]
    first = take(counters, U(number), _FEW_ROWS)
    while first < count:
        last = min(first + _FEW_ROWS, count)
        few_tokens(rows, first, last, x, bias, adds, out, pitch)
        first = take(counters, U(number), _FEW_ROWS)


@njit(nogil=True, cache=True)
def few_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(few_in_turns, arguments, threads)


@njit(nogil=True, cache=True, boundscheck=False)
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
    [all rows] unless it is empty, as ``put_sums`` has it. The counter ``number`` says how many rows
    are taken, ``most`` at a time, and the third one how many are done. Rows are as ``extent_of``
    has them. Tokens lie in tiles, ``length`` columns of all of them, then the next ones; of a tile
    a column's sixteen side by side."""
    count, columns = extent_of(rows)
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    sums = np.empty(num_tiles * most * WIDTH, np.float32)
    panel = np.zeros(ROWS * length, np.uint32)
    turned = np.empty(WIDTH * WIDTH, np.float32)
    first = take(counters, U(number), most)
    while first < count:
        height = min(most, count - first)
        sums[:] = F(0.0)
        for begin in range(0, columns, length):
            width = min(length, columns - begin)
            for row in range(0, height, ROWS):
                part = first + row, min(ROWS, height - row), begin, width
                _add_rows(rows, part, panel, length, tiles, num_tiles, sums, row, most)
        own_bias = bias[first : first + height]
        put_sums(sums, most, tokens, height, own_bias, adds, out[first:], pitch, turned)
        take(counters, U(2), height)
        first = take(counters, U(number), most)


@njit(nogil=True, cache=True)
def many_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(many_in_turns, arguments, threads)


def _add_rows(  # type: ignore[no-untyped-def]
    rows, part, panel, length, tiles, num_tiles, sums, row, most
) -> None:
    """ROWS rows or fewer, as they lie or else laid in a panel, as ``_add_panel`` has it; a part is
    the first row, how many, the first pair, how many."""


@overload(_add_rows, jit_options={"nogil": True, "boundscheck": False})
def _add_rows_of(rows, part, panel, length, tiles, num_tiles, sums, row, most):  # type: ignore[no-untyped-def]
    return _add_pairs if kind_of(rows) is PairRows else _add_compressed


def _add_pairs(rows, part, panel, length, tiles, num_tiles, sums, row, most):  # type: ignore[no-untyped-def]
    (flat, columns), (top, height, begin, width) = rows, part
    at = top * columns + begin
    if height == ROWS:
        _add_panel(flat, at, columns, tiles, begin, width, num_tiles, sums, row, most)
        return
    for own in range(height):
        for column in range(width):
            panel[U(own * length + column)] = flat[U(at + own * columns + column)]
    _add_panel(panel, 0, length, tiles, begin, width, num_tiles, sums, row, most)


def _add_compressed(rows, part, panel, length, tiles, num_tiles, sums, row, most):  # type: ignore[no-untyped-def]
    top, height, begin, width = part
    lay_rows(rows, top, height, 2 * begin, 2 * width, panel, 0, length, WIDTH, ROWS)
    _add_panel(panel, 0, length, tiles, begin, width, num_tiles, sums, row, most)


@njit(nogil=True, cache=True, boundscheck=False)
def _add_panel(rows, start, pitch, tiles, begin, width, num_tiles, sums, row, most):  # type: ignore[no-untyped-def]
    """``width`` columns of ROWS rows times those of all tiles, to sums [tiles, rows of a turn, 16]
    from ``row`` on. Tiles are met by groups that differ by one tile at most."""
    first, wide = U(start), U(pitch)
    apart, count, sums_apart = U(width * WIDTH), U(width), U(most * WIDTH)
    ahead = wide * U(ROWS)
    groups = (num_tiles + MOST_TILES - 1) // MOST_TILES
    for group in range(groups):
        tile = num_tiles * group // groups
        together = num_tiles * (group + 1) // groups - tile
        at = U((begin * num_tiles + tile * width) * WIDTH)
        own = U((tile * most + row) * WIDTH)
        if together == 4:
            _FOUR(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
        elif together == 3:
            _THREE(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
        elif together == 2:
            _TWO(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
        else:
            _ONE(rows, first, wide, ahead, tiles, at, apart, count, sums, own, sums_apart)
