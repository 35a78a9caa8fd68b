"""Rows of codes in groups, or of MXFP4, times a few tokens of bfloat16: what
``pair_few_loops`` calls for them. Of a row codes come first, then its scales, then its minima, if
it has any.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.addresses import bytes_at, halves_at, words_at
from freight.kernels.code_few_blocks import CHUNK, put_few_products_of_codes
from freight.kernels.compiled import uncounted
from freight.kernels.group_loops import widen_factors
from freight.kernels.micro import MAGNITUDES
from freight.kernels.pair_few_blocks import ROWS
from freight.kernels.row_kinds import EXPONENT
from freight.kernels.vectors import WIDTH, add, load, of_bits, splat, total

__all__ = [
    "AHEAD",
    "lay_codes_tokens",
    "multiply_codes",
    "multiply_tokens",
    "sum_groups",
    "wide_groups",
]

U = np.uintp
F = np.float32
AHEAD = 4 * ROWS
"""Rows that are fetched before they are wanted: a quarter as long as plain ones."""
_ONE, _TWO, _FOUR, _SIX = (put_few_products_of_codes(count) for count in (1, 2, 4, 6))
_HALF_OF_EIGHT, _HALF_OF_TWELVE = (put_few_products_of_codes(count, ROWS // 2) for count in (4, 6))
"""That fetch as much in each of two blocks as others do in one."""
_SMALLEST = np.uint32(1 << 22)
"""The bits of 2^-127, which has no exponent of its own in float32."""
_NUMBERS, _FOURS = (
    np.array([*codes, *codes], np.float32).view(np.uint16)[1::2].copy()
    for codes in ([*range(16)], [*MAGNITUDES, *(-own for own in MAGNITUDES)])
)
"""What codes stand for in bfloat16, all of them exactly, twice."""
_STRETCH = WIDTH // 2
"""Pairs of columns that lie side by side in every group."""


@uncounted
def wide_groups(pairs, size):  # type: ignore[no-untyped-def]
    """How many groups it has, up to whole vectors."""
    return (2 * pairs // size + WIDTH - 1) // WIDTH * WIDTH


@uncounted
def lay_codes_tokens(x, given, together, size, laid):  # type: ignore[no-untyped-def]
    """Tokens as blocks take them that meet codes of 4 bits; ``given`` are numbers of pairs from one
    token to the next, of their pairs, and of tokens. Of those that are not there what is laid is
    zeros."""
    pitch, columns, tokens = given
    step = size // 2
    for place in range((tokens + together - 1) // together * together):
        block, own = place // together, place % together
        for chunk in range(columns // CHUNK):
            begun = (block * columns + chunk * CHUNK) * together + own * CHUNK
            for stretch in range(0, 2 * WIDTH, _STRETCH):
                half, byte = stretch // WIDTH, chunk * CHUNK + 2 * (stretch % WIDTH)
                column = byte // step * size + byte % step + half * step
                source = place * pitch + column // 2
                for pair in range(_STRETCH):
                    found = x[U(source + pair)] if place < tokens else F(0.0)
                    laid[U(begun + stretch + pair)] = found


@uncounted
def sum_groups(halves, given, size, shared):  # type: ignore[no-untyped-def]
    """Of each group of a token's columns, of which minima become their products."""
    pitch, columns, tokens = given
    wide = wide_groups(columns, size)
    for token in range(tokens):
        for group in range(2 * columns // size):
            found = splat(F(0.0))
            for column in range(group * size, group * size + size, WIDTH):
                found = add(found, load(halves, U(2 * token * pitch + column)))
            shared[U(token * wide + group)] = total(found)


@uncounted
def multiply_tokens(kind, rows, factors, table, tokens, own_tokens, shared, target, ahead):  # type: ignore[no-untyped-def]
    """ROWS rows by all tokens, in as many blocks as they want."""
    (x, columns, chunks), (sums, place) = own_tokens, target
    wide, half = factors[1], ahead + rows[2] * U(ROWS // 2)
    first = (x, chunks), (shared,), target, ahead
    if tokens == 1:
        _ONE(kind, rows, factors, table, *first)
    elif tokens == 2:
        _TWO(kind, rows, factors, table, *first)
    elif tokens <= 4:
        _FOUR(kind, rows, factors, table, *first)
    elif tokens <= 6:
        _SIX(kind, rows, factors, table, *first)
    elif tokens <= 8:
        begun, behind = U(4) * columns, U(4) * wide
        _HALF_OF_EIGHT(kind, rows, factors, table, *first)
        others = (x[begun:], chunks), (shared[behind:],), (sums, place + U(4))
        _HALF_OF_EIGHT(kind, rows, factors, table, *others, half)
    else:
        begun, behind = U(6) * columns, U(6) * wide
        _HALF_OF_TWELVE(kind, rows, factors, table, *first)
        others = (x[begun:], chunks), (shared[behind:],), (sums, place + U(6))
        _HALF_OF_TWELVE(kind, rows, factors, table, *others, half)


@uncounted
def _widen_exponents(raw, first, count, room, place):  # type: ignore[no-untyped-def]
    """Two to the power of each byte less 127."""
    for group in range(count):
        bits = np.uint32(raw[first + group]) << np.uint32(23)
        room[place + group] = of_bits(max(bits, _SMALLEST))


@njit(nogil=True, cache=True, boundscheck=False)
def multiply_codes(kind, begin, height, following, given, x, shared, room, sums):  # type: ignore[no-untyped-def]
    """Sums [rows, 16] of ``height`` rows that begin at the address ``begin``, behind which come
    those at ``following``; ``given`` are pairs of a row, tokens, and bytes of its codes; the
    room is for scales and minima of ROWS rows, zeros at first."""
    columns, tokens, code_bytes = given
    line, size, factor_bytes = kind.row_bytes, kind.size, kind.factor_bytes
    groups = 2 * columns // size
    wide, chunks, bits = U(wide_groups(columns, size)), U(code_bytes // CHUNK), U(0)
    while (code_bytes // groups) >> bits > 1:
        bits += U(1)
    raw, behind = bytes_at(begin, height * line), following - begin
    part = U(line // (code_bytes // CHUNK))
    for row in range(0, height, ROWS):
        left = min(ROWS, height - row)
        for own in range(left):
            first = begin + (row + own) * line + code_bytes
            if factor_bytes == EXPONENT:
                behind_codes = U((row + own) * line + code_bytes)
                _widen_exponents(raw, behind_codes, U(groups), room, U(own) * wide)
                continue
            for which in range(2):
                at, to = first + which * groups * factor_bytes, U(own + which * ROWS) * wide
                if factor_bytes == 2:
                    widen_factors(halves_at(at, groups), U(0), U(groups), room, to)
                else:
                    widen_factors(words_at(at, groups), U(0), U(groups), room, to)
        beyond = row + AHEAD - height
        ahead = (row + AHEAD) * line if beyond < 0 else behind + beyond * line
        rows = raw, U(row * line), U(line), U(left), part
        own_factors = room, wide, U(0) if factor_bytes == EXPONENT else wide, bits
        target, table = (sums, U(row * WIDTH)), (_FOURS if factor_bytes == EXPONENT else _NUMBERS,)
        own_tokens, there = (x, U(columns), chunks), U(ahead)
        multiply_tokens(kind, rows, own_factors, table, tokens, own_tokens, shared, target, there)
