"""Blocks of a product of a few tokens and rows of bfloat16, by pairs of neighbours, whose sums stay
in registers: rows are read as they lie, and those that come next are fetched meanwhile."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import (
    FLOATS,
    WIDTH,
    address_of,
    constant,
    fetch,
    pair_products,
    put_lanes,
    totals,
)

__all__ = ["ROWS", "TOKENS", "put_few_products"]

ROWS: Final = 4
"""That meet tokens together."""
TOKENS: Final = (1, 2, 4, 6)
"""Numbers of tokens that there are blocks for: with six, sums and tokens leave room for a row."""
_INDEX = types.uintp


def put_few_products(num_tokens: int, num_fetched: int = ROWS) -> Any:
    """What makes sums[place + 16 r + t] the products of ROWS rows[start + pitch r + k] and
    num_tokens x[16 (num_tokens k + t) + i], over k = 0 to ``count``, sixteen pairs each; of each
    row all lanes up to the next power of two are written. So much of as many rows is fetched, to
    the second cache, which may await more of them, the first of which begins ``ahead``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, start, pitch, x, count, sums, place, ahead = arguments
        of_rows, _, _, of_x, _, of_sums, _, _ = signature.args

        def whole(value: int) -> Any:
            return ir.Constant(start.type, value)

        def of_row(first: Any, number: int) -> Any:
            index = builder.add(first, builder.mul(pitch, whole(number)))
            return address_of(context, builder, of_rows, rows, index)

        def sixteen(begin: Any, index: Any) -> Any:
            at = builder.bitcast(builder.gep(begin, [index]), FLOATS.as_pointer())
            return builder.load(at, align=4)

        own_rows = [of_row(start, row) for row in range(ROWS)]
        coming = [of_row(ahead, row) for row in range(num_fetched)]
        tokens = address_of(context, builder, of_x, x, whole(0))
        kept = {}
        for row in range(ROWS):
            for token in range(num_tokens):
                kept[row, token] = cgutils.alloca_once(builder, FLOATS)
                builder.store(constant(FLOATS.element, 0.0), kept[row, token])
        with cgutils.for_range(builder, count) as loop:
            column = builder.mul(loop.index, whole(WIDTH))
            for row in coming:
                fetch(builder, builder.gep(row, [column]), near=False)
            first = builder.mul(column, whole(num_tokens))
            factors = [
                sixteen(tokens, builder.add(first, whole(WIDTH * token)))
                for token in range(num_tokens)
            ]
            for row in range(ROWS):
                values = sixteen(own_rows[row], column)
                for token, factor in enumerate(factors):
                    own = kept[row, token]
                    found = pair_products(builder, builder.load(own), values, factor)
                    builder.store(found, own)
        lanes = 1 << (num_tokens - 1).bit_length()
        for row in range(ROWS):
            own = [builder.load(kept[row, token % num_tokens]) for token in range(lanes)]
            target = builder.add(place, whole(WIDTH * row))
            at = address_of(context, builder, of_sums, sums, target)
            put_lanes(builder, totals(builder, own), range(lanes), at)
        return context.get_dummy_value()

    @intrinsic
    def put(context, rows, start, pitch, x, count, sums, place, ahead):  # type: ignore[no-untyped-def]
        return types.none(rows, _INDEX, _INDEX, x, _INDEX, sums, _INDEX, _INDEX), generate

    return put
