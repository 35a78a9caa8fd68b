"""Loops over rows of bfloat16 times tokens of bfloat16, and over rows of 8-bit integers times such
tokens, in registers of sixteen by sixteen, which numba compiles. Threads that call them with the
same counters take turns.

Arrays of uint32 hold pairs of neighbours, or fours of integers. Tokens lie sixteen side by side; of
rows, which are read as they lie, some columns of ROWS are laid together in the nearest cache and
meet all tokens, and the next ones are laid meanwhile: what loads them waits for memory while
registers multiply. Sums of pairs are float32, those of integers whole and exact until they are
scaled; results are rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.cache_lines import whole_lines, zero_lines
from freight.kernels.code_lines import extent_of, lay_rows, pairs_of_a_part
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.open_mp import call_together
from freight.kernels.product_loops import put_sums
from freight.kernels.row_kinds import FourRows, PairRows, kind_of
from freight.kernels.tile_registers import (
    INTEGERS,
    PAIRS,
    ROWS,
    TILES,
    add_tile_products,
    configure,
    has_integers,
    release,
)
from freight.kernels.turns import take
from freight.kernels.vectors import WIDTH, load, multiply, splat, store, whole_numbers

__all__ = [
    "FEW_TOKENS_OF_CODES",
    "HAS_INTEGERS",
    "MOST_TOGETHER",
    "MOST_TOKENS",
    "columns_together",
    "lay_panel",
    "many_in_turns",
    "many_together",
    "rows_of_a_turn",
    "scale_sums",
]

U = np.uintp
F = np.float32
HAS_INTEGERS = has_integers()
"""Whether rows and tokens may be 8-bit integers."""
MOST_TOGETHER = 256
"""Tokens that are multiplied at once."""
MOST_TOKENS = MOST_TOGETHER
"""Up to which rows had better be multiplied so."""
FEW_TOKENS_OF_CODES = 4
"""Up to which codes had better be multiplied as they are."""
_PANEL_COLUMNS = 128
_FEW_TILES = 4
"""Up to so many, rows are waited for whatever is fetched, and fetching them takes time."""
_PANEL = ROWS * _PANEL_COLUMNS
"""Pairs of a panel: with as many of two tiles they stay in the nearest cache."""
_KEPT = 1 << 18
"""Pairs of the tokens that stay in a core's own cache."""
_FEWEST_ROWS = 64
_MOST_ROWS = 512
_TURNS = 2
"""Of each core, at least, where there are rows enough."""

_ONE, _TWO = (add_tile_products(count, PAIRS) for count in range(1, TILES + 1))
_ONE_OF_INTEGERS, _TWO_OF_INTEGERS = (
    add_tile_products(count, INTEGERS) for count in range(1, TILES + 1)
)


def columns_together(columns: int, tokens: int) -> int:
    """Pairs of a row that had better meet all tokens before the next ones do."""
    most = _KEPT // (-(-tokens // WIDTH) * WIDTH)
    return pairs_of_a_part(columns, -(-columns // most))


def rows_of_a_turn(rows: int, columns: int, length: int, cores: int) -> int:
    """Where tokens meet the rows of a turn in parts, ``length`` columns at a time, and come into a
    core's cache again for the next turn, more rows."""
    if length >= columns:
        return _FEWEST_ROWS
    fair = rows // (_TURNS * cores) // ROWS * ROWS
    return min(max(fair, _FEWEST_ROWS), _MOST_ROWS)


@njit(nogil=True, cache=True, boundscheck=False)
def many_in_turns(counters, number, most, rows, tiles, tokens, length, bias, adds, out, pitch):  # type: ignore[no-untyped-def]
    """As ``pair_loops`` has it."""
    count, columns = extent_of(rows)
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    sums = whole_lines(num_tiles * most * WIDTH)
    panel, next_panel = zero_lines(_PANEL), zero_lines(_PANEL)
    turned = whole_lines(WIDTH * WIDTH)
    configure()
    first = take(counters, U(number), most)
    if first < count:
        height = min(ROWS, count - first)
        width = min(_PANEL_COLUMNS, length, columns)
        lay_panel(rows, (first, height, 0, width, ROWS), 0, height, 0, panel, ROWS)
    while first < count:
        next_first = take(counters, U(number), most)
        height = min(most, count - first)
        sums[:] = F(0.0)
        for begin in range(0, columns, length):
            width = min(length, columns - begin)
            for row in range(0, height, ROWS):
                for column in range(0, width, _PANEL_COLUMNS):
                    some = min(_PANEL_COLUMNS, width - column)
                    # What comes next: further columns, rows, columns of all rows, or a turn.
                    own_row, own_begin = first + row, begin + column + some
                    left, there = width - column - some, height - row
                    if left == 0 and row + ROWS < height:
                        own_row, own_begin, left, there = own_row + ROWS, begin, width, there - ROWS
                    elif left == 0 and begin + length < columns:
                        own_row, left, there = first, columns - begin - length, height
                    elif left == 0:
                        own_row, own_begin, left = next_first, 0, min(length, columns)
                        there = max(0, count - next_first)
                    # The rows after those, of which a turn's last ones do not know.
                    is_last = first <= own_row < first + height <= own_row + ROWS
                    following = (
                        own_row,
                        min(ROWS, there),
                        own_begin,
                        min(_PANEL_COLUMNS, left, length),
                        next_first - own_row if is_last else ROWS,
                    )
                    place = begin * num_tiles, width, column, some
                    target = sums, row, most
                    _add_panel(panel, tiles, place, num_tiles, target, rows, following, next_panel)
                    panel, next_panel = next_panel, panel
        scale_sums(rows, first, height, sums, most, 0, num_tiles)
        own_bias = bias[first : first + height]
        put_sums(sums, most, tokens, height, own_bias, adds, out[first:], pitch, turned)
        take(counters, U(2), height)
        first = next_first
    release()


@njit(nogil=True, cache=True)
def many_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(many_in_turns, arguments, threads)


def lay_panel(
    rows: Any, part: Any, low: Any, high: Any, begin: Any, panel: Any, together: Any
) -> None:
    """Of a part of the rows (the first row, how many, the first pair, how many, how many rows
    further those lie that come after them) those from number ``low`` to ``high`` as
    ``add_tile_products`` takes them, sixteen pairs of so many ``together``; of pairs the first
    ``begin`` are laid already. Rows that are not there keep what they were, for nobody looks at
    their sums."""


@overload(lay_panel, jit_options=UNCOUNTED)
def _lay_of(rows, part, low, high, begin, panel, together):  # type: ignore[no-untyped-def]
    return _lay_pairs if kind_of(rows) in (PairRows, FourRows) else _lay_compressed


def _lay_pairs(rows, part, low, high, begin, panel, together):  # type: ignore[no-untyped-def]
    flat, pitch = rows[0], rows[1]
    top, _, first, width, _ = part
    for row in range(low, high):
        source, target = U((top + row) * pitch + first), U(row * WIDTH)
        for pair in range(begin, width, WIDTH):
            store(panel, target + U(pair * together), load(flat, source + U(pair)))


def _lay_compressed(rows, part, low, high, begin, panel, together):  # type: ignore[no-untyped-def]
    top, _, first, width, ahead = part
    own = top + low, high - low, 2 * first, 2 * width
    lay_rows(rows, *own, panel, low * WIDTH, WIDTH, together * WIDTH, ahead)


def _laid_meanwhile(rows: Any, part: Any, tiles: Any) -> Any:
    """What the steps of ``add_tile_products`` may lay of a part: (source, where it begins, how far
    rows are apart, how many pairs of each). Nothing of compressed rows: then the source is any."""


@overload(_laid_meanwhile, jit_options=UNCOUNTED)
def _laid_meanwhile_of(rows, part, tiles):  # type: ignore[no-untyped-def]
    are_words = kind_of(rows) in (PairRows, FourRows)
    return _pairs_meanwhile if are_words else _nothing_meanwhile


def _pairs_meanwhile(rows, part, tiles):  # type: ignore[no-untyped-def]
    flat, pitch = rows[0], rows[1]
    top, _, first, width, _ = part
    return flat, U(top * pitch + first), U(pitch), U(width)


def _nothing_meanwhile(rows, part, tiles):  # type: ignore[no-untyped-def]
    return tiles, U(0), U(0), U(0)


@uncounted
def _add_panel(panel, tiles, place, num_tiles, target, rows, following, next_panel):  # type: ignore[no-untyped-def]
    """A panel times the same columns of all tiles, to the target: (sums [tiles, rows of a turn,
    16], the first of the rows, rows of a turn). ``place`` is where the tiles begin that hold these
    columns, how many columns they hold, which of these is the first, and how many they are. Each
    group of tiles lays a share of the ``following`` part of the rows."""
    begin, width, column, some = place
    sums, row, most = target
    source, start, pitch, pairs = _laid_meanwhile(rows, following, tiles)
    groups, height = (num_tiles + TILES - 1) // TILES, following[1]
    ahead = pitch * U(following[4]) if num_tiles > _FEW_TILES else U(0)
    apart, count, sums_apart = U(width * WIDTH), U(some), U(most * WIDTH)
    for group in range(groups):
        tile = TILES * group
        at = U((begin + tile * width + column) * WIDTH)
        to = U((tile * most + row) * WIDTH)
        low, high = height * group // groups, height * (group + 1) // groups
        own = panel, tiles, at, apart, count, sums, to, sums_apart
        meanwhile = next_panel, source, start, pitch, U(low), U(high), pairs, ahead
        _multiply(rows, tile + 1 < num_tiles, own, meanwhile)
        lay_panel(rows, following, low, high, some, next_panel, ROWS)


def _multiply(rows: Any, by_two: Any, own: Any, meanwhile: Any) -> None:
    """What ``add_tile_products`` makes, for two tiles or one, of what the rows are."""


@overload(_multiply, jit_options=UNCOUNTED)
def _multiply_of(rows, by_two, own, meanwhile):  # type: ignore[no-untyped-def]
    are_integers = kind_of(rows) is FourRows
    one, two = (_ONE_OF_INTEGERS, _TWO_OF_INTEGERS) if are_integers else (_ONE, _TWO)

    def multiply(rows, by_two, own, meanwhile):  # type: ignore[no-untyped-def]
        panel, tiles, at, apart, count, sums, to, sums_apart = own
        following, source, start, pitch, low, high, pairs, ahead = meanwhile
        if by_two:
            two(
                *(panel, tiles, at, apart, count, sums, to, sums_apart),
                *(following, source, start, pitch, low, high, pairs, ahead),
            )
        else:
            one(
                *(panel, tiles, at, apart, count, sums, to, sums_apart),
                *(following, source, start, pitch, low, high, pairs, ahead),
            )

    return multiply


def scale_sums(
    rows: Any, first: Any, height: Any, sums: Any, most: Any, begin: Any, end: Any
) -> None:
    """Make numbers of whole sums of the tiles from ``begin`` to ``end``: times the scale of the
    token, then of the row."""


@overload(scale_sums, jit_options=UNCOUNTED)
def _scale_of(rows, first, height, sums, most, begin, end):  # type: ignore[no-untyped-def]
    return _scale_integers if kind_of(rows) is FourRows else _leave


def _scale_integers(rows, first, height, sums, most, begin, end):  # type: ignore[no-untyped-def]
    _, pitch, columns, numbers, token_scales = rows
    for row in range(height):
        row_scale = splat(numbers[U((first + row) * pitch + columns)])
        for tile in range(begin, end):
            place = U(((tile - begin) * most + row) * WIDTH)
            found = multiply(whole_numbers(sums, place), load(token_scales, U(tile * WIDTH)))
            store(sums, place, multiply(found, row_scale))


def _leave(rows, first, height, sums, most, begin, end):  # type: ignore[no-untyped-def]
    return None
