"""Steps in LLVM's own terms, of which operations on sixteen floats are made.

LLVM makes vectors of simple loops by itself, but not of sums over short rows, of packed integers or
of exponentials. These say it: any processor runs them, in as many registers as it needs. What they
return is called while numba compiles a loop. Indices count elements; nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from freight.kernels.features import HAS_WIDE_REGISTERS, compiled_for

__all__ = [
    "BYTE",
    "FLOAT",
    "FLOATS",
    "HALF",
    "LOADERS",
    "SHORT",
    "WIDTH",
    "WORD",
    "WORDS",
    "added",
    "address_of",
    "call",
    "constant",
    "eight_at",
    "fetch",
    "joined",
    "larger_of",
    "loader",
    "narrowed",
    "narrowed_both",
    "narrowed_pairs",
    "pair_products",
    "place_of",
    "put_lanes",
    "scaled_by_powers",
    "splat",
    "totals",
    "widen_codes",
    "widen_high_codes",
    "widen_low_codes",
]

WIDTH: Final = 16
HALF: Final = WIDTH // 2

FLOAT: Final = ir.FloatType()
BYTE: Final = ir.IntType(8)
SHORT: Final = ir.IntType(16)
WORD: Final = ir.IntType(32)
FLOATS: Final = ir.VectorType(FLOAT, WIDTH)
WORDS: Final = ir.VectorType(WORD, WIDTH)

if HAS_WIDE_REGISTERS and not numba.config.CPU_FEATURES:
    numba.config.CPU_FEATURES = compiled_for()


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """One value sixteen times."""
    return ir.Constant(ir.VectorType(kind, WIDTH), [value] * WIDTH)


def address_of(context: Any, builder: Any, array: Any, data: Any, index: Any) -> Any:
    """Where an element of an array is."""
    return builder.gep(context.make_array(array)(context, builder, data).data, [index])


def place_of(context: Any, builder: Any, array: Any, data: Any, index: Any, kind: ir.Type) -> Any:
    """Where sixteen elements of a type begin in an array."""
    start = context.make_array(array)(context, builder, data).data
    place = builder.gep(builder.bitcast(start, kind.as_pointer()), [index])
    return builder.bitcast(place, ir.VectorType(kind, WIDTH).as_pointer())


def loader(kind: ir.Type, num_bytes: int, widen: Callable[[Any, Any], Any]) -> Any:
    """An operation that loads sixteen elements and makes floats of them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index = arguments
        place = place_of(context, builder, signature.args[0], data, index, kind)
        loaded = builder.load(place)
        loaded.align = num_bytes
        return widen(builder, loaded)

    return generate


def _widen_bfloat16(builder: Any, halves: Any) -> Any:
    count = halves.type.count
    words = ir.VectorType(WORD, count)
    wide = builder.shl(builder.zext(halves, words), ir.Constant(words, [16] * count))
    return builder.bitcast(wide, ir.VectorType(FLOAT, count))


def _widen_float16(builder: Any, halves: Any) -> Any:
    count = halves.type.count
    numbers = builder.bitcast(halves, ir.VectorType(ir.HalfType(), count))
    return builder.fpext(numbers, ir.VectorType(FLOAT, count))


def widen_codes(builder: Any, codes: Any) -> Any:
    """Sixteen bytes as floats."""
    return builder.sitofp(builder.zext(codes, WORDS), FLOATS)


def widen_low_codes(builder: Any, codes: Any) -> Any:
    """The lower halves of sixteen bytes as floats. Both halves are cut from the same words."""
    words = builder.zext(codes, WORDS)
    return builder.sitofp(builder.and_(words, constant(WORD, 15)), FLOATS)


def widen_high_codes(builder: Any, codes: Any) -> Any:
    """The upper halves likewise."""
    words = builder.zext(codes, WORDS)
    return builder.sitofp(builder.lshr(words, constant(WORD, 4)), FLOATS)


LOADERS: Final = {
    types.float32: loader(FLOAT, 4, lambda builder, floats: floats),
    types.uint16: loader(SHORT, 2, _widen_bfloat16),
    types.int16: loader(SHORT, 2, _widen_float16),
    types.uint32: loader(FLOAT, 4, lambda builder, pairs: pairs),
}
"""By what an array holds: float32, bfloat16 as uint16, float16 as int16; pairs of bfloat16 as
uint32, which are what ``pair_products`` takes and no numbers."""

_HALVES: Final[dict[Any, tuple[ir.Type, Callable[[Any, Any], Any]]]] = {
    types.float32: (FLOAT, lambda builder, floats: floats),
    types.uint16: (SHORT, _widen_bfloat16),
    types.int16: (SHORT, _widen_float16),
}


def eight_at(context: Any, builder: Any, array: Any, data: Any, index: Any) -> Any:
    """Half of a vector: eight numbers from an element on, of an array as LOADERS have it."""
    kind, widen = _HALVES[array.dtype]
    place = address_of(context, builder, array, data, index)
    pointer = builder.bitcast(place, ir.VectorType(kind, HALF).as_pointer())
    return widen(builder, builder.load(pointer, align=array.dtype.bitwidth // 8))


def joined(builder: Any, low: Any, high: Any) -> Any:
    """Two halves as a vector."""
    return builder.shuffle_vector(low, high, ir.Constant(WORDS, [*range(WIDTH)]))


def added(builder: Any, a: Any, b: Any) -> Any:
    """a + b"""
    return builder.fadd(a, b)


def larger_of(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; b where either is not a number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def totals(
    builder: Any,
    vectors: Sequence[Any],
    width: int = WIDTH,
    combine: Callable[[Any, Any, Any], Any] = added,
) -> Any:
    """The sums of each ``width`` numbers of 4, 8 or 16 vectors, side by side, as often as there is
    room, or what else ``combine`` makes of two. Neighbours trade every second number and are added,
    which leaves half as many vectors, then pairs, then fours: a third of the work of summing each
    by itself."""
    lanes = range(WIDTH)
    size = 1
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        mine = ir.Constant(WORDS, [i if not i & size else WIDTH + i - size for i in lanes])
        given = ir.Constant(WORDS, [i + size if not i & size else WIDTH + i for i in lanes])
        vectors = [
            combine(
                builder,
                builder.shuffle_vector(a, b, mine),
                builder.shuffle_vector(a, b, given),
            )
            for a, b in pairs
        ]
        size *= 2
    found = vectors[0]
    while size < width:
        mask = ir.Constant(WORDS, [i ^ size for i in lanes])
        found = combine(builder, found, builder.shuffle_vector(found, found, mask))
        size *= 2
    return found


def put_lanes(builder: Any, found: Any, lanes: Sequence[int], place: Any) -> None:
    """Some numbers of a vector, side by side."""
    mask = ir.Constant(ir.VectorType(WORD, len(lanes)), [*lanes])
    some = builder.shuffle_vector(found, found, mask)
    target = builder.bitcast(place, ir.VectorType(FLOAT, len(lanes)).as_pointer())
    builder.store(some, target).align = 4


def splat(builder: Any, number: Any) -> Any:
    """One number sixteen times."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, one, constant(WORD, 0))


def power_of_two(builder: Any, byte: Any) -> Any:
    """Two to the power of a byte less 127, sixteen times."""
    bits = builder.shl(builder.zext(byte, WORD), ir.Constant(WORD, 23))
    smallest = ir.Constant(WORD, 1 << 22)
    bits = builder.select(builder.icmp_unsigned("<", bits, smallest), smallest, bits)
    return splat(builder, builder.bitcast(bits, FLOAT))


def call(name: str, result: ir.Type, *flags: str) -> Any:
    """What calls one of LLVM's own functions."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, arguments, fastmath=flags)

    return generate


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """A type that llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_PAIRS: Final = ir.VectorType(_Bfloat16(), 2 * WIDTH)


def pair_products(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Each of sixteen sums plus both products of a pair of a and one of b."""
    kind = ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [sums, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)])


def scaled_by_powers(builder: Any, floats: Any, powers: Any) -> Any:
    """Sixteen floats times two to such powers, whole numbers, by one instruction."""
    mask, as_set = ir.IntType(16), ir.Constant(WORD, 4)
    kind = ir.FunctionType(FLOATS, [FLOATS, FLOATS, FLOATS, mask, WORD])
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [floats, powers, floats, ir.Constant(mask, -1), as_set])


def narrowed(builder: Any, floats: Any) -> Any:
    """Sixteen floats rounded to bfloat16, ties to even; those below its normal ones are zeros."""
    kind = ir.FunctionType(ir.VectorType(_Bfloat16(), WIDTH), [FLOATS])
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [floats])


def narrowed_both(builder: Any, first: Any, second: Any) -> Any:
    """Sixteen floats, and then another sixteen, rounded as ``narrowed``, by their bits."""
    kind = ir.FunctionType(_PAIRS, [FLOATS, FLOATS])
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    found = builder.call(function, [second, first])
    return builder.bitcast(found, ir.VectorType(SHORT, 2 * WIDTH))


def narrowed_pairs(builder: Any, first: Any, second: Any) -> Any:
    """Sixteen pairs, of a float of the first and one of the second, rounded as ``narrowed``."""
    halves = narrowed_both(builder, first, second)
    lanes = [place for k in range(WIDTH) for place in (k, k + WIDTH)]
    mask = ir.Constant(ir.VectorType(WORD, 2 * WIDTH), lanes)
    return builder.bitcast(builder.shuffle_vector(halves, halves, mask), FLOATS)


def fetch(builder: Any, place: Any, *, near: bool = True) -> None:
    """Have the cache line of an address brought, which need not be anyone's: into the nearest
    cache, or the second."""
    at = builder.bitcast(place, BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [at.type, WORD, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(
        function, [at, *(ir.Constant(WORD, number) for number in (0, 3 if near else 2, 1))]
    )
