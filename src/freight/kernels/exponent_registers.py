"""A line of bfloat16 with short exponents made plain, in registers: codes lie as bits, so that each
word of them chooses lanes."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import BYTE, FLOATS, SHORT, WIDTH, WORD, WORDS, address_of
from freight.model.number_format import EXPONENT_BITS, LINE_COLUMNS

__all__ = ["HAS_EXPANSION", "first_one", "ones_in", "put_line", "put_wide_line", "spared_in"]

HAS_EXPANSION: Final = bool(
    get_host_cpu_features().get("avx512vbmi2") and get_host_cpu_features().get("avx512vl")
)
"""Whether an instruction spreads bytes over the lanes that a mask names."""

_INDEX = types.uintp
_WORD: Final = ir.IntType(LINE_COLUMNS)
_BYTES: Final = ir.VectorType(BYTE, LINE_COLUMNS)
_MASK: Final = ir.VectorType(ir.IntType(1), LINE_COLUMNS)
_SHORTS: Final = ir.VectorType(SHORT, LINE_COLUMNS // 2)
_HALF_LINE: Final = LINE_COLUMNS // 2
_EIGHT: Final = 8


def _bytes(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * LINE_COLUMNS)


def _words(context: Any, builder: Any, kind: Any, raw: Any, start: Any) -> list[Any]:
    """The three words of a line's codes."""
    own = address_of(context, builder, kind, raw, start)
    own = builder.bitcast(own, _WORD.as_pointer())
    places = [builder.gep(own, [ir.Constant(WORD, number)]) for number in range(EXPONENT_BITS)]
    return [builder.load(place, align=1) for place in places]


def _spared(builder: Any, words: list[Any]) -> Any:
    found = words[0]
    for word in words[1:]:
        found = builder.and_(found, word)
    return found


def _expanded(builder: Any, place: Any, mask: Any, others: Any) -> Any:
    """Bytes from a place on in the lanes of the mask, in order; those of ``others`` elsewhere."""
    kind = ir.FunctionType(_BYTES, [BYTE.as_pointer(), _MASK, _BYTES])
    name = f"llvm.masked.expandload.v{LINE_COLUMNS}i8"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [place, mask, others])


def _shifted(builder: Any, own: Any, by: int) -> Any:
    """To the left, or the right where it is negative, with bits of neighbours in what is empty."""
    wide = builder.bitcast(own, _SHORTS)
    shift = builder.shl if by > 0 else builder.lshr
    found = shift(wide, ir.Constant(_SHORTS, [abs(by)] * _HALF_LINE))
    return builder.bitcast(found, _BYTES)


def _chosen(builder: Any, mask: int, own: Any, other: Any) -> Any:
    """Bits of the mask from the one, the rest from the other."""
    mine = builder.and_(own, _bytes(mask))
    return builder.or_(mine, builder.and_(other, _bytes(~mask & 0xFF)))


def _values(context: Any, builder: Any, kind: Any, arguments: Any) -> tuple[list[Any], Any]:
    """Both halves of a line as bits, and which are spared, whose exponents are put in only where
    the processor expands them."""
    raw, start, codes, spared, top = arguments
    begin = address_of(context, builder, kind, raw, start)
    low = builder.load(builder.bitcast(begin, _BYTES.as_pointer()), align=1)
    words = _words(context, builder, kind, raw, codes)
    first = builder.insert_element(ir.Constant(_BYTES, ir.Undefined), top, ir.Constant(WORD, 0))
    lanes = ir.Constant(ir.VectorType(WORD, LINE_COLUMNS), [0] * LINE_COLUMNS)
    exponents = builder.shuffle_vector(first, first, lanes)
    for bit, word in enumerate(words):
        less = builder.sub(exponents, _bytes(1 << bit))
        exponents = builder.select(builder.bitcast(word, _MASK), less, exponents)
    are_spared = _spared(builder, words)
    if HAS_EXPANSION:
        mask = builder.bitcast(are_spared, _MASK)
        others = address_of(context, builder, kind, raw, spared)
        exponents = _expanded(builder, others, mask, exponents)
    high_bytes = _chosen(builder, 0x80, low, _shifted(builder, exponents, -1))
    low_bytes = _chosen(builder, 0x7F, low, _shifted(builder, exponents, 7))
    return [_woven(builder, low_bytes, high_bytes, half) for half in range(2)], are_spared


def _woven(builder: Any, low: Any, high: Any, half: int) -> Any:
    """Of each sixteen bytes the first, or second, eight as numbers."""
    lanes = [
        start + place + other
        for start in range(half * _EIGHT, LINE_COLUMNS, 2 * _EIGHT)
        for place in range(_EIGHT)
        for other in (0, LINE_COLUMNS)
    ]
    mask = ir.Constant(ir.VectorType(WORD, LINE_COLUMNS), lanes)
    return builder.bitcast(builder.shuffle_vector(low, high, mask), _SHORTS)


def _signature(out: Any, raw: Any, *more: Any) -> Any:
    return types.uint64(out, _INDEX, *more, raw, _INDEX, _INDEX, _INDEX, types.uint8)


@intrinsic
def put_line(context, out, place, apart, raw, start, codes, spared, top):  # type: ignore[no-untyped-def]
    """A line from out[place] on as bfloat16, its halves ``apart``, side by side whatever out has:
    signs and mantissas begin at ``start`` of raw, words of codes at ``codes``, exponents without a
    code at ``spared``, and ``top`` is the largest that has one. Returns which have none, as
    bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, apart, *own = arguments
        halves, spared = _values(context, builder, signature.args[3], own)
        for values in halves:
            at = address_of(context, builder, signature.args[0], target, place)
            builder.store(values, builder.bitcast(at, _SHORTS.as_pointer()), align=2)
            place = builder.add(place, apart)
        return spared

    return _signature(out, raw, _INDEX), generate


@intrinsic
def put_wide_line(context, out, place, raw, start, codes, spared, top):  # type: ignore[no-untyped-def]
    """The same as float32, which out is, side by side."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, *own = arguments
        halves, spared = _values(context, builder, signature.args[2], own)
        for number in range(LINE_COLUMNS // WIDTH):
            half, first = divmod(number * WIDTH, _HALF_LINE)
            lanes = ir.Constant(WORDS, [*range(first, first + WIDTH)])
            some = builder.shuffle_vector(halves[half], halves[half], lanes)
            bits = builder.shl(builder.zext(some, WORDS), ir.Constant(WORDS, [16] * WIDTH))
            index = builder.add(place, ir.Constant(place.type, number * WIDTH))
            at = address_of(context, builder, signature.args[0], target, index)
            wide = builder.bitcast(bits, FLOATS)
            builder.store(wide, builder.bitcast(at, FLOATS.as_pointer()), align=4)
        return spared

    return _signature(out, raw), generate


@intrinsic
def spared_in(context, raw, codes):  # type: ignore[no-untyped-def]
    """Which numbers of a line have exponents without a code, as bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spared(builder, _words(context, builder, signature.args[0], *arguments))

    return types.uint64(raw, _INDEX), generate


@intrinsic
def ones_in(context, word):  # type: ignore[no-untyped-def]
    """How many bits are set."""
    return _INDEX(types.uint64), lambda c, builder, s, arguments: builder.ctpop(arguments[0])


@intrinsic
def first_one(context, word):  # type: ignore[no-untyped-def]
    """Which is the lowest bit that is set, where one is."""
    is_set = ir.Constant(ir.IntType(1), 1)
    return _INDEX(types.uint64), lambda c, builder, s, arguments: builder.cttz(*arguments, is_set)
