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
from freight.model.number_format import LINE_COLUMNS

__all__ = ["HAS_EXPANSION", "first_one", "ones_in", "put_line", "put_wide_line", "spared_in"]

HAS_EXPANSION: Final = bool(
    get_host_cpu_features().get("avx512vbmi2") and get_host_cpu_features().get("avx512vl")
)
"""Whether an instruction spreads bytes over the lanes that a mask names."""

_BITS: Final = 3
_INDEX = types.uintp
_LINE: Final = ir.VectorType(SHORT, LINE_COLUMNS)
_BYTES: Final = ir.VectorType(BYTE, LINE_COLUMNS)
_MASK: Final = ir.VectorType(ir.IntType(1), LINE_COLUMNS)


def _shorts(value: int) -> Any:
    return ir.Constant(_LINE, [value] * LINE_COLUMNS)


def _words(context: Any, builder: Any, kind: Any, raw: Any, start: Any) -> list[Any]:
    """The three words of a line's codes."""
    own = address_of(context, builder, kind, raw, start)
    own = builder.bitcast(own, WORD.as_pointer())
    places = [builder.gep(own, [ir.Constant(WORD, number)]) for number in range(_BITS)]
    return [builder.load(place, align=1) for place in places]


def _spared(builder: Any, words: list[Any]) -> Any:
    found = words[0]
    for word in words[1:]:
        found = builder.and_(found, word)
    return found


def _expanded(builder: Any, place: Any, mask: Any) -> Any:
    """Bytes from a place on in the lanes of the mask, in order; zeros in the others."""
    kind = ir.FunctionType(_BYTES, [BYTE.as_pointer(), _MASK, _BYTES])
    name = "llvm.masked.expandload.v32i8"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [place, mask, ir.Constant(_BYTES, [0] * LINE_COLUMNS)])


def _values(context: Any, builder: Any, kind: Any, arguments: Any) -> tuple[Any, Any]:
    """A line's numbers as bits, and which are spared, whose exponents are put in only where the
    processor expands them."""
    raw, start, codes, spared, top = arguments
    begin = address_of(context, builder, kind, raw, start)
    low = builder.load(builder.bitcast(begin, _BYTES.as_pointer()), align=1)
    low = builder.zext(low, _LINE)
    words = _words(context, builder, kind, raw, codes)
    one = builder.shl(builder.zext(top, SHORT), ir.Constant(SHORT, 7))
    first = builder.insert_element(ir.Constant(_LINE, ir.Undefined), one, ir.Constant(WORD, 0))
    lanes = ir.Constant(ir.VectorType(WORD, LINE_COLUMNS), [0] * LINE_COLUMNS)
    exponents = builder.shuffle_vector(first, first, lanes)
    for bit, word in enumerate(words):
        less = builder.sub(exponents, _shorts(1 << (7 + bit)))
        exponents = builder.select(builder.bitcast(word, _MASK), less, exponents)
    are_spared = _spared(builder, words)
    if HAS_EXPANSION:
        mask = builder.bitcast(are_spared, _MASK)
        others = address_of(context, builder, kind, raw, spared)
        own = builder.zext(_expanded(builder, others, mask), _LINE)
        exponents = builder.select(mask, builder.shl(own, _shorts(7)), exponents)
    signs = builder.and_(builder.shl(low, _shorts(8)), _shorts(0x8000))
    rest = builder.or_(signs, builder.and_(low, _shorts(0x7F)))
    # A spared one's code is larger than any exponent it is taken from may be.
    exponents = builder.and_(exponents, _shorts(0x7F80))
    return builder.or_(rest, exponents), are_spared


def _signature(out: Any, raw: Any) -> Any:
    return types.uint32(out, _INDEX, raw, _INDEX, _INDEX, _INDEX, types.uint8)


@intrinsic
def put_line(context, out, place, raw, start, codes, spared, top):  # type: ignore[no-untyped-def]
    """A line from out[place] on as bfloat16, side by side whatever out has: signs and mantissas
    begin at ``start`` of raw, words of codes at ``codes``, exponents without a code at ``spared``,
    and ``top`` is the largest that has one. Returns which have none, as bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, *own = arguments
        values, spared = _values(context, builder, signature.args[2], own)
        at = address_of(context, builder, signature.args[0], target, place)
        builder.store(values, builder.bitcast(at, _LINE.as_pointer()), align=2)
        return spared

    return _signature(out, raw), generate


@intrinsic
def put_wide_line(context, out, place, raw, start, codes, spared, top):  # type: ignore[no-untyped-def]
    """The same as float32, which out is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, *own = arguments
        values, spared = _values(context, builder, signature.args[2], own)
        for half in range(LINE_COLUMNS // WIDTH):
            lanes = ir.Constant(WORDS, [*range(half * WIDTH, (half + 1) * WIDTH)])
            some = builder.zext(builder.shuffle_vector(values, values, lanes), WORDS)
            wide = builder.bitcast(builder.shl(some, ir.Constant(WORDS, [16] * WIDTH)), FLOATS)
            index = builder.add(place, ir.Constant(place.type, half * WIDTH))
            at = address_of(context, builder, signature.args[0], target, index)
            builder.store(wide, builder.bitcast(at, FLOATS.as_pointer()), align=4)
        return spared

    return _signature(out, raw), generate


@intrinsic
def spared_in(context, raw, codes):  # type: ignore[no-untyped-def]
    """Which numbers of a line have exponents without a code, as bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spared(builder, _words(context, builder, signature.args[0], *arguments))

    return types.uint32(raw, _INDEX), generate


@intrinsic
def ones_in(context, word):  # type: ignore[no-untyped-def]
    """How many bits are set."""
    return _INDEX(types.uint32), lambda context, builder, signature, arguments: builder.zext(
        builder.ctpop(arguments[0]), context.get_value_type(_INDEX)
    )


@intrinsic
def first_one(context, word):  # type: ignore[no-untyped-def]
    """Which is the lowest bit that is set, where one is."""
    return _INDEX(types.uint32), lambda context, builder, signature, arguments: builder.zext(
        builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1)), context.get_value_type(_INDEX)
    )
