"""Loops over rows times many tokens in registers of sixteen by sixteen, which numba compiles.
Threads that call them with the same counters take turns.

Rows and tokens are as ``tile_loops`` has them. A block of rows is laid once, in a core's second
cache, and all tokens pass by: some columns of thirty-two of them at a time lie in the nearest cache
and meet all rows of the block, which come through it without staying, while the tokens' next
columns are brought to the second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from freight.kernels.cache_lines import whole_lines, zero_lines
from freight.kernels.code_lines import extent_of, pairs_of_a_part
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.lines import as_kept, put_line, put_turned
from freight.kernels.open_mp import call_together
from freight.kernels.product_loops import put_sums
from freight.kernels.row_kinds import FourRows, kind_of
from freight.kernels.sums import ADDS, GATES, PUTS
from freight.kernels.tile_loops import MOST_TOKENS, lay_panel, scale_sums
from freight.kernels.tile_registers import (
    INTEGERS,
    PAIRS,
    ROWS,
    TILES,
    block_products,
    configure,
    release,
)
from freight.kernels.token_loops import silu
from freight.kernels.turns import take
from freight.kernels.vectors import WIDTH, add, load, multiply, splat, store, transpose

__all__ = [
    "FEWEST_TOKENS",
    "FEWEST_TOKENS_OF_CODES",
    "FEWEST_TOKENS_OF_INTEGERS",
    "columns_together",
    "many_in_turns",
    "many_together",
    "rows_of_a_turn",
]

U = np.uintp
F = np.float32
FEWEST_TOKENS = MOST_TOKENS + 1
FEWEST_TOKENS_OF_CODES = 96
FEWEST_TOKENS_OF_INTEGERS = 1024
"""From which on plain rows, compressed ones, and integers multiplied as such, had better be laid in
blocks: laying rows that are read as they are takes as long as they take from memory."""
_MOST_ROWS = 256
_FEWEST_ROWS = 2 * ROWS
_KEPT = 1 << 18
"""Pairs of a block's rows: half of a core's second cache."""
_COLUMNS = 256
"""Pairs of the tokens that lie in the nearest cache."""
_TURNS = 2
_SQUARE = U(WIDTH * WIDTH)


def columns_together(columns: int, tokens: int) -> int:
    """Pairs of a row that meet all tokens before the next ones do."""
    return pairs_of_a_part(columns, -(-columns * _MOST_ROWS // _KEPT))


def rows_of_a_turn(rows: int, columns: int, length: int, cores: int) -> int:
    """As many rows as stay in the second cache, ``length`` pairs of each at a time, but enough
    turns for all cores: whole panels, also of either half where one gates the other."""
    most = min(_KEPT // min(length, columns) // _FEWEST_ROWS * _FEWEST_ROWS, _MOST_ROWS)
    fair = rows // (_TURNS * cores) // _FEWEST_ROWS * _FEWEST_ROWS
    return max(min(fair, most), _FEWEST_ROWS)


_ONE, _TWO, _ADD_ONE, _ADD_TWO = (
    block_products(count, PAIRS, adds=adds) for adds in (False, True) for count in (1, TILES)
)
_ONE_OF_INTEGERS, _TWO_OF_INTEGERS, _ADD_ONE_OF_INTEGERS, _ADD_TWO_OF_INTEGERS = (
    block_products(count, INTEGERS, adds=adds) for adds in (False, True) for count in (1, TILES)
)


@njit(nogil=True, cache=True, boundscheck=False)
def many_in_turns(  # type: ignore[no-untyped-def]
    counters,
    number,
    most,
    rows,
    tiles,
    tokens,
    length,
    bias,
    adds,
    out,
    pitch,
    gate,
    gate_bias,
    is_gated,
):
    """As ``pair_loops`` has it; where it ``is_gated``, the products of the rows times the silu of
    those of as many rows of a ``gate``, of the same kind or another: half of ``most`` are of
    either. One loop for both, for it takes seconds to compile."""
    count, columns = extent_of(rows)
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    is_whole = length >= columns
    turn = most // 2 // ROWS * ROWS if is_gated else most
    block = zero_lines(most * length)
    sums = whole_lines((TILES if is_whole else num_tiles) * most * WIDTH)
    apart = 0 if is_whole else TILES * most * WIDTH
    turned = whole_lines(TILES * WIDTH * WIDTH)
    configure()
    first = take(counters, U(number), turn)
    while first < count:
        height = min(turn, count - first)
        shift = (height + ROWS - 1) // ROWS * ROWS if is_gated else 0
        own_bias, own_gate_bias = bias[first : first + height], gate_bias[first : first + height]
        how = PUTS if is_gated else adds  # what is gated has been multiplied by then
        results = most, height, shift, own_gate_bias, own_bias, how, out[first:], pitch, turned
        for begin in range(0, columns, length):
            width = min(length, columns - begin)
            if is_gated:
                _lay_block(gate, first, height, begin, width, block)
            _lay_block(rows, first, height, begin, width, block[shift * width :])
            is_last = begin + length >= columns
            for tile in range(0, num_tiles, TILES):
                own = sums[tile // TILES * apart :]
                at = begin, width, tile, num_tiles
                _add_block(rows, block, shift + height, tiles, at, own, most)
                if is_last:
                    for row in range(0, height, ROWS):
                        _put_panel(rows, first, own, row, tile, tokens, results)
        take(counters, U(2), 2 * height if is_gated else height)
        first = take(counters, U(number), turn)
    release()


@njit(nogil=True, cache=True)
def many_together(threads, *arguments):  # type: ignore[no-untyped-def]
    """The same on so many of OpenMP's threads."""
    call_together(many_in_turns, arguments, threads)


@uncounted
def _lay_block(rows, first, height, begin, width, block):  # type: ignore[no-untyped-def]
    """Columns of so many rows, in strips of sixteen."""
    for row in range(0, height, WIDTH):
        some = min(WIDTH, height - row)
        part = first + row, some, begin, width, WIDTH
        lay_panel(rows, part, 0, some, 0, block[row * width :], WIDTH)


@uncounted
def _put_panel(rows, first, sums, row, tile, tokens, results):  # type: ignore[no-untyped-def]
    """Results of ROWS rows from ``row`` on, or what there are, and of two tiles: of their sums
    [2, most, 16], and, where they are gated, times the silu of as many rows' that are ``shift``
    before them. The silu is of what is rounded, as it is where that is kept."""
    most, height, shift, gate_bias, bias, adds, out, pitch, turned = results
    some, token = min(ROWS, height - row), tile * WIDTH
    count = min(TILES * WIDTH, tokens - token)
    own = sums[row * WIDTH :]
    own_out = out[token * pitch + row :]
    end = tile + (count + WIDTH - 1) // WIDTH
    scale_sums(rows, first + row, some, own, most, tile, end)
    own_bias = bias[row : row + some]
    if shift:
        own_gate_bias = gate_bias[row : row + some]
        for begin in range(0, count, WIDTH):
            for k in range(some):
                place = U(begin * most + k * WIDTH)
                gate, by = load(own, place), load(own, place + U(shift * WIDTH))
                if gate_bias.shape[0]:
                    gate = add(gate, splat(own_gate_bias[k]))
                if bias.shape[0]:
                    by = add(by, splat(own_bias[k]))
                store(own, place, multiply(by, silu(as_kept(gate))))
        own_bias = own_bias[:0]
    _put_lines(own, most, count, some, own_bias, adds, own_out, pitch, turned)


def _put_lines(
    sums: Any,
    most: Any,
    tokens: Any,
    height: Any,
    bias: Any,
    adds: Any,
    out: Any,
    pitch: Any,
    turned: Any,
) -> None:
    """As ``put_sums``; where whole lines of bfloat16 become of them, these go by the caches."""


@overload(_put_lines, jit_options=UNCOUNTED)
def _put_lines_of(sums, most, tokens, height, bias, adds, out, pitch, turned):  # type: ignore[no-untyped-def]
    return _put_whole_lines if out.dtype is types.uint16 else _put_any


def _put_any(sums, most, tokens, height, bias, adds, out, pitch, turned):  # type: ignore[no-untyped-def]
    put_sums(sums, most, tokens, height, bias, adds, out, pitch, turned)


def _put_whole_lines(sums, most, tokens, height, bias, adds, out, pitch, turned):  # type: ignore[no-untyped-def]
    begins_lines = out.ctypes.data % 64 == 0 and pitch % ROWS == 0
    if height < ROWS or adds == GATES or not begins_lines:
        put_sums(sums, most, tokens, height, bias, adds, out, pitch, turned)
        return
    for begin in range(0, tokens, WIDTH):
        count = min(WIDTH, tokens - begin)
        start, place = U(begin * most), U(begin * pitch)
        if bias.shape[0]:
            for row in range(ROWS):
                own = start + U(row * WIDTH)
                store(sums, own, add(load(sums, own), splat(bias[row])))
        if adds == PUTS and count == WIDTH:
            put_turned(sums, start, out, place, U(pitch))
            continue
        transpose(sums, start, U(WIDTH), turned, U(0))
        transpose(sums, start + _SQUARE, U(WIDTH), turned, _SQUARE)
        for token in range(count):
            at, own = place + U(token * pitch), U(token * WIDTH)
            low, high = load(turned, own), load(turned, own + _SQUARE)
            if adds == ADDS:
                low, high = add(low, load(out, at)), add(high, load(out, at + U(WIDTH)))
            put_line(out, at, low, high)


@uncounted
def _add_block(rows, block, height, tiles, at, sums, most):  # type: ignore[no-untyped-def]
    """A block's rows times two tiles, or the last one, to sums [2, most, 16]: columns ``at`` (the
    first one, how many, the first tile, how many tiles there are); sums of the first columns are
    begun."""
    begin, width, tile, num_tiles = at
    panels = (height + ROWS - 1) // ROWS
    start, is_two = (begin * num_tiles + tile * width) * WIDTH, tile + 1 < num_tiles
    apart, sums_apart = U(width * WIDTH), U(most * WIDTH)
    for column in range(0, width, _COLUMNS):
        some = min(_COLUMNS, width - column)
        # What comes next: further columns of the same tiles, or the first ones of the next two.
        coming = column + some if column + some < width else TILES * width
        steps = panels * (some // WIDTH)
        lines = (min(_COLUMNS, width) + steps - 1) // steps
        is_first = begin + column == 0
        for panel in range(panels):
            row = panel * ROWS
            ahead = start + (coming + panel * lines * (some // WIDTH)) * WIDTH
            own = (
                *(block, U(row * width + column * WIDTH), tiles, U(start + column * WIDTH), apart),
                *(U(some), sums, U(row * WIDTH), sums_apart, U(ahead), U(lines)),
            )
            _multiply(rows, is_two, is_first, own)


def _multiply(rows: Any, is_two: Any, is_first: Any, own: Any) -> None:
    """What ``block_products`` makes, for two tiles or one, of what the rows are."""


@overload(_multiply, jit_options=UNCOUNTED)
def _multiply_of(rows, is_two, is_first, own):  # type: ignore[no-untyped-def]
    if kind_of(rows) is FourRows:
        one, two = _ONE_OF_INTEGERS, _TWO_OF_INTEGERS
        add_one, add_two = _ADD_ONE_OF_INTEGERS, _ADD_TWO_OF_INTEGERS
    else:
        one, two, add_one, add_two = _ONE, _TWO, _ADD_ONE, _ADD_TWO

    def multiply(rows, is_two, is_first, own):  # type: ignore[no-untyped-def]
        block, start, x, at, apart, count, sums, place, sums_apart, ahead, lines = own
        if is_two and is_first:
            two(block, start, x, at, apart, count, sums, place, sums_apart, ahead, lines)
        elif is_two:
            add_two(block, start, x, at, apart, count, sums, place, sums_apart, ahead, lines)
        elif is_first:
            one(block, start, x, at, apart, count, sums, place, sums_apart, ahead, lines)
        else:
            add_one(block, start, x, at, apart, count, sums, place, sums_apart, ahead, lines)

    return multiply
