"""Sixteen floats at once, for loops that numba compiles.

LLVM makes vectors of simple loops by itself, but not of sums over short rows, of packed integers or
of exponentials. These operations say it in LLVM's own terms: any processor runs them, in as many
registers as it needs. Indices count elements; nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

__all__ = [
    "PANEL_ROWS",
    "WIDTH",
    "add",
    "add_products",
    "bits_of",
    "factor_at",
    "half_at",
    "is_above",
    "larger",
    "largest",
    "load",
    "load_bytes",
    "load_high",
    "load_low",
    "multiply",
    "multiply_add",
    "of_bits",
    "prefetch",
    "quotient",
    "rounded",
    "splat",
    "store",
    "subtract",
    "total",
    "transpose",
    "two_to",
]

WIDTH: Final = 16

PANEL_ROWS: Final = 12 if get_host_cpu_features().get("avx512f") else 6
"""Rows whose sums, sixteen of each, stay in registers together: as many as hide how long it takes
to add to one, and no more than there is room for."""

_FLOAT, _BYTE, _SHORT, _WORD = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_WORDS = ir.VectorType(_WORD, WIDTH)


def _use_wide_registers() -> None:
    """LLVM splits these vectors in two where it takes a processor for one that slows down with
    wide ones, which those that are sold now do not."""
    features = get_host_cpu_features()
    if features.get("avx512f") and not numba.config.CPU_FEATURES:
        numba.config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"


_use_wide_registers()


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_VECTOR = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _constant(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, WIDTH), [value] * WIDTH)


def _place(context: Any, builder: Any, array: Any, data: Any, index: Any, kind: ir.Type) -> Any:
    """Where sixteen elements of an array begin."""
    start = context.make_array(array)(context, builder, data).data
    place = builder.gep(builder.bitcast(start, kind.as_pointer()), [index])
    return builder.bitcast(place, ir.VectorType(kind, WIDTH).as_pointer())


def _loader(kind: ir.Type, num_bytes: int, widen: Callable[[Any, Any], Any]) -> Any:
    """An operation that loads sixteen elements and makes floats of them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index = arguments
        place = _place(context, builder, signature.args[0], data, index, kind)
        loaded = builder.load(place)
        loaded.align = num_bytes
        return widen(builder, loaded)

    return generate


def _widen_bfloat16(builder: Any, halves: Any) -> Any:
    words = builder.shl(builder.zext(halves, _WORDS), _constant(_WORD, 16))
    return builder.bitcast(words, _FLOATS)


def _widen_float16(builder: Any, halves: Any) -> Any:
    return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), WIDTH)), _FLOATS)


def _widen_codes(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.zext(codes, _WORDS), _FLOATS)


_LOADERS = {
    types.float32: _loader(_FLOAT, 4, lambda builder, floats: floats),
    types.uint16: _loader(_SHORT, 2, _widen_bfloat16),
    types.int16: _loader(_SHORT, 2, _widen_float16),
}


@intrinsic
def load(context, array, index):  # type: ignore[no-untyped-def]
    """Sixteen numbers of a float32 array, of a uint16 one that holds bfloat16, or of an int16 one
    that holds float16."""
    return _VECTOR(array, types.uintp), _LOADERS[array.dtype]


@intrinsic
def load_bytes(context, array, index):  # type: ignore[no-untyped-def]
    """Sixteen bytes as numbers."""
    return _VECTOR(array, types.uintp), _loader(_BYTE, 1, _widen_codes)


@intrinsic
def load_low(context, array, index):  # type: ignore[no-untyped-def]
    """The lower halves of sixteen bytes as numbers."""
    low = _loader(_BYTE, 1, lambda b, raw: _widen_codes(b, b.and_(raw, _constant(_BYTE, 15))))
    return _VECTOR(array, types.uintp), low


@intrinsic
def load_high(context, array, index):  # type: ignore[no-untyped-def]
    """The upper halves of sixteen bytes as numbers."""
    high = _loader(_BYTE, 1, lambda b, raw: _widen_codes(b, b.lshr(raw, _constant(_BYTE, 4))))
    return _VECTOR(array, types.uintp), high


def _store_float32(builder: Any, vector: Any, place: Any) -> None:
    builder.store(vector, place).align = 4


def _store_bfloat16(builder: Any, vector: Any, place: Any) -> None:
    words, sixteen = builder.bitcast(vector, _WORDS), _constant(_WORD, 16)
    odd = builder.and_(builder.lshr(words, sixteen), _constant(_WORD, 1))
    words = builder.add(words, builder.add(odd, _constant(_WORD, 0x7FFF)))
    halves = builder.trunc(builder.lshr(words, sixteen), ir.VectorType(_SHORT, WIDTH))
    builder.store(halves, place).align = 2


_STORES = {types.float32: (_FLOAT, _store_float32), types.uint16: (_SHORT, _store_bfloat16)}


@intrinsic
def store(context, array, index, value):  # type: ignore[no-untyped-def]
    """Sixteen numbers into a float32 array, or a uint16 one that holds bfloat16: rounded to the
    nearest, ties to even."""
    kind, put = _STORES[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, vector = arguments
        put(builder, vector, _place(context, builder, signature.args[0], data, place, kind))
        return context.get_dummy_value()

    return types.none(array, types.uintp, _VECTOR), generate


def _splat(builder: Any, number: Any) -> Any:
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, one, _constant(_WORD, 0))


@intrinsic
def splat(context, value):  # type: ignore[no-untyped-def]
    """One number sixteen times."""
    return _VECTOR(types.float32), lambda c, builder, s, arguments: _splat(builder, arguments[0])


def _call(name: str, result: ir.Type, *flags: str) -> Any:
    """What calls one of LLVM's own functions."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, arguments, fastmath=flags)

    return generate


@intrinsic
def add(context, a, b):  # type: ignore[no-untyped-def]
    """a + b"""
    return _VECTOR(_VECTOR, _VECTOR), lambda c, builder, s, ab: builder.fadd(*ab)


@intrinsic
def subtract(context, a, b):  # type: ignore[no-untyped-def]
    """a - b"""
    return _VECTOR(_VECTOR, _VECTOR), lambda c, builder, s, ab: builder.fsub(*ab)


@intrinsic
def multiply(context, a, b):  # type: ignore[no-untyped-def]
    """a * b"""
    return _VECTOR(_VECTOR, _VECTOR), lambda c, builder, s, ab: builder.fmul(*ab)


@intrinsic
def quotient(context, a, b):  # type: ignore[no-untyped-def]
    """a / b"""
    return _VECTOR(_VECTOR, _VECTOR), lambda c, builder, s, ab: builder.fdiv(*ab)


@intrinsic
def multiply_add(context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once"""
    return _VECTOR(_VECTOR, _VECTOR, _VECTOR), _call("llvm.fma.v16f32", _FLOATS)


@intrinsic
def add_products(context, rows, pitch, x, start, count, sums, place):  # type: ignore[no-untyped-def]
    """sums[place + 16 r + i] += rows[pitch r + k] * x[start + 16 k + i], over ``count`` numbers k,
    sixteen i, and PANEL_ROWS rows r. All are float32; the sums stay in registers meanwhile."""
    fused = _call("llvm.fma.v16f32", _FLOATS)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def begin(number: int, index: Any) -> Any:
            array = context.make_array(signature.args[number])
            return builder.gep(array(context, builder, arguments[number]).data, [index])

        def sixteen(place: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(place, [index]), _FLOATS.as_pointer())

        def at(index: int) -> Any:
            return ir.Constant(arguments[1].type, index)

        own_rows, own_x, own_sums = begin(0, at(0)), begin(2, arguments[3]), begin(5, arguments[6])
        kept = [cgutils.alloca_once(builder, _FLOATS) for _ in range(PANEL_ROWS)]
        for row, sums_of_row in enumerate(kept):
            builder.store(builder.load(sixteen(own_sums, at(WIDTH * row)), align=4), sums_of_row)
        with cgutils.for_range(builder, arguments[4]) as loop:
            values = builder.load(sixteen(own_x, builder.mul(loop.index, at(WIDTH))), align=4)
            for row, sums_of_row in enumerate(kept):
                index = builder.add(loop.index, builder.mul(arguments[1], at(row)))
                factor = _splat(builder, builder.load(builder.gep(own_rows, [index])))
                added = fused(context, builder, None, (factor, values, builder.load(sums_of_row)))
                builder.store(added, sums_of_row)
        for row, sums_of_row in enumerate(kept):
            place = sixteen(own_sums, at(WIDTH * row))
            builder.store(builder.load(sums_of_row), place, align=4)
        return context.get_dummy_value()

    index = types.uintp
    return types.none(rows, index, x, index, index, sums, index), generate


@intrinsic
def transpose(context, x, start, pitch, out, place):  # type: ignore[no-untyped-def]
    """out[place + 16 k + i] = x[start + pitch i + k] for sixteen i and k, both float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def sixteen(array: Any, data: Any, index: Any) -> Any:
            return _place(context, builder, array, data, index, _FLOAT)

        def at(index: int) -> Any:
            return ir.Constant(arguments[1].type, index)

        kept = []
        for row in range(WIDTH):
            index = builder.add(arguments[1], builder.mul(arguments[2], at(row)))
            kept.append(builder.load(sixteen(signature.args[0], arguments[0], index), align=4))
        # Neighbours trade every second number, then pairs of numbers, then fours and eights.
        for size in (1, 2, 4, 8):
            kept = _trade(builder, kept, size)
        for column, vector in enumerate(kept):
            index = builder.add(arguments[4], at(WIDTH * column))
            builder.store(vector, sixteen(signature.args[3], arguments[3], index), align=4)
        return context.get_dummy_value()

    index = types.uintp
    return types.none(x, index, index, out, index), generate


def _trade(builder: Any, rows: list[Any], size: int) -> list[Any]:
    """Rows that are ``size`` apart trade every second run of so many numbers."""
    traded = list(rows)
    for row in range(WIDTH):
        if row & size:
            continue
        mine, other = rows[row], rows[row + size]
        kept = [i if not i & size else WIDTH + i - size for i in range(WIDTH)]
        given = [i + size if not i & size else WIDTH + i for i in range(WIDTH)]
        for target, lanes in ((row, kept), (row + size, given)):
            mask = ir.Constant(_WORDS, lanes)
            traded[target] = builder.shuffle_vector(mine, other, mask)
    return traded


@intrinsic
def larger(context, a, b):  # type: ignore[no-untyped-def]
    """The larger of each pair; b where either is not a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = arguments
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return _VECTOR(_VECTOR, _VECTOR), generate


@intrinsic
def is_above(context, a, b):  # type: ignore[no-untyped-def]
    """1 where a > b, else 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one, zero = _constant(_FLOAT, 1.0), _constant(_FLOAT, 0.0)
        return builder.select(builder.fcmp_ordered(">", *arguments), one, zero)

    return _VECTOR(_VECTOR, _VECTOR), generate


@intrinsic
def rounded(context, a):  # type: ignore[no-untyped-def]
    """To the nearest whole numbers."""
    return _VECTOR(_VECTOR), _call("llvm.rint.v16f32", _FLOATS)


@intrinsic
def total(context, a):  # type: ignore[no-untyped-def]
    """The sum of the sixteen."""
    reduce = _call("llvm.vector.reduce.fadd.v16f32", _FLOAT, "reassoc")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return reduce(context, builder, signature, (ir.Constant(_FLOAT, 0.0), *arguments))

    return types.float32(_VECTOR), generate


@intrinsic
def largest(context, a):  # type: ignore[no-untyped-def]
    """The largest of the sixteen, none of which may be no number."""
    return types.float32(_VECTOR), _call("llvm.vector.reduce.fmax.v16f32", _FLOAT, "nnan")


@intrinsic
def two_to(context, a):  # type: ignore[no-untyped-def]
    """2^a, for whole numbers from -126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        power = builder.add(builder.fptosi(arguments[0], _WORDS), _constant(_WORD, 127))
        return builder.bitcast(builder.shl(power, _constant(_WORD, 23)), _FLOATS)

    return _VECTOR(_VECTOR), generate


@intrinsic
def bits_of(context, number):  # type: ignore[no-untyped-def]
    """The bits of a float32."""
    return types.uint32(types.float32), lambda c, builder, s, a: builder.bitcast(a[0], _WORD)


@intrinsic
def of_bits(context, bits):  # type: ignore[no-untyped-def]
    """The float32 that has these bits."""
    return types.float32(types.uint32), lambda c, builder, s, a: builder.bitcast(a[0], _FLOAT)


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


@intrinsic
def prefetch(context, array, index):  # type: ignore[no-untyped-def]
    """Have the cache line of an element brought; it need not be there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place = arguments
        start = context.make_array(signature.args[0])(context, builder, data).data
        at = builder.bitcast(builder.gep(start, [place]), _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [at.type, _WORD, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [at, *(ir.Constant(_WORD, number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(array, types.uintp), generate
