"""Floats of 4 and of 8 bits as vectors of numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from freight.kernels.llvm import BYTE, FLOATS, SHORT, WIDTH, WORDS, address_of, constant, loader
from freight.kernels.llvm import power_of_two as power_of_byte
from freight.kernels.vectors import VECTOR

__all__ = ["eights", "load_eights", "load_high_fours", "load_low_fours", "power_of_two"]


def _fours(builder: Any, codes: Any) -> Any:
    """Sixteen floats of 4 bits, a byte each, as numbers: whole halves first."""

    def fours(value: int) -> Any:
        return constant(BYTE, value)

    own = builder.and_(codes, fours(7))
    has_exponent = builder.icmp_unsigned(">", own, fours(1))
    is_large = builder.icmp_unsigned(">", own, fours(3))
    leading = builder.or_(builder.and_(own, fours(1)), fours(2))
    mantissa = builder.select(has_exponent, leading, own)
    exponent = builder.sub(builder.lshr(own, fours(1)), fours(1))
    shift = builder.select(is_large, exponent, fours(0))
    halves = builder.shl(mantissa, shift)
    minus = builder.icmp_unsigned(">", codes, fours(7))
    signed = builder.select(minus, builder.sub(fours(0), halves), halves)
    wide = builder.sitofp(builder.sext(signed, WORDS), FLOATS)
    return builder.fmul(wide, ir.Constant(FLOATS, [0.5] * WIDTH))


@intrinsic
def load_low_fours(context, array, index):  # type: ignore[no-untyped-def]
    """The lower halves of sixteen bytes as the floats of 4 bits that they are."""
    low = loader(BYTE, 1, lambda b, raw: _fours(b, b.and_(raw, constant(BYTE, 15))))
    return VECTOR(array, types.uintp), low


@intrinsic
def load_high_fours(context, array, index):  # type: ignore[no-untyped-def]
    """The upper halves likewise."""
    high = loader(BYTE, 1, lambda b, raw: _fours(b, b.lshr(raw, constant(BYTE, 4))))
    return VECTOR(array, types.uintp), high


@intrinsic
def power_of_two(context, array, index):  # type: ignore[no-untyped-def]
    """Two to the power of a byte less 127, sixteen times."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = address_of(context, builder, signature.args[0], *arguments)
        return power_of_byte(builder, builder.load(place))

    return VECTOR(array, types.uintp), generate


def eights(builder: Any, codes: Any) -> Any:
    """Sixteen floats of 8 bits as numbers: their bits are those of float16 with two to the power of
    8 less."""
    wide = builder.zext(codes, ir.VectorType(SHORT, WIDTH))
    sign = builder.shl(builder.and_(wide, constant(SHORT, 0x80)), constant(SHORT, 8))
    size = builder.shl(builder.and_(wide, constant(SHORT, 0x7F)), constant(SHORT, 7))
    halves = builder.bitcast(builder.or_(sign, size), ir.VectorType(ir.HalfType(), WIDTH))
    return builder.fmul(builder.fpext(halves, FLOATS), ir.Constant(FLOATS, [256.0] * WIDTH))


@intrinsic
def load_eights(context, array, index):  # type: ignore[no-untyped-def]
    """Sixteen bytes as the floats of 8 bits that they are."""
    return VECTOR(array, types.uintp), loader(BYTE, 1, eights)
