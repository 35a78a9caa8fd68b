"""Blocks of a product of pairs of bfloat16 whose sums stay in registers: by an instruction that
multiplies sixteen pairs at once, where the processor has one."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import (
    FLOAT,
    FLOATS,
    WIDTH,
    address_of,
    constant,
    fetch,
    pair_products,
    splat,
)

__all__ = ["MOST_TILES", "ROWS", "add_pair_products"]

ROWS: Final = 6
MOST_TILES: Final = 4
"""Times sixteen tokens. With so many rows, sums, and the tokens that a row's pair meets, fill the
registers; a block with as many sums and more rows is half as fast, as it has no place for where
they begin."""

_INDEX = types.uintp


def add_pair_products(num_tiles: int, *, begins: bool = False) -> Any:
    """What adds to sums[place + 16 r + i] the products of rows[start + pitch r + k] and
    x[at + 16 k + i], over ``count`` pairs k, for sixteen tokens i, and ROWS rows r. Of further
    tiles, x lies ``apart``, and sums ``sums_apart``. Sums are float32; where they ``begin`` what is
    there does not count."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, pitch, ahead, _, at, apart, count, _, place, sums_apart = arguments

        def begin(number: int, index: Any) -> Any:
            return address_of(context, builder, signature.args[number], arguments[number], index)

        def whole(value: int) -> Any:
            return ir.Constant(pitch.type, value)

        def sixteen(own: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(own, [index]), FLOATS.as_pointer())

        own_rows = [
            begin(0, builder.add(start, builder.mul(pitch, whole(row)))) for row in range(ROWS)
        ]
        tiles, kept = [], {}
        for tile in range(num_tiles):
            tiles.append(begin(4, builder.add(at, builder.mul(apart, whole(tile)))))
            own_sums = begin(8, builder.add(place, builder.mul(sums_apart, whole(tile))))
            for row in range(ROWS):
                given = sixteen(own_sums, whole(WIDTH * row))
                kept[tile, row] = given, cgutils.alloca_once(builder, FLOATS)
        for given, own in kept.values():
            first = constant(FLOAT, 0.0) if begins else builder.load(given, align=4)
            builder.store(first, own)
        with cgutils.for_range(builder, builder.udiv(count, whole(WIDTH))) as line:
            begun = builder.mul(line.index, whole(WIDTH))
            for pairs in own_rows:
                fetch(builder, builder.gep(pairs, [builder.add(begun, ahead)]))
            with cgutils.for_range(builder, whole(WIDTH)) as loop:
                column = builder.add(begun, loop.index)
                token = builder.mul(column, whole(WIDTH))
                values = [builder.load(sixteen(tile, token), align=4) for tile in tiles]
                for row, pairs in enumerate(own_rows):
                    pair = builder.load(builder.gep(pairs, [column]))
                    factor = splat(builder, builder.bitcast(pair, FLOATS.element))
                    for tile, some in enumerate(values):
                        own = kept[tile, row][1]
                        added = pair_products(builder, builder.load(own), factor, some)
                        builder.store(added, own)
        for given, own in kept.values():
            builder.store(builder.load(own), given, align=4)
        return context.get_dummy_value()

    @intrinsic
    def add(context, rows, start, pitch, ahead, x, at, apart, count, sums, place, sums_apart):  # type: ignore[no-untyped-def]
        kinds = rows, _INDEX, _INDEX, _INDEX, x, _INDEX, _INDEX, _INDEX, sums, _INDEX, _INDEX
        return types.none(*kinds), generate

    return add
