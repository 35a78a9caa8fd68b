"""Blocks of a product of a few tokens of bfloat16 and rows of codes in groups, in 4 or 8 bits,
whose sums stay in registers: codes are whole numbers, or floats of 4 bits, which bfloat16 has all
of, so that no row is made plain. A product with minimum + code * scale is the scale times that with
the codes, and the minimum times the sum of the token's columns.
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
    SHORT,
    WIDTH,
    WORDS,
    narrowed_both,
    pair_products,
    splat,
    widen_codes,
)
from freight.kernels.pair_few_blocks import INDEX, ROWS, FewBlock
from freight.kernels.row_kinds import KeptBytes, KeptSixteens, kind_of

__all__ = ["CHUNK", "put_few_products_of_codes"]

CHUNK: Final = 32
"""Bytes of codes that are looked up, or widened, together."""
_BOTH: Final = [*range(WIDTH // 2), *range(WIDTH + WIDTH // 2, 2 * WIDTH)]
"""Of two vectors the lower half of the one and the upper half of the other."""


_SIXTEENS: Final = (0, CHUNK // 2, CHUNK // 4, CHUNK // 2 + CHUNK // 4)
"""Of groups of sixteen, whose upper halves of bytes are a group of their own: where codes begin
whose scales are those of the lower halves, and of the upper ones."""


def put_few_products_of_codes(num_tokens: int, num_fetched: int = ROWS) -> Any:
    """What makes sums[place + 16 r + t] the products of ROWS rows and num_tokens tokens; of each
    row all lanes up to the next power of two are written. It takes

    - how rows are kept: codes, or bytes
    - (raw, start, line, height, part): bytes, where rows begin and how far they are apart, how many
      of them there are, and how many bytes a chunk of codes has, with its share of scales
    - (factors, wide, lowest, bits): float32, each row's scale of each group, ``wide`` apart, minima
      ROWS rows behind, of the first ``lowest`` groups; bytes of a group's codes are two to the
      power of ``bits``, sixteen or more, 32 or more of 8 bits
    - tables: bfloat16, what each code of 4 bits stands for, twice; the sum of several is meant
    - (x, chunks): bfloat16, of each chunk each token's columns side by side; of 4 bits first those
      of the lower halves of bytes, then those of the upper ones
    - (shared,): of each token the sums of each group's columns, ``wide`` apart, zeros where there
      is no group
    - (sums, place)
    - ahead: so much of as many rows is fetched from there, to the second cache
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of_raw, of_factors, of_table, of_x, of_shared, of_sums, _ = (
            kind if kind is INDEX else kind[0] for kind in signature.args[1:]
        )
        are_bytes = kind_of(signature.args[0]) is KeptBytes
        are_sixteens = kind_of(signature.args[0]) is KeptSixteens
        _, *tuples, ahead = arguments
        own = [cgutils.unpack_tuple(builder, each) for each in tuples]
        (raw, start, line, height, part), (factors, wide, lowest, bits), numbers = own[:3]
        (x, chunks), (shared,), (sums, place) = own[3:]
        block = FewBlock(context, builder, num_tokens)
        zero = block.whole(0)
        own_rows = block.rows_there(of_raw, raw, start, line, height)
        coming = block.rows(of_raw, raw, ahead, line, num_fetched)
        scales = block.rows(of_factors, factors, zero, wide)
        minima = block.rows(of_factors, factors, builder.mul(wide, block.whole(ROWS)), wide)
        shares = block.rows(of_shared, shared, zero, wide, num_tokens)
        columns = block.address(of_x, x, zero)
        with cgutils.for_range(builder, builder.udiv(lowest, block.whole(WIDTH))) as loop:
            group = builder.mul(loop.index, block.whole(WIDTH))
            some = [block.load(begin, group) for begin in shares]
            for row, begin in enumerate(minima):
                minimum = block.load(begin, group)
                for token, share in enumerate(some):
                    block.add_times(row, token, minimum, share)
        tables = [
            block.load(block.address(of_table, each, zero), zero, SHORT, 2 * WIDTH)
            for each in numbers
        ]
        with cgutils.for_range(builder, chunks) as loop:
            block.fetch(coming, builder.mul(loop.index, part))
            byte = builder.mul(loop.index, block.whole(CHUNK))
            steps = _SIXTEENS if are_sixteens else (0, CHUNK // 2)
            groups = [builder.lshr(builder.add(byte, block.whole(step)), bits) for step in steps]
            tokens = block.tokens(columns, loop.index, parts=1 if are_bytes else 2)
            for row, begin in enumerate(own_rows):
                codes = block.load(begin, byte, BYTE, CHUNK)
                each = [
                    splat(builder, builder.load(builder.gep(scales[row], [group])))
                    for group in groups
                ]
                # By scales: what is multiplied before it meets them, by the parts of tokens.
                met: list[tuple[Any, list[tuple[int, Any]]]]
                if are_bytes:
                    met = [(each[0], [(0, _widened(builder, codes))])]
                else:
                    values = [
                        own_value
                        for table in tables
                        for own_value in enumerate(_looked_up(builder, table, codes))
                    ]
                    pairs = [each[first : first + 2] for first in range(0, len(each), 2)]
                    both = [
                        builder.shuffle_vector(*pair, ir.Constant(WORDS, _BOTH)) for pair in pairs
                    ]
                    met = [(both[0], values)]
                    if are_sixteens:
                        met = [(scale, [own]) for scale, own in zip(both, values, strict=True)]
                for token, parts in enumerate(tokens):
                    for scale, meeting in met:
                        found = block.nothing
                        for number, own_values in meeting:
                            found = pair_products(builder, found, own_values, parts[number])
                        block.add_times(row, token, scale, found)
        block.put(of_sums, sums, place)
        return context.get_dummy_value()

    @intrinsic
    def put(context, kind, rows, factors, table, x, shared, target, ahead):  # type: ignore[no-untyped-def]
        return types.none(kind, rows, factors, table, x, shared, target, ahead), generate

    return put


def _looked_up(builder: Any, table: Any, codes: Any) -> list[Any]:
    """What the lower and the upper halves of so many bytes stand for."""
    low = builder.zext(codes, ir.VectorType(SHORT, CHUNK))
    high = builder.lshr(low, ir.Constant(low.type, [4] * CHUNK))
    return [look_up(builder, table, own) for own in (low, high)]


def _widened(builder: Any, codes: Any) -> Any:
    """So many bytes as bfloat16, which has all of them."""
    halves = [
        builder.shuffle_vector(codes, codes, ir.Constant(WORDS, [*range(first, first + WIDTH)]))
        for first in (0, WIDTH)
    ]
    return narrowed_both(builder, *(widen_codes(builder, own) for own in halves))
