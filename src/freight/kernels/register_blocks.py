"""Blocks of a product whose sums stay in registers: what is loaded once meets as many numbers as
there is room for sums of. All numbers are multiplied and added in float32. Two arrays of uint32
hold pairs of bfloat16, of which a place counts one."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.features import HAS_WIDE_REGISTERS
from freight.kernels.llvm import (
    FLOAT,
    FLOATS,
    HALF,
    LOADERS,
    WIDTH,
    address_of,
    call,
    constant,
    eight_at,
    fetch,
    joined,
    pair_products,
    put_lanes,
    splat,
    totals,
)

__all__ = [
    "FEW_TOKENS",
    "PANEL_ROWS",
    "ROWS_OF_TOKENS",
    "ROWS_TOGETHER",
    "TILES_TOGETHER",
    "TOKENS_TOGETHER",
    "add_products",
    "add_products_of_tiles",
    "row_by_token",
    "row_by_tokens",
    "rows_by_token",
    "rows_by_token_fetching",
    "rows_by_tokens",
    "rows_by_tokens_fetching",
]

PANEL_ROWS: Final = 12 if HAS_WIDE_REGISTERS else 6
"""Rows whose sums, sixteen of each, stay in registers together: as many as hide how long it takes
to add to one, and no more than there is room for."""
TILES_TOGETHER: Final = 2 if HAS_WIDE_REGISTERS else 1
"""Times sixteen sums of each of those rows: with one, wide registers wait for the numbers of rows,
of which two can be read in the time of two sums."""

ROWS_TOGETHER: Final = 4
"""Rows of which one token's products are taken together, each read where another one is."""
TOKENS_TOGETHER: Final = 4
ROWS_OF_TOKENS: Final = 4 if HAS_WIDE_REGISTERS else 2
"""Of those rows, as many as there are registers for sums with so many tokens."""
FEW_TOKENS: Final = 12 if HAS_WIDE_REGISTERS else 8
"""Up to which products of rows and tokens are faster than panels that meet tiles."""

_FUSED = call("llvm.fma.v16f32", FLOATS)
_TOTAL = call("llvm.vector.reduce.fadd.v16f32", FLOAT, "reassoc")
_INDEX = types.uintp


def _add_products(num_tiles: int) -> Any:
    """What generates ``add_products`` of so many tiles."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pitch, start, apart, count = (arguments[number] for number in (1, 3, 4, 5))
        place, sums_apart = arguments[7], arguments[8]

        def begin(number: int, index: Any) -> Any:
            return address_of(context, builder, signature.args[number], arguments[number], index)

        def sixteen(place: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(place, [index]), FLOATS.as_pointer())

        def at(index: int) -> Any:
            return ir.Constant(pitch.type, index)

        own_rows, tiles, kept = begin(0, at(0)), [], {}
        for tile in range(num_tiles):
            tiles.append(begin(2, builder.add(start, builder.mul(apart, at(tile)))))
            own_sums = begin(6, builder.add(place, builder.mul(sums_apart, at(tile))))
            for row in range(PANEL_ROWS):
                own = cgutils.alloca_once(builder, FLOATS)
                kept[tile, row] = sixteen(own_sums, at(WIDTH * row)), own
        for given, own in kept.values():
            builder.store(builder.load(given, align=4), own)
        with cgutils.for_range(builder, count) as loop:
            column = builder.mul(loop.index, at(WIDTH))
            values = [builder.load(sixteen(tile, column), align=4) for tile in tiles]
            for row in range(PANEL_ROWS):
                index = builder.add(loop.index, builder.mul(pitch, at(row)))
                factor = splat(builder, builder.load(builder.gep(own_rows, [index])))
                for tile, some in enumerate(values):
                    own = kept[tile, row][1]
                    added = _FUSED(context, builder, None, (factor, some, builder.load(own)))
                    builder.store(added, own)
        for given, own in kept.values():
            builder.store(builder.load(own), given, align=4)
        return context.get_dummy_value()

    return generate


@intrinsic
def add_products(context, rows, pitch, x, start, apart, count, sums, place, sums_apart):  # type: ignore[no-untyped-def]
    """sums[place + 16 r + i] += rows[pitch r + k] * x[start + 16 k + i], over ``count`` numbers k,
    sixteen i, and PANEL_ROWS rows r. All are float32. Its sibling has a use for how far tiles, and
    their sums, are apart."""
    kinds = rows, _INDEX, x, _INDEX, _INDEX, _INDEX, sums, _INDEX, _INDEX
    return types.none(*kinds), _add_products(1)


@intrinsic
def add_products_of_tiles(  # type: ignore[no-untyped-def]
    context, rows, pitch, x, start, apart, count, sums, place, sums_apart
):
    """That for TILES_TOGETHER tiles of x. A number of the rows is read once for all of them."""
    kinds = rows, _INDEX, x, _INDEX, _INDEX, _INDEX, sums, _INDEX, _INDEX
    return types.none(*kinds), _add_products(TILES_TOGETHER)


def _dots(num_rows: int, num_tokens: int, *, fetches: bool) -> Any:
    """What generates products of so many rows and tokens."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, start, columns, x, x_start, sums, place, pitch = arguments
        kinds = signature.args

        def at(index: int) -> Any:
            return ir.Constant(start.type, index)

        def load(kind: Any, data: Any, index: Any) -> Any:
            return LOADERS[kind.dtype](context, builder, types.none(kind), (data, index))

        def begin(first: Any, number: int) -> Any:
            return builder.add(first, builder.mul(columns, at(number)))

        kept = {
            (row, token): cgutils.alloca_once_value(builder, constant(FLOAT, 0.0))
            for row in range(num_rows)
            for token in range(num_tokens)
        }
        with cgutils.for_range(builder, builder.udiv(columns, at(WIDTH))) as loop:
            column = builder.mul(loop.index, at(WIDTH))
            tokens = [
                load(kinds[3], x, builder.add(begin(x_start, token), column))
                for token in range(num_tokens)
            ]
            for row in range(num_rows):
                index = builder.add(begin(start, row), column)
                values = load(kinds[0], rows, index)
                if fetches:
                    fetch(
                        builder,
                        address_of(context, builder, kinds[0], rows, begin(index, ROWS_TOGETHER)),
                    )
                for token, some in enumerate(tokens):
                    own = kept[row, token]
                    if kinds[0].dtype == kinds[3].dtype == types.uint32:
                        added = pair_products(builder, builder.load(own), values, some)
                    else:
                        added = _FUSED(context, builder, None, (values, some, builder.load(own)))
                    builder.store(added, own)
        for (row, token), own in kept.items():
            found = _TOTAL(context, builder, None, (ir.Constant(FLOAT, 0.0), builder.load(own)))
            index = builder.add(place, builder.add(builder.mul(pitch, at(row)), at(token)))
            builder.store(found, address_of(context, builder, kinds[5], sums, index))
        return context.get_dummy_value()

    return generate


def _dots_by_halves(num_rows: int, *, fetches: bool) -> Any:
    """That of two rows and four tokens, each row in half of a vector: what is loaded of a token
    meets both, where there are registers for no more sums than theirs. One row has both halves, so
    that its sums are what they are beside any other."""
    num_tokens = TOKENS_TOGETHER

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, start, columns, x, x_start, sums, place, pitch = arguments
        kinds = signature.args

        def at(index: int) -> Any:
            return ir.Constant(start.type, index)

        def begin(first: Any, number: int) -> Any:
            return builder.add(first, builder.mul(columns, at(number)))

        nothing = constant(FLOAT, 0.0)
        kept = [cgutils.alloca_once_value(builder, nothing) for _ in range(num_tokens)]
        own_rows = [begin(start, row % num_rows) for row in range(2)]
        if fetches:
            ahead = [begin(own, ROWS_TOGETHER) for own in own_rows]
        with cgutils.for_range(builder, builder.udiv(columns, at(WIDTH))) as loop:
            column = builder.mul(loop.index, at(WIDTH))
            if fetches:
                for row in ahead:
                    index = builder.add(row, column)
                    fetch(builder, address_of(context, builder, kinds[0], rows, index))
            for half in range(2):
                own = builder.add(column, at(HALF * half))
                low, high = (
                    eight_at(context, builder, kinds[0], rows, builder.add(row, own))
                    for row in own_rows
                )
                values = joined(builder, low, high)
                for token, sum_ in enumerate(kept):
                    index = builder.add(begin(x_start, token), own)
                    some = eight_at(context, builder, kinds[3], x, index)
                    factor = joined(builder, some, some)
                    added = _FUSED(context, builder, None, (values, factor, builder.load(sum_)))
                    builder.store(added, sum_)
        found = totals(builder, [builder.load(sum_) for sum_ in kept], HALF)
        for row in range(num_rows):
            index = builder.add(place, builder.mul(pitch, at(row)))
            lanes = range(row * HALF, row * HALF + num_tokens)
            put_lanes(builder, found, lanes, address_of(context, builder, kinds[5], sums, index))
        return context.get_dummy_value()

    return generate


def _dots_of_tokens(num_rows: int, *, fetches: bool) -> Any:
    if HAS_WIDE_REGISTERS:
        return _dots(num_rows, TOKENS_TOGETHER, fetches=fetches)
    return _dots_by_halves(num_rows, fetches=fetches)


def _signature(rows: Any, x: Any, sums: Any) -> Any:
    return types.none(rows, _INDEX, _INDEX, x, _INDEX, sums, _INDEX, _INDEX)


@intrinsic
def row_by_token(context, rows, start, columns, x, x_start, sums, place, pitch):  # type: ignore[no-untyped-def]
    """sums[place] = the sum of rows[start + k] * x[x_start + k], over all ``columns`` k, which are
    whole vectors. Rows and x are what ``load`` takes; those of several rows and tokens lie
    ``columns`` apart, and their sums at place + ``pitch`` * row + token."""
    return _signature(rows, x, sums), _dots(1, 1, fetches=False)


@intrinsic
def row_by_tokens(context, rows, start, columns, x, x_start, sums, place, pitch):  # type: ignore[no-untyped-def]
    """That for TOKENS_TOGETHER tokens."""
    return _signature(rows, x, sums), _dots_of_tokens(1, fetches=False)


@intrinsic
def rows_by_token(context, rows, start, columns, x, x_start, sums, place, pitch):  # type: ignore[no-untyped-def]
    """That for ROWS_TOGETHER rows and a token."""
    return _signature(rows, x, sums), _dots(ROWS_TOGETHER, 1, fetches=False)


@intrinsic
def rows_by_token_fetching(context, rows, start, columns, x, x_start, sums, place, pitch):  # type: ignore[no-untyped-def]
    """Likewise, and the next ROWS_TOGETHER rows are brought meanwhile."""
    return _signature(rows, x, sums), _dots(ROWS_TOGETHER, 1, fetches=True)


@intrinsic
def rows_by_tokens(context, rows, start, columns, x, x_start, sums, place, pitch):  # type: ignore[no-untyped-def]
    """That for ROWS_OF_TOKENS rows and TOKENS_TOGETHER tokens."""
    return _signature(rows, x, sums), _dots_of_tokens(ROWS_OF_TOKENS, fetches=False)


@intrinsic
def rows_by_tokens_fetching(context, rows, start, columns, x, x_start, sums, place, pitch):  # type: ignore[no-untyped-def]
    """Likewise, and the rows that are ROWS_TOGETHER on are brought meanwhile."""
    return _signature(rows, x, sums), _dots_of_tokens(ROWS_OF_TOKENS, fetches=True)
