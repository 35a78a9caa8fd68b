"""Floats rounded to bfloat16, sixteen and more at once: numbers, pairs, and lines that go by the
caches, for loops that numba compiles. Indices count elements; nothing is checked."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from freight.kernels.llvm import (
    FLOAT,
    FLOATS,
    SHORT,
    WIDTH,
    WORD,
    WORDS,
    address_of,
    constant,
    narrowed,
    narrowed_both,
    narrowed_pairs,
    place_of,
)
from freight.kernels.vectors import VECTOR, turned

__all__ = [
    "as_kept",
    "put_line",
    "put_narrowed",
    "put_narrowed_pairs",
    "put_pairs",
    "put_turned",
]

binding.initialize_native_asmparser()


@intrinsic
def as_kept(context, value):  # type: ignore[no-untyped-def]
    """Sixteen numbers as they are when they have been rounded to bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        halves = builder.bitcast(narrowed(builder, *arguments), ir.VectorType(SHORT, WIDTH))
        words = builder.shl(builder.zext(halves, WORDS), constant(WORD, 16))
        return builder.bitcast(words, FLOATS)

    return VECTOR(VECTOR), generate


@intrinsic
def put_narrowed(context, out, place, first, second):  # type: ignore[no-untyped-def]
    """Sixteen numbers of ``first``, rounded to bfloat16, from ``place`` of an array of words on,
    and behind them sixteen of ``second``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index, one, other = arguments
        target = place_of(context, builder, signature.args[0], data, index, WORD)
        both = narrowed_both(builder, one, other)
        builder.store(both, builder.bitcast(target, both.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(out, types.uintp, VECTOR, VECTOR), generate


@intrinsic
def put_narrowed_pairs(context, out, place, first, second):  # type: ignore[no-untyped-def]
    """Sixteen pairs of bfloat16 from ``place`` of an array of words on, each of a number of
    ``first`` and one of ``second``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index, one, other = arguments
        target = place_of(context, builder, signature.args[0], data, index, FLOAT)
        builder.store(narrowed_pairs(builder, one, other), target, align=4)
        return context.get_dummy_value()

    return types.none(out, types.uintp, VECTOR, VECTOR), generate


@intrinsic
def put_pairs(context, out, place, apart, x, first, second):  # type: ignore[no-untyped-def]
    """Sixteen pairs of bfloat16 from ``place`` of a float32 array on, and sixteen more ``apart``
    from these, each of a number from ``first`` of a uint16 one on and one from ``second``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index, apart, source, *begins = arguments
        kinds, both = signature.args, ir.VectorType(SHORT, 2 * WIDTH)
        one, other = (
            builder.load(
                builder.bitcast(
                    address_of(context, builder, kinds[3], source, begin), both.as_pointer()
                ),
                align=2,
            )
            for begin in begins
        )
        for half in range(2):
            lanes = [k for i in range(WIDTH * half, WIDTH * (half + 1)) for k in (i, 2 * WIDTH + i)]
            mask = ir.Constant(ir.VectorType(WORD, 2 * WIDTH), lanes)
            pairs = builder.bitcast(builder.shuffle_vector(one, other, mask), FLOATS)
            at = builder.add(index, apart) if half else index
            target = place_of(context, builder, kinds[0], data, at, FLOAT)
            builder.store(pairs, target, align=4)
        return context.get_dummy_value()

    index = types.uintp
    return types.none(out, index, index, x, index, index), generate


def _put_by_caches(builder: Any, place: Any, line: Any) -> None:
    """A whole line to where one begins. As LLVM's own store it would be one of bfloat16 again, of
    which LLVM has none that goes by the caches."""
    place = builder.bitcast(place, FLOATS.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, FLOATS])
    builder.asm(kind, "vmovntps $1, ($0)", "r,v,~{memory}", [place, line], side_effect=True)


@intrinsic
def put_turned(context, sums, start, out, place, pitch):  # type: ignore[no-untyped-def]
    """out[place + pitch i + k] = sums[start + 16 k + i] rounded to bfloat16, for sixteen i and
    thirty-two k: whole cache lines, where out must have them begin, that go by the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, first, target, begin, apart = arguments
        kinds = signature.args

        def row(number: int) -> Any:
            index = builder.add(first, ir.Constant(first.type, WIDTH * number))
            return builder.load(place_of(context, builder, kinds[0], data, index, FLOAT), align=4)

        pairs = [narrowed_pairs(builder, row(2 * k), row(2 * k + 1)) for k in range(WIDTH)]
        for token, line in enumerate(turned(builder, pairs)):
            index = builder.add(begin, builder.mul(apart, ir.Constant(apart.type, token)))
            at = place_of(context, builder, kinds[2], target, index, SHORT)
            _put_by_caches(builder, at, line)
        return context.get_dummy_value()

    index = types.uintp
    return types.none(sums, index, out, index, index), generate


@intrinsic
def put_line(context, out, place, low, high):  # type: ignore[no-untyped-def]
    """Twice sixteen numbers rounded to bfloat16 into a uint16 array: a whole cache line, which
    ``place`` begins. It goes by the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index, *halves = arguments
        kind = ir.VectorType(FLOAT, WIDTH // 2)
        own = [builder.bitcast(narrowed(builder, half), kind) for half in halves]
        line = builder.shuffle_vector(*own, ir.Constant(WORDS, list(range(WIDTH))))
        target = place_of(context, builder, signature.args[0], data, index, SHORT)
        _put_by_caches(builder, target, line)
        return context.get_dummy_value()

    return types.none(out, types.uintp, VECTOR, VECTOR), generate
