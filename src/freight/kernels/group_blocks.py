"""Codes of a row's groups times few tokens, in registers: no row is made plain. A product with
minimum + code * scale is that with the scaled codes, and what the minima add is left to the caller.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import (
    BYTE,
    FLOAT,
    FLOATS,
    WIDTH,
    WORD,
    WORDS,
    address_of,
    call,
    constant,
    fetch,
    place_of,
    splat,
)

__all__ = ["by_tokens"]

_FUSED = call("llvm.fma.v16f32", FLOATS)
_TOTAL = call("llvm.vector.reduce.fadd.v16f32", FLOAT, "reassoc")
_INDEX = types.uintp
_AHEAD: Final = 2048
"""Bytes: what is fetched while others are multiplied."""


def _dots(num_tokens: int, *, halves: bool) -> Any:
    """What generates products with so many tokens. One token's products with a group's codes are
    scaled together; for several the codes are scaled, once for all."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw, start, scales, groups, step, x, x_start, columns, sums, place = arguments
        kinds = signature.args

        def at(index: int) -> Any:
            return ir.Constant(start.type, index)

        def fused(a: Any, b: Any, c: Any) -> Any:
            return _FUSED(context, builder, None, (a, b, c))

        def new() -> Any:
            return cgutils.alloca_once(builder, FLOATS)

        def add_vector(first: Any, begin: Any, byte: Any, scale: Any) -> None:
            """Sixteen bytes of a group, from that byte on."""
            source = builder.add(builder.add(start, first), byte)
            own = place_of(context, builder, kinds[0], raw, source, BYTE)
            later = builder.add(source, at(_AHEAD))
            fetch(builder, address_of(context, builder, kinds[0], raw, later))
            words = builder.zext(builder.load(own, align=1), WORDS)
            column = builder.add(begin, byte)
            if halves:
                low, high = constant(WORD, 15), constant(WORD, 4)
                found = [
                    (column, builder.and_(words, low)),
                    (builder.add(column, step), builder.lshr(words, high)),
                ]
            else:
                found = [(column, words)]
            for where, codes in found:
                values = builder.sitofp(codes, FLOATS)
                if num_tokens > 1:
                    values = builder.fmul(values, scale)
                for token in range(num_tokens):
                    index = builder.add(x_start, builder.mul(columns, at(token)))
                    index = builder.add(index, where)
                    some = builder.load(
                        place_of(context, builder, kinds[5], x, index, FLOAT), align=4
                    )
                    to = kept[token] if num_tokens > 1 else part
                    builder.store(fused(values, some, builder.load(to)), to)

        nothing = constant(FLOAT, 0.0)
        kept, part = [new() for _ in range(num_tokens)], new()
        for own in kept:
            builder.store(nothing, own)
        with cgutils.for_range(builder, groups) as group:
            first = builder.mul(group.index, step)
            begin = builder.mul(first, at(2)) if halves else first
            scale = builder.load(address_of(context, builder, kinds[2], scales, group.index))
            scale = splat(builder, scale)
            builder.store(nothing, part)
            with cgutils.for_range(builder, builder.udiv(step, at(WIDTH))) as loop:
                add_vector(first, begin, builder.mul(loop.index, at(WIDTH)), scale)
            if num_tokens == 1:
                scaled = fused(builder.load(part), scale, builder.load(kept[0]))
                builder.store(scaled, kept[0])
        for token, own in enumerate(kept):
            found = _TOTAL(context, builder, None, (ir.Constant(FLOAT, 0.0), builder.load(own)))
            index = builder.add(place, at(token))
            builder.store(found, address_of(context, builder, kinds[8], sums, index))
        return context.get_dummy_value()

    return generate


def _signature(raw: Any, scales: Any, x: Any, sums: Any) -> Any:
    indices = _INDEX, _INDEX
    return types.none(raw, _INDEX, scales, *indices, x, *indices, sums, _INDEX)


def by_tokens(num_tokens: int, *, bits: int) -> Any:
    """(raw, start, scales, groups, step, x, x_start, columns, sums, place): sums[place + t] = the
    sum of code * scale * x over a row's ``groups`` of codes in 4 or 8 bits, each of ``step`` bytes
    of raw, whole vectors, from ``start`` on. x is float32, from ``x_start``; its tokens t lie
    ``columns`` apart."""
    generate = _dots(num_tokens, halves=bits == 4)

    @intrinsic
    def dots(context, raw, start, scales, groups, step, x, x_start, columns, sums, place):  # type: ignore[no-untyped-def]
        return _signature(raw, scales, x, sums), generate

    return dots
