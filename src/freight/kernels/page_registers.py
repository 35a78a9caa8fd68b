"""What single queries meet a page with: vectors of sixteen whose halves come from two places, for
processors whose registers are too few for as many whole ones, and sums of vectors, put side by
side."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from freight.kernels.llvm import HALF, address_of, eight_at, joined, put_lanes, totals
from freight.kernels.vectors import VECTOR

__all__ = [
    "load_both",
    "load_twice",
    "put_totals",
    "put_totals_of_halves",
    "put_totals_of_pairs",
]


@intrinsic
def load_both(context, array, index, other):  # type: ignore[no-untyped-def]
    """Eight numbers from one place on and eight from another: of a float32 array, or of a uint16
    one that holds bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, *places = arguments
        kind = signature.args[0]
        return joined(builder, *(eight_at(context, builder, kind, data, at) for at in places))

    return VECTOR(array, types.uintp, types.uintp), generate


@intrinsic
def load_twice(context, array, index):  # type: ignore[no-untyped-def]
    """Eight numbers, twice."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own = eight_at(context, builder, signature.args[0], *arguments)
        return joined(builder, own, own)

    return VECTOR(array, types.uintp), generate


@intrinsic
def put_totals_of_pairs(context, array, index, stride, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    """array[index], array[index + 1] = the sums of the sixteen of a and of b, those of c and d
    ``stride`` further, and so on; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, step, *vectors = arguments
        found = totals(builder, vectors)
        for pair in range(4):
            at = address_of(context, builder, signature.args[0], data, place)
            put_lanes(builder, found, (2 * pair, 2 * pair + 1), at)
            place = builder.add(place, step)
        return context.get_dummy_value()

    whole = types.uintp
    return types.none(array, whole, whole, *[VECTOR] * 8), generate


@intrinsic
def put_totals(context, array, index, a, b, c, d):  # type: ignore[no-untyped-def]
    """The sums of the sixteen of each, side by side from array[index] on; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, *vectors = arguments
        at = address_of(context, builder, signature.args[0], data, place)
        put_lanes(builder, totals(builder, vectors), range(4), at)
        return context.get_dummy_value()

    return types.none(array, types.uintp, *[VECTOR] * 4), generate


@intrinsic
def put_totals_of_halves(context, array, index, stride, a, b, c, d):  # type: ignore[no-untyped-def]
    """array[index], array[index + 1] = the sums of the halves of a, those of b ``stride`` further,
    and so on; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, step, *vectors = arguments
        found = totals(builder, vectors, HALF)
        for number in range(len(vectors)):
            at = address_of(context, builder, signature.args[0], data, place)
            put_lanes(builder, found, (number, number + HALF), at)
            place = builder.add(place, step)
        return context.get_dummy_value()

    whole = types.uintp
    return types.none(array, whole, whole, *[VECTOR] * 4), generate
