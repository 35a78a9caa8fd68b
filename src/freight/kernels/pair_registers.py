"""What queries are attended with, by an instruction that multiplies sixteen pairs of bfloat16 at
once: the same steps as ``tile_registers`` has for registers of sixteen by sixteen. Sums lie in
memory, in the nearest cache, but for those at hand.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.compiled import uncounted
from freight.kernels.llvm import (
    FLOAT,
    FLOATS,
    WIDTH,
    WORD,
    WORDS,
    address_of,
    constant,
    fetch,
    pair_products,
    totals,
)
from freight.kernels.pair_blocks import MOST_TILES, add_pair_products
from freight.kernels.pair_blocks import ROWS as PANEL_ROWS
from freight.kernels.vectors import load, store

__all__ = [
    "FEW",
    "IS_PACED",
    "ROWS",
    "add_products",
    "add_sums",
    "begin_sums",
    "configure",
    "end_sums",
    "lay_weights",
    "put_products",
    "put_scores",
    "release",
]

ROWS: Final = 5 * PANEL_ROWS
"""Of a panel of queries."""
FEW: Final = 8
"""Queries or fewer, of which four at a time are a vector with four tokens."""
IS_PACED: Final = True
"""What will be wanted is fetched line by line beside products, not all of it before them."""
_INDEX = types.uintp
_ROWS_AT_ONCE: Final = 8
_QUERIES_AT_ONCE: Final = 8
_TILES_AT_ONCE: Final = 2
"""Enough sums to be added to in turn: each waits for what was added to it before. With more, where
they begin takes registers that are wanted."""
_SQUARE: Final = WIDTH * WIDTH
_INT: Final = np.uintp
_LEAST_TILES: Final = 2
_ADD_MANY: Final = add_pair_products(MOST_TILES)
_ADD_FEW: Final = add_pair_products(_LEAST_TILES)
_PUT_MANY: Final = add_pair_products(MOST_TILES, begins=True)
_PUT_FEW: Final = add_pair_products(_LEAST_TILES, begins=True)


@njit(nogil=True, cache=True)
def configure():  # type: ignore[no-untyped-def]
    """Nothing: these registers need no leave."""


@njit(nogil=True, cache=True)
def release():  # type: ignore[no-untyped-def]
    """Nothing."""


@uncounted
def _multiply(rows, start, pitch, x, at, apart, count, sums, place, sums_apart, num_tiles, begins):  # type: ignore[no-untyped-def]
    """As many tiles at a time as registers hold, each with all rows: ``add_products``, or where
    sums begin ``put_products``."""
    tile = _INT(0)
    while tile < num_tiles:
        is_whole = tile + _INT(MOST_TILES) <= num_tiles
        own, to = at + tile * apart, place + tile * sums_apart
        for row in range(0, ROWS, PANEL_ROWS):
            first, target = start + _INT(row) * pitch, to + _INT(row * WIDTH)
            ahead, block = _INT(0), (x, own, apart, count, sums, target, sums_apart)
            if is_whole and begins:
                _PUT_MANY(rows, first, pitch, ahead, *block)
            elif is_whole:
                _ADD_MANY(rows, first, pitch, ahead, *block)
            elif begins:
                _PUT_FEW(rows, first, pitch, ahead, *block)
            else:
                _ADD_FEW(rows, first, pitch, ahead, *block)
        tile += _INT(MOST_TILES if is_whole else _LEAST_TILES)


@uncounted
def add_products(rows, start, pitch, x, at, apart, count, sums, place, sums_apart, num_tiles):  # type: ignore[no-untyped-def]
    """Add to sums[place + 16 r + i] the products of rows[start + pitch r + k] and x[at + 16 k + i],
    over ``count`` pairs k, whole sixteens, for sixteen i and ROWS rows r. Of further tiles, an even
    number of them, x lies ``apart``, and sums ``sums_apart``."""
    _multiply(rows, start, pitch, x, at, apart, count, sums, place, sums_apart, num_tiles, False)


@uncounted
def put_products(rows, start, pitch, x, at, apart, count, sums, place, sums_apart, num_tiles):  # type: ignore[no-untyped-def]
    """The same in place of what is there."""
    _multiply(rows, start, pitch, x, at, apart, count, sums, place, sums_apart, num_tiles, True)


class _Step:
    """One step's arguments, and what addresses them."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder = builder
        self._context, self._kinds, self._arguments = context, signature.args, arguments

    def whole(self, value: int) -> Any:
        return ir.Constant(self._context.get_value_type(_INDEX), value)

    def sixteen(self, number: int, index: Any) -> Any:
        """Where sixteen floats begin in the array that is argument ``number``."""
        return self.builder.bitcast(self.address(number, index), FLOATS.as_pointer())

    def pairs(self, number: int, index: Any) -> Any:
        """Where pairs begin there."""
        return self.builder.bitcast(self.address(number, index), WORD.as_pointer())

    def address(self, number: int, index: Any) -> Any:
        array, kind = self._arguments[number], self._kinds[number]
        return address_of(self._context, self.builder, kind, array, index)

    def rows(self, start: Any, apart: Any, first: int) -> list[Any]:
        """Where some rows begin, from number ``first`` on."""
        builder = self.builder
        return [
            self.pairs(0, builder.add(start, builder.mul(apart, self.whole(row))))
            for row in range(first, first + _ROWS_AT_ONCE)
        ]

    def sums(self, count: int) -> list[Any]:
        """So many, in registers, that begin."""
        found = [cgutils.alloca_once(self.builder, FLOATS) for _ in range(count)]
        for kept in found:
            self.builder.store(constant(FLOAT, 0.0), kept)
        return found

    def add_products(self, kept: Any, factor: Any, column: Any) -> None:
        found = pair_products(self.builder, self.builder.load(kept), factor, column)
        self.builder.store(found, kept)

    def fetch_line(self, ahead: Any, number: Any) -> None:
        """The line of this number of those that follow each other ``ahead``."""
        place = self.builder.add(ahead, self.builder.mul(number, self.whole(2 * WIDTH)))
        fetch(self.builder, self.address(0, place), near=False)

    def sixteen_times(self, pairs: Any, index: Any) -> Any:
        """One of the pairs that begin there, again and again."""
        builder = self.builder
        one = builder.load(builder.gep(pairs, [index]), align=2)
        vector = builder.insert_element(ir.Constant(WORDS, ir.Undefined), one, ir.Constant(WORD, 0))
        vector = builder.shuffle_vector(vector, vector, constant(WORD, 0))
        return builder.bitcast(vector, FLOATS)

    def four_times(self, pairs: Any, index: Any) -> Any:
        """Four of them, from number 4 ``index`` on, again and again."""
        builder, fours = self.builder, ir.VectorType(WORD, 4)
        place = builder.gep(pairs, [builder.mul(index, self.whole(4))])
        some = builder.load(builder.bitcast(place, fours.as_pointer()), align=2)
        lanes = ir.Constant(WORDS, [*range(4)] * 4)
        return builder.bitcast(builder.shuffle_vector(some, some, lanes), FLOATS)


@intrinsic
def _put_scores(context, rows, at, stride, pairs, blocks, scores, place, ahead):  # type: ignore[no-untyped-def]
    """scores[place + 16 r + i] = the products of sixteen rows of bfloat16, which begin at rows[at]
    and are ``stride`` apart, and sixteen columns i of pairs [16 blocks, 16]. As many rows are
    fetched that follow each other ``ahead``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, apart, _, blocks, _, to, ahead = arguments
        own = _Step(context, builder, signature, arguments)
        columns = own.sixteen(3, own.whole(0))
        count = builder.mul(blocks, own.whole(WIDTH))
        for first in range(0, WIDTH, _ROWS_AT_ONCE):
            some, sums = own.rows(start, apart, first), own.sums(_ROWS_AT_ONCE)
            with cgutils.for_range(builder, count) as loop:
                column = builder.load(builder.gep(columns, [loop.index]), align=4)
                for row, kept in zip(some, sums, strict=True):
                    own.add_products(kept, own.sixteen_times(row, loop.index), column)
                # One line for so many products: all of them at once would wait for memory.
                if first == 0:
                    own.fetch_line(ahead, loop.index)
            for number, kept in enumerate(sums, first):
                target = own.sixteen(5, builder.add(to, own.whole(number * WIDTH)))
                builder.store(builder.load(kept), target, align=4)
        return context.get_dummy_value()

    kinds = rows, _INDEX, _INDEX, pairs, _INDEX, scores, _INDEX, _INDEX
    return types.none(*kinds), generate


def _scores_in_fours(vectors: int) -> Any:
    """What makes scores[place + 4 n r + 4 i + t] the products of row 4 r + t, of sixteen, and of
    the column i of n, four for each of so many ``vectors``, whose pairs lie by fours
    [4 blocks, n, 4]: a vector has four of them of each of four queries. A token's sums are added up
    in the end, and stand side by side. Else as ``_put_scores``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, apart, _, blocks, _, to, ahead = arguments
        own = _Step(context, builder, signature, arguments)
        columns = own.sixteen(3, own.whole(0))
        count = builder.mul(blocks, own.whole(WIDTH // 4))
        for first in range(0, WIDTH, _ROWS_AT_ONCE):
            some = own.rows(start, apart, first)
            sums = [own.sums(_ROWS_AT_ONCE) for _ in range(vectors)]
            with cgutils.for_range(builder, count) as loop:
                begun = builder.mul(loop.index, own.whole(vectors))
                queries = [
                    builder.load(
                        builder.gep(columns, [builder.add(begun, own.whole(number))]), align=4
                    )
                    for number in range(vectors)
                ]
                for place, row in enumerate(some):
                    factor = own.four_times(row, loop.index)
                    for number, column in enumerate(queries):
                        own.add_products(sums[number][place], factor, column)
                turn = builder.add(
                    loop.index, builder.mul(count, own.whole(first // _ROWS_AT_ONCE))
                )
                line = builder.mul(turn, own.whole(2))
                own.fetch_line(ahead, line)
                own.fetch_line(ahead, builder.add(line, own.whole(1)))
            for place in range(0, _ROWS_AT_ONCE, 4):
                for number, kept in enumerate(sums):
                    found = totals(builder, [builder.load(k) for k in kept[place : place + 4]], 4)
                    row = (first + place) // 4 * vectors + number
                    target = own.sixteen(5, builder.add(to, own.whole(row * WIDTH)))
                    builder.store(found, target, align=4)
        return context.get_dummy_value()

    @intrinsic
    def put(context, rows, at, stride, pairs, blocks, scores, place, ahead):  # type: ignore[no-untyped-def]
        kinds = rows, _INDEX, _INDEX, pairs, _INDEX, scores, _INDEX, _INDEX
        return types.none(*kinds), generate

    return put


_PUT_FOUR: Final = _scores_in_fours(1)
_PUT_EIGHT: Final = _scores_in_fours(2)


@uncounted
def put_scores(rows, at, stride, pairs, blocks, scores, place, ahead, fours):  # type: ignore[no-untyped-def]
    """Of sixteen rows by sixteen columns, a token in a vector, or by so many ``fours`` of them,
    with four tokens in a vector."""
    if fours == _INT(0):
        _put_scores(rows, at, stride, pairs, blocks, scores, place, ahead)
    elif fours == _INT(1):
        _PUT_FOUR(rows, at, stride, pairs, blocks, scores, place, ahead)
    else:
        _PUT_EIGHT(rows, at, stride, pairs, blocks, scores, place, ahead)


@uncounted
def lay_weights(room, weights, place):  # type: ignore[no-untyped-def]
    """Sixteen pairs of tokens by sixteen queries, as they are, from ``place`` on."""
    for pair in range(WIDTH):
        own = _INT(pair * WIDTH)
        store(weights, place + own, load(room, own))


@intrinsic
def begin_sums(context, sums, place, tiles, goes_on):  # type: ignore[no-untyped-def]
    """The sums [tiles, 16, 16] from ``place`` on are 0, unless they go on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, first, count, is_more = arguments
        own = _Step(context, builder, signature, arguments)
        with builder.if_then(builder.icmp_unsigned("==", is_more, own.whole(0))):
            begun = own.sixteen(0, first)
            with cgutils.for_range(builder, builder.mul(count, own.whole(WIDTH))) as loop:
                target = builder.gep(begun, [loop.index])
                builder.store(ir.Constant(FLOATS, [0.0] * WIDTH), target, align=4)
        return context.get_dummy_value()

    return types.none(sums, _INDEX, _INDEX, _INDEX), generate


@intrinsic
def add_sums(context, weights, at, values, tiles, sums, place, queries, fours):  # type: ignore[no-untyped-def]
    """Add the products of weights [16 pairs, 16 queries] from weights[at] on, or, of so many
    ``fours`` of queries, [8, queries, 2 pairs], and of values [tiles, 16, 16] to the sums
    [tiles, 16, 16] from ``place`` on: of the first ``queries``, or some more. Tiles are an even
    number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, _, count, _, first, rows, vectors = arguments
        own = _Step(context, builder, signature, arguments)
        zero = own.whole(0)
        is_apart = builder.icmp_unsigned("==", vectors, zero)

        def either(apart: Any, together: Any) -> Any:
            return builder.select(is_apart, apart, together)

        pairs_pitch = either(own.whole(2 * WIDTH), builder.mul(vectors, own.whole(8)))
        pair_pitch = either(own.whole(WIDTH), own.whole(1))
        query_pitch = either(own.whole(1), own.whole(2))

        def add(at_once: int, begin: Any, end: Any) -> None:
            step = own.whole(at_once)
            with cgutils.for_range_slice(builder, begin, end, step) as (row, _):
                factors = own.pairs(0, builder.add(start, builder.mul(row, query_pitch)))
                line = builder.add(builder.add(first, begun), builder.mul(row, own.whole(WIDTH)))
                kept = {}
                for query in range(at_once):
                    for number in range(_TILES_AT_ONCE):
                        apart = own.whole(number * _SQUARE + query * WIDTH)
                        target = own.sixteen(4, builder.add(line, apart))
                        kept[query, number] = target, cgutils.alloca_once(builder, FLOATS)
                for target, sum_ in kept.values():
                    builder.store(builder.load(target, align=4), sum_)
                with cgutils.for_range(builder, own.whole(WIDTH // 2)) as loop:
                    for pair in range(2):
                        begins = builder.add(builder.mul(loop.index, own.whole(2)), own.whole(pair))
                        columns = [
                            builder.load(builder.gep(tile_, [begins]), align=4) for tile_ in some
                        ]
                        line = builder.mul(loop.index, pairs_pitch)
                        if pair:
                            line = builder.add(line, pair_pitch)
                        for query in range(at_once):
                            place = builder.add(line, builder.mul(query_pitch, own.whole(query)))
                            factor = own.sixteen_times(factors, place)
                            for number, column in enumerate(columns):
                                own.add_products(kept[query, number][1], factor, column)
                for target, sum_ in kept.values():
                    builder.store(builder.load(sum_), target, align=4)

        tile_step = own.whole(_TILES_AT_ONCE)
        with cgutils.for_range_slice(builder, zero, count, tile_step) as (tile, _):
            begun = builder.mul(tile, own.whole(_SQUARE))
            some = [
                own.sixteen(2, builder.add(begun, own.whole(number * _SQUARE)))
                for number in range(_TILES_AT_ONCE)
            ]
            few = own.whole(_QUERIES_AT_ONCE // 2)
            with builder.if_else(builder.icmp_unsigned(">", rows, few)) as (many, rest):
                with many:
                    add(_QUERIES_AT_ONCE, zero, rows)
                with rest:
                    add(_QUERIES_AT_ONCE // 2, zero, rows)
        return context.get_dummy_value()

    kinds = weights, _INDEX, values, _INDEX, sums, _INDEX, _INDEX, _INDEX
    return types.none(*kinds), generate


@njit(nogil=True, cache=True)
def end_sums(sums, place, tiles):  # type: ignore[no-untyped-def]
    """Nothing: they are there."""
