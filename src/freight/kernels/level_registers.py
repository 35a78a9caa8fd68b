"""Codes of 4 bits as vectors of the levels that they stand for, on any processor."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from freight.kernels.llvm import BYTE, address_of, constant, loader, splat
from freight.kernels.vectors import VECTOR

__all__ = ["load_high_levels", "load_low_levels"]

_LEVELS = 16


def _chosen(builder: Any, codes: Any, levels: list[Any]) -> Any:
    """Of sixteen vectors, in each place the one of its code: by one bit of the codes at a time."""
    for bit in range(4):
        mask = builder.and_(codes, constant(BYTE, 1 << bit))
        is_set = builder.icmp_unsigned("!=", mask, constant(BYTE, 0))
        levels = [
            builder.select(is_set, odd, even)
            for even, odd in zip(levels[::2], levels[1::2], strict=True)
        ]
    return levels[0]


def _load(shift: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw, index, table = arguments
        first = address_of(context, builder, signature.args[2], table, ir.Constant(index.type, 0))
        levels = []
        for number in range(_LEVELS):
            place = builder.gep(first, [ir.Constant(index.type, number)])
            levels.append(splat(builder, builder.load(place)))

        def widen(builder: Any, own: Any) -> Any:
            codes = builder.and_(builder.lshr(own, constant(BYTE, shift)), constant(BYTE, 15))
            return _chosen(builder, codes, levels)

        return loader(BYTE, 1, widen)(context, builder, signature, (raw, index))

    return generate


@intrinsic
def load_low_levels(context, raw, index, levels):  # type: ignore[no-untyped-def]
    """What the lower halves of sixteen bytes stand for, of sixteen levels in float32."""
    return VECTOR(raw, types.uintp, levels), _load(0)


@intrinsic
def load_high_levels(context, raw, index, levels):  # type: ignore[no-untyped-def]
    """The upper halves likewise."""
    return VECTOR(raw, types.uintp, levels), _load(4)
