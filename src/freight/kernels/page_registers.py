"""What single queries meet a page with: vectors of sixteen whose halves come from two places, for
processors whose registers are too few for as many whole ones, and sums of vectors, put side by
side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from freight.kernels.llvm import FLOAT, SHORT, WIDTH, WORD, WORDS, address_of
from freight.kernels.vectors import VECTOR

__all__ = [
    "HALF",
    "load_both",
    "load_twice",
    "put_totals",
    "put_totals_of_halves",
    "put_totals_of_pairs",
]

HALF: Final = WIDTH // 2
_FLOATS: Final = ir.VectorType(FLOAT, HALF)
_WORDS: Final = ir.VectorType(WORD, HALF)


def _eight_at(context: Any, builder: Any, array: Any, data: Any, index: Any) -> Any:
    """Eight numbers of a float32 array, or of a uint16 one that holds bfloat16."""
    is_wide = array.dtype == types.float32
    place = address_of(context, builder, array, data, index)
    kind = _FLOATS if is_wide else ir.VectorType(SHORT, HALF)
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()), align=4 if is_wide else 2)
    if is_wide:
        return loaded
    words = builder.shl(builder.zext(loaded, _WORDS), ir.Constant(_WORDS, [16] * HALF))
    return builder.bitcast(words, _FLOATS)


def _joined(builder: Any, low: Any, high: Any) -> Any:
    return builder.shuffle_vector(low, high, ir.Constant(WORDS, [*range(WIDTH)]))


@intrinsic
def load_both(context, array, index, other):  # type: ignore[no-untyped-def]
    """Eight numbers from one place on and eight from another: of a float32 array, or of a uint16
    one that holds bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, *places = arguments
        kind = signature.args[0]
        return _joined(builder, *(_eight_at(context, builder, kind, data, at) for at in places))

    return VECTOR(array, types.uintp, types.uintp), generate


@intrinsic
def load_twice(context, array, index):  # type: ignore[no-untyped-def]
    """Eight numbers, twice."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own = _eight_at(context, builder, signature.args[0], *arguments)
        return _joined(builder, own, own)

    return VECTOR(array, types.uintp), generate


def _totals(builder: Any, vectors: list[Any], width: int = WIDTH) -> Any:
    """The sums of each ``width`` numbers of 4 or 8 vectors, side by side, as often as there is
    room. Neighbours trade every second number and are added, which leaves half as many vectors,
    then pairs, then fours: a third of the work of summing each by itself."""
    lanes = range(WIDTH)
    size = 1
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        mine = ir.Constant(WORDS, [i if not i & size else WIDTH + i - size for i in lanes])
        given = ir.Constant(WORDS, [i + size if not i & size else WIDTH + i for i in lanes])
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, mine), builder.shuffle_vector(a, b, given))
            for a, b in pairs
        ]
        size *= 2
    found = vectors[0]
    while size < width:
        mask = ir.Constant(WORDS, [i ^ size for i in lanes])
        found = builder.fadd(found, builder.shuffle_vector(found, found, mask))
        size *= 2
    return found


def _put(builder: Any, found: Any, lanes: Sequence[int], place: Any) -> None:
    """Some numbers of a vector, side by side."""
    mask = ir.Constant(ir.VectorType(WORD, len(lanes)), [*lanes])
    some = builder.shuffle_vector(found, found, mask)
    target = builder.bitcast(place, ir.VectorType(FLOAT, len(lanes)).as_pointer())
    builder.store(some, target).align = 4


@intrinsic
def put_totals_of_pairs(context, array, index, stride, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    """array[index], array[index + 1] = the sums of the sixteen of a and of b, those of c and d
    ``stride`` further, and so on; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, step, *vectors = arguments
        found = _totals(builder, vectors)
        for pair in range(4):
            at = address_of(context, builder, signature.args[0], data, place)
            _put(builder, found, (2 * pair, 2 * pair + 1), at)
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
        _put(builder, _totals(builder, vectors), range(4), at)
        return context.get_dummy_value()

    return types.none(array, types.uintp, *[VECTOR] * 4), generate


@intrinsic
def put_totals_of_halves(context, array, index, stride, a, b, c, d):  # type: ignore[no-untyped-def]
    """array[index], array[index + 1] = the sums of the halves of a, those of b ``stride`` further,
    and so on; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, step, *vectors = arguments
        found = _totals(builder, vectors, HALF)
        for number in range(len(vectors)):
            at = address_of(context, builder, signature.args[0], data, place)
            _put(builder, found, (number, number + HALF), at)
            place = builder.add(place, step)
        return context.get_dummy_value()

    whole = types.uintp
    return types.none(array, whole, whole, *[VECTOR] * 4), generate
