"""Rows of floats of 8 bits times a few tokens of bfloat16: what ``pair_few_loops`` calls for them.
Of a row floats come first, then a scale in float32 for each group. bfloat16 has all of these
floats: no row is made plain.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.addresses import bytes_at
from freight.kernels.compiled import uncounted
from freight.kernels.llvm import BYTE, FLOAT, WIDTH, narrowed_both, pair_products, splat
from freight.kernels.micro_registers import eights
from freight.kernels.pair_few_blocks import INDEX, ROWS, FewBlock
from freight.model.number_format import EIGHT_COLUMNS

__all__ = ["multiply_eights"]

U = np.uintp
_CHUNK: Final = 2 * WIDTH
"""Floats that are widened together."""
_CHUNKS_OF_A_GROUP: Final = EIGHT_COLUMNS // _CHUNK
_AHEAD = 2 * ROWS
"""Rows that are fetched before they are wanted."""
_SCALE_BYTES: Final = 4


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
        of_raw, of_x, of_sums, _ = (kind if kind is INDEX else kind[0] for kind in signature.args)
        *tuples, ahead = arguments
        own = [cgutils.unpack_tuple(builder, each) for each in tuples]
        (raw, start, line, height, part), (x, chunks), (sums, place) = own
        block = FewBlock(context, builder, num_tokens)
        own_rows = block.rows_there(of_raw, raw, start, line, height)
        coming = block.rows(of_raw, raw, ahead, line, num_fetched)
        columns = block.address(of_x, x, block.whole(0))
        behind = builder.mul(chunks, block.whole(_CHUNK))
        with cgutils.for_range(builder, chunks) as loop:
            block.fetch(coming, builder.mul(loop.index, part))
            byte = builder.mul(loop.index, block.whole(_CHUNK))
            group = builder.udiv(loop.index, block.whole(_CHUNKS_OF_A_GROUP))
            scale_at = builder.add(behind, builder.mul(group, block.whole(_SCALE_BYTES)))
            tokens = block.tokens(columns, loop.index)
            for row, begin in enumerate(own_rows):
                halves = [
                    eights(builder, block.load(begin, builder.add(byte, block.whole(half)), BYTE))
                    for half in (0, WIDTH)
                ]
                values = narrowed_both(builder, *halves)
                pointer = builder.bitcast(builder.gep(begin, [scale_at]), FLOAT.as_pointer())
                scale = splat(builder, builder.load(pointer, align=_SCALE_BYTES))
                for token, (own_pairs,) in enumerate(tokens):
                    found = pair_products(builder, block.nothing, values, own_pairs)
                    block.add_times(row, token, scale, found)
        block.put(of_sums, sums, place)
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
