"""Rows of floats of 8 bits times a few tokens of bfloat16: what ``pair_few_loops`` calls for them.
Of a row floats come first, then a scale in float32 for each group. bfloat16 has all of these
floats: no row is made plain.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.addresses import bytes_at
from freight.kernels.compiled import uncounted
from freight.kernels.llvm import (
    BYTE,
    FLOAT,
    FLOATS,
    WIDTH,
    address_of,
    constant,
    fetch,
    narrowed_both,
    pair_products,
    put_lanes,
    splat,
    totals,
)
from freight.kernels.micro_registers import eights
from freight.kernels.pair_few_blocks import ROWS
from freight.model.number_format import EIGHT_COLUMNS

__all__ = ["multiply_eights"]

U = np.uintp
_CHUNK: Final = 2 * WIDTH
"""Floats that are widened together."""
_CHUNKS_OF_A_GROUP: Final = EIGHT_COLUMNS // _CHUNK
_AHEAD = 2 * ROWS
"""Rows that are fetched before they are wanted."""
_INDEX = types.uintp


def _put_few_eights(num_tokens: int, num_fetched: int = ROWS) -> Any:
    """What makes sums[place + 16 r + t] the products of ROWS rows and num_tokens tokens; of each
    row all lanes up to the next power of two are written. It takes

    - (raw, start, line, height, part): bytes, where rows begin and how far they are apart, how many
      of them there are, and how many bytes a chunk of floats has, with its share of scales
    - (x, chunks): pairs, of each chunk each token's sixteen side by side
    - (sums, place)
    - ahead: so much of as many rows is fetched from there, to the second cache
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        raw, start, line, height, part = cgutils.unpack_tuple(builder, arguments[0])
        x, chunks = cgutils.unpack_tuple(builder, arguments[1])
        sums, place = cgutils.unpack_tuple(builder, arguments[2])
        ahead = arguments[3]

        def whole(value: int) -> Any:
            return ir.Constant(start.type, value)

        def at(number: int, array: Any, index: Any) -> Any:
            return address_of(context, builder, kinds[number][0], array, index)

        def sixteen(begin: Any, index: Any, kind: ir.Type = FLOAT) -> Any:
            pointer = ir.VectorType(kind, WIDTH).as_pointer()
            own = builder.bitcast(builder.gep(begin, [index]), pointer)
            return builder.load(own, align=1 if kind is BYTE else 4)

        def fused(a: Any, b: Any, c: Any) -> Any:
            kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
            return builder.call(function, [a, b, c])

        # Rows that are not there are the last one once more.
        last = builder.sub(height, whole(1))
        own_rows = []
        for row in range(ROWS):
            is_there = builder.icmp_unsigned("<", whole(row), height)
            number = builder.select(is_there, whole(row), last)
            own_rows.append(at(0, raw, builder.add(start, builder.mul(line, number))))
        coming = [
            at(0, raw, builder.add(ahead, builder.mul(line, whole(row))))
            for row in range(num_fetched)
        ]
        columns, behind = at(1, x, whole(0)), builder.mul(chunks, whole(_CHUNK))
        nothing, kept = constant(FLOAT, 0.0), {}
        for row in range(ROWS):
            for token in range(num_tokens):
                kept[row, token] = cgutils.alloca_once(builder, FLOATS)
                builder.store(nothing, kept[row, token])
        with cgutils.for_range(builder, chunks) as loop:
            for row in coming:
                fetch(builder, builder.gep(row, [builder.mul(loop.index, part)]), near=False)
            byte = builder.mul(loop.index, whole(_CHUNK))
            group = builder.udiv(loop.index, whole(_CHUNKS_OF_A_GROUP))
            scale_at = builder.add(behind, builder.mul(group, whole(4)))
            first = builder.mul(loop.index, whole(WIDTH * num_tokens))
            values = [
                sixteen(columns, builder.add(first, whole(WIDTH * token)))
                for token in range(num_tokens)
            ]
            for row in range(ROWS):
                halves = [
                    eights(builder, sixteen(own_rows[row], builder.add(byte, whole(own)), BYTE))
                    for own in (0, WIDTH)
                ]
                own_floats = narrowed_both(builder, *halves)
                pointer = builder.gep(own_rows[row], [scale_at])
                number = builder.load(builder.bitcast(pointer, FLOAT.as_pointer()), align=4)
                scale = splat(builder, number)
                for token, factor in enumerate(values):
                    found = pair_products(builder, nothing, own_floats, factor)
                    own = kept[row, token]
                    builder.store(fused(scale, found, builder.load(own)), own)
        lanes = 1 << (num_tokens - 1).bit_length()
        for row in range(ROWS):
            own = [builder.load(kept[row, token % num_tokens]) for token in range(lanes)]
            target = at(2, sums, builder.add(place, whole(WIDTH * row)))
            put_lanes(builder, totals(builder, own), range(lanes), target)
        return context.get_dummy_value()

    @intrinsic
    def put(context, rows, x, target, ahead):  # type: ignore[no-untyped-def]
        return types.none(rows, x, target, ahead), generate

    return put


_ONE, _TWO, _FOUR, _SIX = (_put_few_eights(count) for count in (1, 2, 4, 6))
_HALF_OF_EIGHT, _HALF_OF_TWELVE = (_put_few_eights(count, ROWS // 2) for count in (4, 6))
"""That fetch as much in each of two blocks as others do in one."""


@uncounted
def _multiply(rows, tokens, x, chunks, sums, place, ahead):  # type: ignore[no-untyped-def]
    half = ahead + rows[2] * U(ROWS // 2)
    first = (x, chunks), (sums, place), ahead
    if tokens == 1:
        _ONE(rows, *first)
    elif tokens == 2:
        _TWO(rows, *first)
    elif tokens <= 4:
        _FOUR(rows, *first)
    elif tokens <= 6:
        _SIX(rows, *first)
    elif tokens <= 8:
        _HALF_OF_EIGHT(rows, *first)
        _HALF_OF_EIGHT(rows, (x[U(4 * WIDTH) * chunks :], chunks), (sums, place + U(4)), half)
    else:
        _HALF_OF_TWELVE(rows, *first)
        _HALF_OF_TWELVE(rows, (x[U(6 * WIDTH) * chunks :], chunks), (sums, place + U(6)), half)


@njit(nogil=True, cache=True, boundscheck=False)
def multiply_eights(begin, height, following, given, x, sums):  # type: ignore[no-untyped-def]
    """Sums [rows, 16] of ``height`` rows that begin at the address ``begin``, behind which come
    those at ``following``; ``given`` are pairs of a row, tokens, and bytes of a row. Tokens lie as
    those do that meet pairs."""
    columns, tokens, line = given
    chunks, behind = U(columns // WIDTH), following - begin
    raw, part = bytes_at(begin, height * line), U(line // (columns // WIDTH))
    for row in range(0, height, ROWS):
        beyond = row + _AHEAD - height
        ahead = (row + _AHEAD) * line if beyond < 0 else behind + beyond * line
        rows = raw, U(row * line), U(line), U(min(ROWS, height - row)), part
        _multiply(rows, tokens, x, chunks, sums, U(row * WIDTH), U(ahead))
