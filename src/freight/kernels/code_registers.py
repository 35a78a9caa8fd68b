"""Codes of a group as pairs of bfloat16, in registers of 64 bytes: 4-bit ones are looked up, as a
group has but sixteen values. For processors that multiply such pairs."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from freight.kernels.llvm import (
    BYTE,
    FLOAT,
    FLOATS,
    SHORT,
    WIDTH,
    WORD,
    address_of,
    narrowed,
    narrowed_both,
    power_of_two,
    splat,
    widen_codes,
)
from freight.kernels.micro import MAGNITUDES
from freight.kernels.micro_registers import eights

__all__ = [
    "LINE",
    "factors_at",
    "fours_table",
    "group_table",
    "levels_table",
    "look_up",
    "put_bytes",
    "put_eights",
    "put_high_halves",
    "put_low_halves",
    "put_short_group",
    "put_two_groups",
]

LINE: Final = 2 * WIDTH
"""Numbers of bfloat16 in 64 bytes."""

_LINE: Final = ir.VectorType(SHORT, LINE)
_LINE_BYTES: Final = 64
_INDEX = types.uintp


class _Table(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="bfloat16x32")


_TABLE = _Table()


@register_model(_Table)
class _TableModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _LINE)


def _factor(context: Any, builder: Any, kind: Any, numbers: Any, index: Any) -> Any:
    """A scale, or a minimum: float16 by its bits, or float32. The former is widened in a register
    that holds nothing else: told of one number alone, the compiler puts it beside what was last in
    some register, and each group waits for the one before it."""
    bits = builder.load(address_of(context, builder, kind, numbers, index))
    if kind.dtype.bitwidth != 16:
        return builder.bitcast(bits, FLOAT)
    nothing = ir.Constant(ir.VectorType(SHORT, 8), [0] * 8)
    halves = builder.insert_element(nothing, bits, ir.Constant(WORD, 0))
    halves = builder.bitcast(halves, ir.VectorType(ir.HalfType(), 8))
    first = builder.shuffle_vector(halves, halves, _lanes(*range(4)))
    found = builder.fpext(first, ir.VectorType(FLOAT, 4))
    return builder.extract_element(found, ir.Constant(WORD, 0))


def _value(builder: Any, codes: Any, scale: Any, lowest: Any) -> Any:
    """Rounded in two steps, as the reference does, and then to bfloat16."""
    found = builder.fadd(builder.fmul(codes, splat(builder, scale)), splat(builder, lowest))
    return builder.bitcast(narrowed(builder, found), ir.VectorType(SHORT, WIDTH))


def _lanes(*lanes: int) -> Any:
    return ir.Constant(ir.VectorType(WORD, len(lanes)), lanes)


@intrinsic
def group_table(context, numbers, scale, lowest):  # type: ignore[no-untyped-def]
    """The values of a group's sixteen codes, twice, so that of an index four bits count."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, *places = arguments
        factors = [_factor(context, builder, signature.args[0], data, own) for own in places]
        values = _value(builder, ir.Constant(FLOATS, [float(i) for i in range(WIDTH)]), *factors)
        return builder.shuffle_vector(values, values, _lanes(*range(WIDTH), *range(WIDTH)))

    return _TABLE(numbers, _INDEX, _INDEX), generate


@intrinsic
def fours_table(context, raw, place):  # type: ignore[no-untyped-def]
    """What the sixteen floats of 4 bits are times two to the power of a byte less 127, twice."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = address_of(context, builder, signature.args[0], *arguments)
        scale = power_of_two(builder, builder.load(place))
        numbers = ir.Constant(FLOATS, [*MAGNITUDES, *(-own for own in MAGNITUDES)])
        found = narrowed(builder, builder.fmul(numbers, scale))
        values = builder.bitcast(found, ir.VectorType(SHORT, WIDTH))
        return builder.shuffle_vector(values, values, _lanes(*range(WIDTH), *range(WIDTH)))

    return _TABLE(raw, _INDEX), generate


@intrinsic
def levels_table(context, levels, first, second):  # type: ignore[no-untyped-def]
    """What sixteen levels, float32, are times two scales, those of the first before the others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, *scales = arguments
        place = address_of(context, builder, signature.args[0], data, ir.Constant(WORD, 0))
        own = builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4)
        found = [builder.fmul(own, splat(builder, scale)) for scale in scales]
        return builder.bitcast(narrowed_both(builder, *found), _LINE)

    return _TABLE(levels, types.float32, types.float32), generate


def look_up(builder: Any, table: Any, indices: Any) -> Any:
    """By the lower five bits of each."""
    kind = ir.FunctionType(_LINE, [_LINE, _LINE])
    name = "llvm.x86.avx512.permvar.hi.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [table, indices])


def _bytes(context: Any, builder: Any, kind: Any, raw: Any, start: Any, count: int) -> Any:
    place = address_of(context, builder, kind, raw, start)
    return builder.load(builder.bitcast(place, ir.VectorType(BYTE, count).as_pointer()), align=1)


def _put(builder: Any, place: Any, found: Any, align: int) -> None:
    builder.store(found, builder.bitcast(place, found.type.as_pointer()), align=align)


def _put_looked_up(num_bytes: int, indices_of: Any) -> Any:
    """What stores a line, looked up by what becomes of so many bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, place, raw, start, table = arguments
        own = _bytes(context, builder, signature.args[2], raw, start, num_bytes)
        wide = builder.zext(own, ir.VectorType(SHORT, num_bytes))
        found = look_up(builder, table, indices_of(builder, wide))
        _put(builder, address_of(context, builder, signature.args[0], out, place), found, 4)
        return context.get_dummy_value()

    return generate


def _high(builder: Any, wide: Any) -> Any:
    return builder.lshr(wide, ir.Constant(wide.type, [4] * wide.type.count))


def _both(builder: Any, wide: Any) -> Any:
    return builder.shuffle_vector(wide, _high(builder, wide), _lanes(*range(LINE)))


def _signature(out: Any, raw: Any) -> Any:
    return types.none(out, _INDEX, raw, _INDEX, _TABLE)


@intrinsic
def put_low_halves(context, out, place, raw, start, table):  # type: ignore[no-untyped-def]
    """A line from out[place] on: what the lower halves of 32 bytes from ``start`` on stand for."""
    return _signature(out, raw), _put_looked_up(LINE, lambda builder, wide: wide)


@intrinsic
def put_high_halves(context, out, place, raw, start, table):  # type: ignore[no-untyped-def]
    """Likewise the upper halves."""
    return _signature(out, raw), _put_looked_up(LINE, _high)


@intrinsic
def put_short_group(context, out, place, raw, start, table):  # type: ignore[no-untyped-def]
    """Likewise the lower halves of sixteen bytes, and then the upper ones."""
    return _signature(out, raw), _put_looked_up(WIDTH, _both)


@intrinsic
def put_two_groups(context, out, place, raw, start, table):  # type: ignore[no-untyped-def]
    """As ``put_short_group``, the upper halves by the second half of the table."""

    def indices(builder: Any, wide: Any) -> Any:
        high = builder.or_(_high(builder, wide), ir.Constant(wide.type, [WIDTH] * WIDTH))
        low = builder.and_(wide, ir.Constant(wide.type, [WIDTH - 1] * WIDTH))
        return builder.shuffle_vector(low, high, _lanes(*range(LINE)))

    return _signature(out, raw), _put_looked_up(WIDTH, indices)


@intrinsic
def put_eights(context, out, place, raw, start, scale):  # type: ignore[no-untyped-def]
    """Half a line from out[place] on: sixteen floats of 8 bits, times a scale."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, data, start, factor = arguments
        own = eights(builder, _bytes(context, builder, signature.args[2], data, start, WIDTH))
        found = narrowed(builder, builder.fmul(own, splat(builder, factor)))
        halves = builder.bitcast(found, ir.VectorType(SHORT, WIDTH))
        _put(builder, address_of(context, builder, signature.args[0], target, place), halves, 4)
        return context.get_dummy_value()

    return types.none(out, _INDEX, raw, _INDEX, types.float32), generate


@intrinsic
def put_bytes(context, out, place, raw, start, first, second):  # type: ignore[no-untyped-def]
    """A line from out[place] on: what 32 codes of a byte each stand for, sixteen by the ``first``
    (scale, minimum), and sixteen by the second."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, data, start, *pairs = arguments
        found = []
        for half, pair in enumerate(pairs):
            own = builder.add(start, ir.Constant(start.type, half * WIDTH))
            codes = _bytes(context, builder, signature.args[2], data, own, WIDTH)
            factors = [splat(builder, builder.extract_value(pair, number)) for number in range(2)]
            # Rounded in two steps, as the reference does.
            scaled = builder.fmul(widen_codes(builder, codes), factors[0])
            found.append(builder.fadd(scaled, factors[1]))
        where = address_of(context, builder, signature.args[0], target, place)
        _put(builder, where, narrowed_both(builder, *found), 4)
        return context.get_dummy_value()

    return types.none(out, _INDEX, raw, _INDEX, first, second), generate


@intrinsic
def factors_at(context, numbers, scale, lowest):  # type: ignore[no-untyped-def]
    """A scale and a minimum, as float32."""
    pair = types.UniTuple(types.float32, 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, *places = arguments
        found = [_factor(context, builder, signature.args[0], data, own) for own in places]
        return cgutils.pack_array(builder, found)

    return pair(numbers, _INDEX, _INDEX), generate
