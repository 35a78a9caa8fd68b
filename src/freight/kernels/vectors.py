"""Sixteen floats at once, for loops that numba compiles. Indices count elements; nothing is
checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

from freight.kernels.features import HAS_PAIR_PRODUCTS, HAS_WIDE_REGISTERS
from freight.kernels.llvm import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    LOADERS,
    SHORT,
    WIDTH,
    WORD,
    WORDS,
    address_of,
    call,
    constant,
    joined,
    larger_of,
    loader,
    narrowed,
    place_of,
    scaled_by_powers,
    widen_codes,
    widen_high_codes,
    widen_low_codes,
)
from freight.kernels.llvm import splat as splat_number

__all__ = [
    "VECTOR",
    "WIDTH",
    "add",
    "bits_of",
    "factor_at",
    "half_at",
    "is_above",
    "larger",
    "largest",
    "load",
    "load_bytes",
    "load_factors",
    "load_high",
    "load_low",
    "mixed",
    "multiply",
    "multiply_add",
    "number_at",
    "of_bits",
    "put_number",
    "quotient",
    "rounded",
    "scaled",
    "splat",
    "splat_factor",
    "spliced",
    "store",
    "subtract",
    "swapped",
    "swapped_by_twos",
    "total",
    "transpose",
    "turned",
    "turned_in_fours",
    "whole_numbers",
]


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x16")


VECTOR = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


@intrinsic
def load(context, array, index):  # type: ignore[no-untyped-def]
    """Sixteen numbers of a float32 array, of a uint16 one that holds bfloat16, or of an int16 one
    that holds float16."""
    return VECTOR(array, types.uintp), LOADERS[array.dtype]


@intrinsic
def load_factors(context, array, index):  # type: ignore[no-untyped-def]
    """Sixteen numbers of an array of uint16 that holds float16, or of uint32 that holds float32."""
    as_held = types.int16 if array.dtype.bitwidth == 16 else types.float32
    return VECTOR(array, types.uintp), LOADERS[as_held]


@intrinsic
def whole_numbers(context, array, index):  # type: ignore[no-untyped-def]
    """Sixteen whole numbers of 32 bits, in an array of floats, as floats."""

    def widen(builder: Any, words: Any) -> Any:
        return builder.sitofp(words, FLOATS)

    return VECTOR(array, types.uintp), loader(WORD, 4, widen)


@intrinsic
def load_bytes(context, array, index):  # type: ignore[no-untyped-def]
    """Sixteen bytes as numbers."""
    return VECTOR(array, types.uintp), loader(BYTE, 1, widen_codes)


@intrinsic
def load_low(context, array, index):  # type: ignore[no-untyped-def]
    """The lower halves of sixteen bytes as numbers."""
    return VECTOR(array, types.uintp), loader(BYTE, 1, widen_low_codes)


@intrinsic
def load_high(context, array, index):  # type: ignore[no-untyped-def]
    """The upper halves of sixteen bytes as numbers."""
    return VECTOR(array, types.uintp), loader(BYTE, 1, widen_high_codes)


def _store_float32(builder: Any, vector: Any, place: Any) -> None:
    builder.store(vector, place).align = 4


def _store_bfloat16(builder: Any, vector: Any, place: Any) -> None:
    if HAS_PAIR_PRODUCTS:
        halves = builder.bitcast(narrowed(builder, vector), ir.VectorType(SHORT, WIDTH))
        builder.store(halves, place).align = 2
        return
    words, sixteen = builder.bitcast(vector, WORDS), constant(WORD, 16)
    odd = builder.and_(builder.lshr(words, sixteen), constant(WORD, 1))
    words = builder.add(words, builder.add(odd, constant(WORD, 0x7FFF)))
    halves = builder.trunc(builder.lshr(words, sixteen), ir.VectorType(SHORT, WIDTH))
    builder.store(halves, place).align = 2


_STORES = {types.float32: (FLOAT, _store_float32), types.uint16: (SHORT, _store_bfloat16)}


@intrinsic
def store(context, array, index, value):  # type: ignore[no-untyped-def]
    """Sixteen numbers into a float32 array, or a uint16 one that holds bfloat16: rounded to the
    nearest, ties to even."""
    kind, put = _STORES[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, vector = arguments
        put(builder, vector, place_of(context, builder, signature.args[0], data, place, kind))
        return context.get_dummy_value()

    return types.none(array, types.uintp, VECTOR), generate


@intrinsic
def splat(context, value):  # type: ignore[no-untyped-def]
    """One number sixteen times."""
    return VECTOR(types.float32), lambda c, builder, s, number: splat_number(builder, *number)


@intrinsic
def splat_factor(context, numbers, index):  # type: ignore[no-untyped-def]
    """A float16 by its bits, from a uint16 array, or a float32, from a uint32 one, sixteen
    times."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.load(address_of(context, builder, signature.args[0], *arguments))
        if bits.type.width == WORD.width:
            return splat_number(builder, builder.bitcast(bits, FLOAT))
        some = ir.VectorType(SHORT, HALF)
        one = builder.insert_element(ir.Constant(some, ir.Undefined), bits, ir.Constant(WORD, 0))
        same = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(WORD, HALF), [0] * HALF))
        halves = builder.bitcast(same, ir.VectorType(ir.HalfType(), HALF))
        wide = builder.fpext(halves, ir.VectorType(FLOAT, HALF))
        return joined(builder, wide, wide)

    return VECTOR(numbers, types.uintp), generate


@intrinsic
def add(context, a, b):  # type: ignore[no-untyped-def]
    """a + b"""
    return VECTOR(VECTOR, VECTOR), lambda c, builder, s, ab: builder.fadd(*ab)


@intrinsic
def subtract(context, a, b):  # type: ignore[no-untyped-def]
    """a - b"""
    return VECTOR(VECTOR, VECTOR), lambda c, builder, s, ab: builder.fsub(*ab)


@intrinsic
def multiply(context, a, b):  # type: ignore[no-untyped-def]
    """a * b"""
    return VECTOR(VECTOR, VECTOR), lambda c, builder, s, ab: builder.fmul(*ab)


@intrinsic
def quotient(context, a, b):  # type: ignore[no-untyped-def]
    """a / b"""
    return VECTOR(VECTOR, VECTOR), lambda c, builder, s, ab: builder.fdiv(*ab)


@intrinsic
def multiply_add(context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once"""
    return VECTOR(VECTOR, VECTOR, VECTOR), call("llvm.fma.v16f32", FLOATS)


@intrinsic
def transpose(context, x, start, pitch, out, place):  # type: ignore[no-untyped-def]
    """out[place + 16 k + i] = x[start + pitch i + k] for sixteen i and k, x as ``load`` has it and
    out float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, kinds = arguments[0], signature.args

        def at(index: int) -> Any:
            return ir.Constant(arguments[1].type, index)

        kept = []
        for row in range(WIDTH):
            index = builder.add(arguments[1], builder.mul(arguments[2], at(row)))
            kept.append(LOADERS[x.dtype](context, builder, types.none(kinds[0]), (data, index)))
        kept = turned(builder, kept)
        for column, vector in enumerate(kept):
            index = builder.add(arguments[4], at(WIDTH * column))
            target = place_of(context, builder, kinds[3], arguments[3], index, FLOAT)
            builder.store(vector, target, align=4)
        return context.get_dummy_value()

    index = types.uintp
    return types.none(x, index, index, out, index), generate


def turned_in_fours(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Of vectors of sixteen words, a multiple of four of them: row 4 i + j becomes, of each four
    columns, the column j of rows 4 i to 4 i + 3. Numbers first, then pairs of them."""
    fours = range(0, WIDTH, 4)
    low, high = ([k + i for k in fours for i in (j, j + WIDTH, j + 1, j + 17)] for j in (0, 2))
    low_pairs, high_pairs = (
        [k + i for k in fours for i in (j, j + 1, j + WIDTH, j + 17)] for j in (0, 2)
    )
    made = list(rows)
    for i in range(0, len(made), 2):
        a, b = rows[i], rows[i + 1]
        made[i], made[i + 1] = mixed(builder, a, b, low), mixed(builder, a, b, high)
    rows = list(made)
    for i in range(0, len(made), 4):
        for j in range(2):
            a, b = rows[i + j], rows[i + j + 2]
            made[i + 2 * j] = mixed(builder, a, b, low_pairs)
            made[i + 2 * j + 1] = mixed(builder, a, b, high_pairs)
    return made


def mixed(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """Sixteen words of a, and of b behind it, by their places."""
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, list(lanes)))


def turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of the sixteen columns of rows of four bytes each: within each four, then
    fours. Each step is one instruction where registers are wide."""
    even, odd = ([8 * k + i for k in range(4) for i in range(j, j + 4)] for j in (0, 4))
    made = turned_in_fours(builder, rows)
    found = list(made)
    for j in range(4):
        first, second, third, fourth = (made[4 * i + j] for i in range(4))
        left = mixed(builder, first, second, even), mixed(builder, first, second, odd)
        right = mixed(builder, third, fourth, even), mixed(builder, third, fourth, odd)
        found[j], found[j + 8] = (mixed(builder, left[0], right[0], own) for own in (even, odd))
        found[j + 4], found[j + 12] = (
            mixed(builder, left[1], right[1], own) for own in (even, odd)
        )
    return found


@intrinsic
def larger(context, a, b):  # type: ignore[no-untyped-def]
    """The larger of each pair; b where either is not a number."""

    return VECTOR(VECTOR, VECTOR), lambda c, builder, s, ab: larger_of(builder, *ab)


@intrinsic
def is_above(context, a, b):  # type: ignore[no-untyped-def]
    """1 where a > b, else 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one, zero = constant(FLOAT, 1.0), constant(FLOAT, 0.0)
        return builder.select(builder.fcmp_ordered(">", *arguments), one, zero)

    return VECTOR(VECTOR, VECTOR), generate


@intrinsic
def rounded(context, a):  # type: ignore[no-untyped-def]
    """To the nearest whole numbers."""
    return VECTOR(VECTOR), call("llvm.rint.v16f32", FLOATS)


def _swap(apart: int) -> Any:
    lanes = [place ^ apart for place in range(WIDTH)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.shuffle_vector(*arguments, *arguments, ir.Constant(WORDS, lanes))

    return generate


@intrinsic
def swapped(context, a):  # type: ignore[no-untyped-def]
    """Neighbours in each other's place."""
    return VECTOR(VECTOR), _swap(1)


@intrinsic
def swapped_by_twos(context, a):  # type: ignore[no-untyped-def]
    """Likewise of each four the first two and the others."""
    return VECTOR(VECTOR), _swap(2)


@intrinsic
def total(context, a):  # type: ignore[no-untyped-def]
    """The sum of the sixteen."""
    reduce = call("llvm.vector.reduce.fadd.v16f32", FLOAT, "reassoc")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return reduce(context, builder, signature, (ir.Constant(FLOAT, 0.0), *arguments))

    return types.float32(VECTOR), generate


@intrinsic
def largest(context, a):  # type: ignore[no-untyped-def]
    """The largest of the sixteen, none of which may be no number."""
    return types.float32(VECTOR), call("llvm.vector.reduce.fmax.v16f32", FLOAT, "nnan")


@intrinsic
def scaled(context, a, power):  # type: ignore[no-untyped-def]
    """a 2^power, for whole numbers from -126 to 127; -127 makes 0, where registers are wide what is
    too small for a float32 does."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, power = arguments
        if HAS_WIDE_REGISTERS:
            return scaled_by_powers(builder, a, power)
        whole = builder.add(builder.fptosi(power, WORDS), constant(WORD, 127))
        return builder.fmul(a, builder.bitcast(builder.shl(whole, constant(WORD, 23)), FLOATS))

    return VECTOR(VECTOR, VECTOR), generate


@intrinsic
def spliced(context, a, b, count):  # type: ignore[no-untyped-def]
    """The first ``count`` numbers of a, and those of b behind them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, count = arguments
        borders = ir.Constant(WORDS, ir.Undefined)
        border = builder.trunc(count, WORD)
        borders = builder.insert_element(borders, border, ir.Constant(WORD, 0))
        borders = builder.shuffle_vector(borders, borders, constant(WORD, 0))
        lanes = ir.Constant(WORDS, [*range(WIDTH)])
        return builder.select(builder.icmp_unsigned("<", lanes, borders), a, b)

    return VECTOR(VECTOR, VECTOR, types.uintp), generate


@intrinsic
def bits_of(context, number):  # type: ignore[no-untyped-def]
    """The bits of a float32."""
    return types.uint32(types.float32), lambda c, builder, s, a: builder.bitcast(a[0], WORD)


@intrinsic
def of_bits(context, bits):  # type: ignore[no-untyped-def]
    """The float32 that has these bits."""
    return types.float32(types.uint32), lambda c, builder, s, a: builder.bitcast(a[0], FLOAT)


@njit(nogil=True, inline="always")
def half_at(halves, index):  # type: ignore[no-untyped-def]
    """The float16 whose bits a uint16 array has there, not an infinite one. Its bits moved to where
    float32 has them make a number that is 2^112 times too small."""
    bits = np.uint32(halves[index])
    size = of_bits((bits & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    return of_bits(bits_of(size) | (bits & np.uint32(0x8000)) << np.uint32(16))


@njit(nogil=True, inline="always")
def factor_at(numbers, index):  # type: ignore[no-untyped-def]
    """A float16 by its bits, from a uint16 array, or a float32, from a uint32 one."""
    if numbers.itemsize == 2:
        return half_at(numbers, index)
    return of_bits(np.uint32(numbers[index]))


@njit(nogil=True, inline="always")
def number_at(numbers, index):  # type: ignore[no-untyped-def]
    """One number of a float32 array, or of a uint16 one that holds bfloat16."""
    if numbers.itemsize == 2:
        return of_bits(np.uint32(numbers[index]) << np.uint32(16))
    return np.float32(numbers[index])


@njit(nogil=True, inline="always")
def put_number(numbers, index, value):  # type: ignore[no-untyped-def]
    """A float32 into such an array, as ``store`` does."""
    if numbers.itemsize == 2:
        bits = bits_of(value)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        numbers[index] = (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)
    else:
        numbers[index] = value
