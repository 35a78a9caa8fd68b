"""Pages of 4-bit codes as pairs of bfloat16, for loops that numba compiles where the processor
multiplies such pairs: a code is a whole number, less the middle one, and what it stands for that
times its group's scale, plus what the middle one stands for. Indices count elements; nothing is
checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.compiled import uncounted
from freight.kernels.llvm import (
    BYTE,
    FLOAT,
    FLOATS,
    SHORT,
    WIDTH,
    WORD,
    WORDS,
    address_of,
    pair_products,
    place_of,
)
from freight.kernels.vectors import (
    VECTOR,
    load,
    mixed,
    multiply_add,
    splat,
    store,
    turned_in_fours,
)

__all__ = ["LEAST_GROUP", "add_pairs", "lay_factors", "lay_keys", "lay_values"]

U = np.uintp
F = np.float32
LEAST_GROUP = 4 * WIDTH
"""Codes of a group: they are taken from 32 bytes at a time, two from each."""
_WIDTH = U(WIDTH)
_BYTES = U(2 * WIDTH)
_PAIRS = U(WIDTH // 2)
"""Of sixteen tokens."""
_TWO = U(2)
_SHORTS: Final = ir.VectorType(SHORT, 2 * WIDTH)
_MIDDLE: Final = WIDTH // 2
_NUMBERS: Final = [int(np.float32(code - _MIDDLE).view(np.uint32)) >> 16 for code in range(WIDTH)]
"""The codes less the middle one, as bfloat16, by their bits."""


def _looked_up(builder: Any, codes: Any) -> Any:
    """The numbers of 32 codes in the lowest four bits; of the others what looks them up ignores all
    but one, which makes no difference."""
    kind = ir.FunctionType(_SHORTS, [_SHORTS, _SHORTS])
    name = "llvm.x86.avx512.permvar.hi.512"
    look_up = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(look_up, [ir.Constant(_SHORTS, _NUMBERS * 2), codes])


def _upper(builder: Any, codes: Any) -> Any:
    return builder.lshr(codes, ir.Constant(_SHORTS, [4] * 2 * WIDTH))


def _both_halves(context: Any, builder: Any, array: Any, data: Any, index: Any) -> tuple[Any, Any]:
    """32 bytes from an element on: the numbers of the codes in their lower halves, and in the
    upper ones."""
    begin = place_of(context, builder, array, data, index, BYTE)
    begin = builder.bitcast(begin, ir.VectorType(BYTE, 2 * WIDTH).as_pointer())
    low = builder.zext(builder.load(begin, align=1), _SHORTS)
    return _looked_up(builder, low), _looked_up(builder, _upper(builder, low))


def _put(context: Any, builder: Any, array: Any, data: Any, index: Any, shorts: Any) -> None:
    place = place_of(context, builder, array, data, index, WORD)
    builder.store(shorts, builder.bitcast(place, _SHORTS.as_pointer()), align=4)


@intrinsic
def _put_turned_codes(context, raw, at, stride, out, place, further):  # type: ignore[no-untyped-def]
    """The codes of 32 bytes of each of sixteen tokens, ``stride`` bytes apart, of the first from
    raw[at] on, as pairs of neighbours: out[place + 16 p + t] is pair p of token t, of the lower
    halves of bytes, and from ``further`` on of the upper ones."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index, apart, target, first, beyond = arguments
        kinds, whole = signature.args, index.type

        def token(number: int) -> Any:
            own = builder.add(index, builder.mul(apart, ir.Constant(whole, number)))
            begin = address_of(context, builder, kinds[0], data, own)
            kind = ir.VectorType(WORD, WIDTH // 2)
            return builder.load(builder.bitcast(begin, kind.as_pointer()), align=1)

        both = ir.Constant(WORDS, [*range(WIDTH)])
        rows = [builder.shuffle_vector(token(k), token(k + 8), both) for k in range(8)]
        for number, words in enumerate(_turned_halves(builder, rows)):
            for part in range(2):
                found = _two_bytes(builder, words, 2 * part)
                for codes, line in ((found, first), (_upper(builder, found), beyond)):
                    apart_by = ir.Constant(whole, WIDTH * (2 * number + part))
                    to = builder.add(line, apart_by)
                    _put(context, builder, kinds[3], target, to, _looked_up(builder, codes))
        return context.get_dummy_value()

    whole = types.uintp
    return types.none(raw, whole, whole, out, whole, whole), generate


def _turned_halves(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Of eight vectors, each of eight words of a row and of eight of the eighth row behind it, the
    eight columns of sixteen."""
    made = turned_in_fours(builder, rows)
    found = []
    for column in range(8):
        of_four = range(column // 4 * 4, column // 4 * 4 + 4)
        halves = (of_four, range(of_four.start + 8, of_four.stop + 8))
        lanes = [first + k for own in halves for first in (0, WIDTH) for k in own]
        found.append(mixed(builder, made[column % 4], made[column % 4 + 4], lanes))
    return found


def _two_bytes(builder: Any, words: Any, first: int) -> Any:
    """Two neighbouring bytes of each word, one in each half."""
    kind = ir.VectorType(BYTE, 4 * WIDTH)
    lanes = [place for k in range(0, 4 * WIDTH, 4) for place in (k + first, 64, k + first + 1, 64)]
    mask = ir.Constant(ir.VectorType(WORD, 4 * WIDTH), lanes)
    nothing = ir.Constant(kind, [0] * 4 * WIDTH)
    found = builder.shuffle_vector(builder.bitcast(words, kind), nothing, mask)
    return builder.bitcast(found, _SHORTS)


@intrinsic
def _put_code_pairs(context, raw, one, other, pairs, place, further):  # type: ignore[no-untyped-def]
    """The codes of 32 bytes of one token and of another as 32 pairs, each of a code of both, from
    pairs[place] on: of the lower halves of bytes, and from ``further`` on of the upper ones."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, *begins, target, first, apart = arguments
        kinds = signature.args
        both = [_both_halves(context, builder, kinds[0], data, begin) for begin in begins]
        lanes = [lane for k in range(2 * WIDTH) for lane in (k, k + 2 * WIDTH)]
        for half in range(2):
            for part in range(2):
                mask = lanes[2 * WIDTH * part : 2 * WIDTH * (part + 1)]
                mask = ir.Constant(ir.VectorType(WORD, 2 * WIDTH), mask)
                found = builder.shuffle_vector(both[0][half], both[1][half], mask)
                index = builder.add(first, ir.Constant(first.type, WIDTH * part))
                _put(context, builder, kinds[3], target, index, found)
            first = builder.add(first, apart)
        return context.get_dummy_value()

    whole = types.uintp
    return types.none(raw, whole, whole, pairs, whole, whole), generate


@intrinsic
def add_pairs(context, sums, a, b):  # type: ignore[no-untyped-def]
    """Each of sixteen sums plus both products of a pair of a and one of b."""
    return VECTOR(VECTOR, VECTOR, VECTOR), lambda c, builder, s, given: pair_products(
        builder, *given
    )


@uncounted
def lay_keys(raw, at, shape, codes):  # type: ignore[no-untyped-def]
    """Codes [pairs of columns, 16 tokens]."""
    half = shape.group_size // _TWO
    for first in range(U(0), shape.width // _TWO, half):
        for byte in range(first, first + half, _BYTES):
            to = (first + byte) // _TWO * _WIDTH
            far = to + half // _TWO * _WIDTH
            _put_turned_codes(raw, at + byte, shape.token_stride, codes, to, far)


@uncounted
def lay_values(raw, at, shape, pairs):  # type: ignore[no-untyped-def]
    """Codes [8 pairs of tokens, columns]."""
    half = shape.group_size // _TWO
    for pair in range(_PAIRS):
        one = at + _TWO * U(pair) * shape.token_stride
        other, to = one + shape.token_stride, U(pair) * shape.width
        for first in range(U(0), shape.width // _TWO, half):
            for byte in range(first, first + half, _BYTES):
                _put_code_pairs(raw, one + byte, other + byte, pairs, to + first + byte, half)


@intrinsic
def _put_two_lines(context, raw, at, stride, low, high, out, place):  # type: ignore[no-untyped-def]
    """Two float16 of each of sixteen tokens, ``stride`` bytes apart, of the first from raw[at] on,
    as float32: sixteen from out[place] on, and sixteen behind them. Tokens before ``low`` and from
    ``high`` on have zeros: of what is there nothing is known, not even that it is a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index, apart, first, last, target, to = arguments
        kinds = signature.args

        def all_lanes(number: Any) -> Any:
            word = builder.trunc(number, WORD)
            some = builder.insert_element(ir.Constant(WORDS, ir.Undefined), word, _lane(0))
            return builder.shuffle_vector(some, some, ir.Constant(WORDS, [0] * WIDTH))

        tokens = ir.Constant(WORDS, [*range(WIDTH)])
        mask = builder.and_(
            builder.icmp_unsigned(">=", tokens, all_lanes(first)),
            builder.icmp_unsigned("<", tokens, all_lanes(last)),
        )
        begin = builder.bitcast(
            address_of(context, builder, kinds[0], data, index), BYTE.as_pointer()
        )
        name = "llvm.x86.avx512.mask.gather.dpi.512"
        kind = ir.FunctionType(WORDS, [WORDS, begin.type, WORDS, mask.type, WORD])
        gather = cgutils.get_or_insert_function(builder.module, kind, name)
        places = builder.mul(tokens, all_lanes(apart))
        nothing = ir.Constant(WORDS, [0] * WIDTH)
        both = builder.call(gather, [nothing, begin, places, mask, ir.Constant(WORD, 1)])
        upper = builder.lshr(both, ir.Constant(WORDS, [16] * WIDTH))
        for line, words in enumerate((both, upper)):
            halves = builder.trunc(words, ir.VectorType(SHORT, WIDTH))
            halves = builder.bitcast(halves, ir.VectorType(ir.HalfType(), WIDTH))
            place = builder.add(to, ir.Constant(to.type, line * WIDTH))
            place = place_of(context, builder, kinds[5], target, place, FLOAT)
            builder.store(builder.fpext(halves, FLOATS), place, align=4)
        return context.get_dummy_value()

    whole = types.uintp
    return types.none(raw, whole, whole, whole, whole, out, whole), generate


def _lane(number: int) -> Any:
    return ir.Constant(WORD, number)


@uncounted
def lay_factors(raw, at, low, high, shape, factors):  # type: ignore[no-untyped-def]
    """Scales [groups, 16 tokens], and likewise the numbers of the middle code: zeros but from
    ``low`` to ``high``."""
    groups, begin = shape.width // shape.group_size, at + shape.width // _TWO
    for line in range(groups):
        own = U(line) * _TWO * _WIDTH
        _put_two_lines(raw, begin + U(4) * U(line), shape.token_stride, low, high, factors, own)
    middle = splat(F(_MIDDLE))
    for place in range(U(0), groups * _WIDTH, _WIDTH):
        lowest = groups * _WIDTH + place
        store(factors, lowest, multiply_add(load(factors, place), middle, load(factors, lowest)))
