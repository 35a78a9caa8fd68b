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
from freight.kernels.llvm import FLOATS, WIDTH, WORD, address_of, pair_products, splat
from freight.kernels.pair_blocks import ROWS as PANEL_ROWS
from freight.kernels.pair_blocks import add_pair_products
from freight.kernels.vectors import splat as repeat
from freight.kernels.vectors import store

__all__ = [
    "ROWS",
    "TILES",
    "add_products",
    "add_sums",
    "begin_sums",
    "configure",
    "end_sums",
    "put_products",
    "put_scores",
    "release",
]

ROWS: Final = 5 * PANEL_ROWS
"""Of a panel of queries."""
TILES: Final = 2
_INDEX = types.uintp
_ROWS_AT_ONCE: Final = 8
_QUERIES_AT_ONCE: Final = 4
_TILES_AT_ONCE: Final = 2
"""Enough sums to be added to in turn: each waits for what was added to it before. With more, where
they begin takes registers that are wanted."""
_SQUARE: Final = WIDTH * WIDTH
_INT: Final = np.uintp
_ZERO: Final = np.float32(0.0)
_TWO: Final = add_pair_products(TILES)


@njit(nogil=True, cache=True)
def configure():  # type: ignore[no-untyped-def]
    """Nothing: these registers need no leave."""


@njit(nogil=True, cache=True)
def release():  # type: ignore[no-untyped-def]
    """Nothing."""


@uncounted
def add_products(rows, start, pitch, x, at, apart, count, sums, place, sums_apart):  # type: ignore[no-untyped-def]
    """Add to sums[place + 16 r + i] the products of rows[start + pitch r + k] and x[at + 16 k + i],
    over ``count`` pairs k, whole sixteens, for sixteen i and ROWS rows r. Of a second tile, x lies
    ``apart``, and sums ``sums_apart``."""
    for row in range(0, ROWS, PANEL_ROWS):
        first, own = start + _INT(row) * pitch, place + _INT(row * WIDTH)
        _TWO(rows, first, pitch, _INT(0), x, at, apart, count, sums, own, sums_apart)


@uncounted
def put_products(rows, start, pitch, x, at, apart, count, sums, place, sums_apart):  # type: ignore[no-untyped-def]
    """The same in place of what is there."""
    for row in range(ROWS):
        store(sums, place + _INT(row * WIDTH), repeat(_ZERO))
        store(sums, place + sums_apart + _INT(row * WIDTH), repeat(_ZERO))
    add_products(rows, start, pitch, x, at, apart, count, sums, place, sums_apart)


class _Step:
    """One step's arguments, and what addresses them."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder = builder
        self._context, self._kinds, self._arguments = context, signature.args, arguments

    def whole(self, value: int) -> Any:
        return ir.Constant(self._context.get_value_type(_INDEX), value)

    def sixteen(self, number: int, index: Any) -> Any:
        """Where sixteen floats begin in the array that is argument ``number``."""
        return self.builder.bitcast(self._address(number, index), FLOATS.as_pointer())

    def pairs(self, number: int, index: Any) -> Any:
        """Where pairs begin there."""
        return self.builder.bitcast(self._address(number, index), WORD.as_pointer())

    def _address(self, number: int, index: Any) -> Any:
        array, kind = self._arguments[number], self._kinds[number]
        return address_of(self._context, self.builder, kind, array, index)

    def sixteen_times(self, pairs: Any, index: Any) -> Any:
        """One of the pairs that begin there."""
        builder = self.builder
        pair = builder.load(builder.gep(pairs, [index]), align=2)
        return splat(builder, builder.bitcast(pair, FLOATS.element))


@intrinsic
def put_scores(context, rows, at, stride, pairs, blocks, scores, place):  # type: ignore[no-untyped-def]
    """scores[place + 16 r + i] = the products of sixteen rows of bfloat16, which begin at rows[at]
    and are ``stride`` apart, and sixteen columns i of pairs [16 blocks, 16]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, apart, _, count, _, to = arguments
        own = _Step(context, builder, signature, arguments)
        columns = own.sixteen(3, own.whole(0))
        for first in range(0, WIDTH, _ROWS_AT_ONCE):
            numbers = range(first, first + _ROWS_AT_ONCE)
            some = [
                own.pairs(0, builder.add(start, builder.mul(apart, own.whole(row))))
                for row in numbers
            ]
            sums = [cgutils.alloca_once(builder, FLOATS) for _ in numbers]
            for kept in sums:
                builder.store(ir.Constant(FLOATS, [0.0] * WIDTH), kept)
            with cgutils.for_range(builder, builder.mul(count, own.whole(WIDTH))) as loop:
                column = builder.load(builder.gep(columns, [loop.index]), align=4)
                for row, kept in zip(some, sums, strict=True):
                    factor = own.sixteen_times(row, loop.index)
                    found = pair_products(builder, builder.load(kept), factor, column)
                    builder.store(found, kept)
            for row, kept in zip(numbers, sums, strict=True):
                target = own.sixteen(5, builder.add(to, own.whole(row * WIDTH)))
                builder.store(builder.load(kept), target, align=4)
        return context.get_dummy_value()

    kinds = rows, _INDEX, _INDEX, pairs, _INDEX, scores, _INDEX
    return types.none(*kinds), generate


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
def add_sums(context, weights, at, values, tiles, sums, place, queries):  # type: ignore[no-untyped-def]
    """Add the products of sixteen rows of pairs from weights[at] on and sixteen times as many
    columns of values [tiles, 16, 16] to the sums [tiles, 16, 16] from ``place`` on: of the first
    ``queries`` rows, or some more. Tiles are an even number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, _, count, _, first, rows = arguments
        own = _Step(context, builder, signature, arguments)
        zero = own.whole(0)
        tile_step, row_step = own.whole(_TILES_AT_ONCE), own.whole(_QUERIES_AT_ONCE)
        with cgutils.for_range_slice(builder, zero, count, tile_step) as (tile, _):
            begun = builder.mul(tile, own.whole(_SQUARE))
            some = [
                own.sixteen(2, builder.add(begun, own.whole(number * _SQUARE)))
                for number in range(_TILES_AT_ONCE)
            ]
            with cgutils.for_range_slice(builder, zero, rows, row_step) as (row, _):
                line = builder.mul(row, own.whole(WIDTH))
                factors, kept = [], []
                for query in range(_QUERIES_AT_ONCE):
                    own_line = builder.add(line, own.whole(query * WIDTH))
                    factors.append(own.pairs(0, builder.add(start, own_line)))
                    for number in range(_TILES_AT_ONCE):
                        target = builder.add(builder.add(first, begun), own_line)
                        target = own.sixteen(4, builder.add(target, own.whole(number * _SQUARE)))
                        kept.append((target, cgutils.alloca_once(builder, FLOATS)))
                for target, sum_ in kept:
                    builder.store(builder.load(target, align=4), sum_)
                with cgutils.for_range(builder, own.whole(WIDTH)) as loop:
                    columns = [
                        builder.load(builder.gep(tile_, [loop.index]), align=4) for tile_ in some
                    ]
                    for query, pairs in enumerate(factors):
                        factor = own.sixteen_times(pairs, loop.index)
                        for number, column in enumerate(columns):
                            _, sum_ = kept[query * _TILES_AT_ONCE + number]
                            found = pair_products(builder, builder.load(sum_), factor, column)
                            builder.store(found, sum_)
                for target, sum_ in kept:
                    builder.store(builder.load(sum_), target, align=4)
        return context.get_dummy_value()

    kinds = weights, _INDEX, values, _INDEX, sums, _INDEX, _INDEX
    return types.none(*kinds), generate


@njit(nogil=True, cache=True)
def end_sums(sums, place, tiles):  # type: ignore[no-untyped-def]
    """Nothing: they are there."""
