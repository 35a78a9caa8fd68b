"""Blocks of a product of a few tokens of bfloat16 and rows of 4-bit codes in groups, whose sums
stay in registers: codes are whole numbers, or floats of 4 bits, which bfloat16 has all of, so that
no row is made plain. A product with minimum + code * scale is the scale times that with the codes,
and the minimum times the sum of the token's columns.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.code_registers import look_up
from freight.kernels.llvm import (
    BYTE,
    FLOATS,
    SHORT,
    WIDTH,
    WORDS,
    address_of,
    constant,
    fetch,
    pair_products,
    put_lanes,
    splat,
    totals,
)
from freight.kernels.pair_few_blocks import ROWS

__all__ = ["CHUNK", "put_few_products_of_codes"]

CHUNK: Final = 32
"""Bytes of codes that are looked up together."""
_INDEX = types.uintp
_ZERO: Final = 0.0


def put_few_products_of_codes(num_tokens: int, num_fetched: int = ROWS) -> Any:
    """What makes sums[place + 16 r + t] the products of ROWS rows and num_tokens tokens; of each
    row all lanes up to the next power of two are written. It takes

    - (raw, start, line, height, part): bytes, where rows begin and how far they are apart, how many
      of them there are, and how many bytes a chunk of codes has, with its share of scales
    - (factors, wide, lowest, bits): float32, each row's scale of each group, ``wide`` apart, minima
      ROWS rows behind, of the first ``lowest`` groups; bytes of a group's codes are two to the
      power of ``bits``, sixteen or more
    - (table,): bfloat16, what each code stands for, twice
    - (x, chunks): bfloat16, of each chunk each token's columns side by side, first those of the
      lower halves of bytes, then those of the upper ones
    - (shared,): of each token the sums of each group's columns, ``wide`` apart, zeros where there
      is no group
    - (sums, place)
    - ahead: so much of as many rows is fetched from there, to the second cache
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        raw, start, line, height, part = cgutils.unpack_tuple(builder, arguments[0])
        factors, wide, lowest, bits = cgutils.unpack_tuple(builder, arguments[1])
        (numbers,) = cgutils.unpack_tuple(builder, arguments[2])
        x, chunks = cgutils.unpack_tuple(builder, arguments[3])
        (shared,) = cgutils.unpack_tuple(builder, arguments[4])
        sums, place = cgutils.unpack_tuple(builder, arguments[5])
        ahead = arguments[6]

        def whole(value: int) -> Any:
            return ir.Constant(start.type, value)

        def at(number: int, array: Any, index: Any) -> Any:
            return address_of(context, builder, kinds[number][0], array, index)

        def sixteen(begin: Any, index: Any) -> Any:
            found = builder.bitcast(builder.gep(begin, [index]), FLOATS.as_pointer())
            return builder.load(found, align=4)

        def fused(a: Any, b: Any, c: Any) -> Any:
            kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
            return builder.call(function, [a, b, c])

        # Rows that are not there are the last one once more.
        last = builder.sub(height, whole(1))
        own_rows = []
        for row in range(ROWS):
            number = builder.select(
                builder.icmp_unsigned("<", whole(row), height), whole(row), last
            )
            own_rows.append(at(0, raw, builder.add(start, builder.mul(line, number))))
        coming = [
            at(0, raw, builder.add(ahead, builder.mul(line, whole(row))))
            for row in range(num_fetched)
        ]
        scales = [at(1, factors, builder.mul(wide, whole(row))) for row in range(ROWS)]
        minima = [at(1, factors, builder.mul(wide, whole(ROWS + row))) for row in range(ROWS)]
        columns = at(3, x, whole(0))
        shares = [at(4, shared, builder.mul(wide, whole(token))) for token in range(num_tokens)]
        nothing, kept = constant(FLOATS.element, _ZERO), {}
        for row in range(ROWS):
            for token in range(num_tokens):
                kept[row, token] = cgutils.alloca_once(builder, FLOATS)
                builder.store(nothing, kept[row, token])
        with cgutils.for_range(builder, builder.udiv(lowest, whole(WIDTH))) as loop:
            group = builder.mul(loop.index, whole(WIDTH))
            some = [sixteen(own, group) for own in shares]
            for row in range(ROWS):
                minimum = sixteen(minima[row], group)
                for token, own_share in enumerate(some):
                    own = kept[row, token]
                    builder.store(fused(minimum, own_share, builder.load(own)), own)
        lines = ir.VectorType(SHORT, 2 * WIDTH).as_pointer()
        table = builder.load(builder.bitcast(at(2, numbers, whole(0)), lines), align=2)
        with cgutils.for_range(builder, chunks) as loop:
            for row in coming:
                fetch(builder, builder.gep(row, [builder.mul(loop.index, part)]), near=False)
            byte = builder.mul(loop.index, whole(CHUNK))
            groups = [
                builder.lshr(builder.add(byte, whole(half * CHUNK // 2)), bits) for half in (0, 1)
            ]
            first = builder.mul(loop.index, whole(2 * WIDTH * num_tokens))
            values = [
                [
                    sixteen(columns, builder.add(first, whole(WIDTH * (2 * token + half))))
                    for half in (0, 1)
                ]
                for token in range(num_tokens)
            ]
            for row in range(ROWS):
                begin = builder.gep(own_rows[row], [byte])
                pointer = builder.bitcast(begin, ir.VectorType(BYTE, CHUNK).as_pointer())
                codes = builder.zext(builder.load(pointer, align=1), ir.VectorType(SHORT, CHUNK))
                high = builder.lshr(codes, ir.Constant(codes.type, [4] * CHUNK))
                low, high = (look_up(builder, table, own) for own in (codes, high))
                one, other = (
                    splat(builder, builder.load(builder.gep(scales[row], [own]))) for own in groups
                )
                scale = builder.shuffle_vector(one, other, ir.Constant(WORDS, _BOTH))
                for token, (lower, upper) in enumerate(values):
                    found = pair_products(builder, nothing, low, lower)
                    found = pair_products(builder, found, high, upper)
                    own = kept[row, token]
                    builder.store(fused(scale, found, builder.load(own)), own)
        lanes = 1 << (num_tokens - 1).bit_length()
        for row in range(ROWS):
            own = [builder.load(kept[row, token % num_tokens]) for token in range(lanes)]
            target = at(5, sums, builder.add(place, whole(WIDTH * row)))
            put_lanes(builder, totals(builder, own), range(lanes), target)
        return context.get_dummy_value()

    @intrinsic
    def put(context, rows, factors, table, x, shared, target, ahead):  # type: ignore[no-untyped-def]
        return types.none(rows, factors, table, x, shared, target, ahead), generate

    return put


_BOTH: Final = [*range(WIDTH // 2), *range(WIDTH + WIDTH // 2, 2 * WIDTH)]
"""Of two vectors the lower half of the one and the upper half of the other."""
