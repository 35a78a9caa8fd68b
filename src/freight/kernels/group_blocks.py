"""Codes of a row's groups times few tokens, in registers: no row is made plain. A product with
minimum + code * scale is that with the scaled codes, and what the minima add is left to the caller.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.features import HAS_WIDE_REGISTERS
from freight.kernels.llvm import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    WIDTH,
    WORD,
    WORDS,
    address_of,
    call,
    constant,
    eight_at,
    fetch,
    joined,
    place_of,
    put_lanes,
    splat,
    totals,
)

__all__ = ["TOKENS", "by_tokens", "rows_by_tokens"]

_FUSED = call("llvm.fma.v16f32", FLOATS)
_TOTAL = call("llvm.vector.reduce.fadd.v16f32", FLOAT, "reassoc")
_INDEX = types.uintp
TOKENS: Final = 4
"""That two rows meet together."""
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


def _dots_of_rows(*, halves: bool) -> Any:
    """What generates products of two rows with TOKENS tokens: what is loaded of a token meets both
    rows. Where registers are few, each row has half of a vector."""
    by_halves = not HAS_WIDE_REGISTERS
    width = HALF if by_halves else WIDTH

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts, groups, step, x, x_start, columns = (arguments[k] for k in (1, 3, 4, 5, 6, 7))
        kinds, (place, apart) = signature.args, arguments[9:]

        def at(index: int) -> Any:
            return ir.Constant(place.type, index)

        def address(number: int, index: Any) -> Any:
            return address_of(context, builder, kinds[number], arguments[number], index)

        def spread(numbers: list[Any]) -> list[Any]:
            """A number of each row, as often as it has places."""
            vectors = [splat(builder, number) for number in numbers]
            if not by_halves:
                return vectors
            lanes = [*range(HALF), *range(WIDTH, WIDTH + HALF)]
            return [builder.shuffle_vector(*vectors, ir.Constant(WORDS, lanes))]

        def codes(index: Any) -> list[Any]:
            """Bytes of either row, as whole numbers."""
            kind = ir.VectorType(BYTE, width)
            own = [builder.add(row, index) for row in rows]
            own = [builder.bitcast(address(0, row), kind.as_pointer()) for row in own]
            words = ir.VectorType(WORD, width)
            found = [builder.zext(builder.load(row, align=1), words) for row in own]
            return [joined(builder, *found)] if by_halves else found

        def numbers_of(token: Any, column: Any) -> Any:
            index = builder.add(token, column)
            if by_halves:
                some = eight_at(context, builder, kinds[5], x, index)
                return joined(builder, some, some)
            pointer = place_of(context, builder, kinds[5], x, index, FLOAT)
            return builder.load(pointer, align=4)

        def add_codes(column: Any, words: list[Any], factors: list[Any]) -> None:
            values = [
                builder.fmul(builder.sitofp(own, FLOATS), factor)
                for own, factor in zip(words, factors, strict=True)
            ]
            for token, own_sums in zip(tokens, kept, strict=True):
                some = numbers_of(token, column)
                for value, sum_ in zip(values, own_sums, strict=True):
                    added = _FUSED(context, builder, None, (value, some, builder.load(sum_)))
                    builder.store(added, sum_)

        rows = [builder.extract_value(starts, row) for row in range(2)]
        tokens = [builder.add(x_start, builder.mul(columns, at(k))) for k in range(TOKENS)]
        nothing = constant(FLOAT, 0.0)
        kept = [
            [cgutils.alloca_once_value(builder, nothing) for _ in range(1 if by_halves else 2)]
            for _ in range(TOKENS)
        ]
        # Of the rows after these a part for each group, factors included.
        line = builder.sub(rows[1], rows[0])
        part = builder.udiv(line, groups)
        ahead = [builder.add(row, builder.mul(line, at(2))) for row in rows]
        with cgutils.for_range(builder, groups) as group:
            first = builder.mul(group.index, step)
            begin = builder.mul(first, at(2)) if halves else first
            own = [group.index, builder.add(group.index, groups)]
            factors = spread([builder.load(address(2, index)) for index in own])
            for row in ahead:
                fetch(builder, address(0, builder.add(row, builder.mul(group.index, part))))
            with cgutils.for_range(builder, builder.udiv(step, at(width))) as loop:
                byte = builder.mul(loop.index, at(width))
                words, column = codes(builder.add(first, byte)), builder.add(begin, byte)
                if halves:
                    upper = [builder.lshr(own, constant(WORD, 4)) for own in words]
                    words = [builder.and_(own, constant(WORD, 15)) for own in words]
                    add_codes(builder.add(column, step), upper, factors)
                add_codes(column, words, factors)
        all_sums = [[builder.load(sum_) for sum_ in own] for own in kept]
        for row in range(2):
            if by_halves:
                found, lanes = totals(builder, [own[0] for own in all_sums], HALF), row * HALF
            else:
                found, lanes = totals(builder, [own[row] for own in all_sums]), 0
            index = builder.add(place, builder.mul(apart, at(row)))
            put_lanes(builder, found, range(lanes, lanes + TOKENS), address(8, index))
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


def rows_by_tokens(*, bits: int) -> Any:
    """The same of two rows, which start at ``starts``, with TOKENS tokens: sums[place + apart
    r + t], and the scales of the second row follow those of the first."""
    generate = _dots_of_rows(halves=bits == 4)

    @intrinsic
    def dots(context, raw, starts, scales, groups, step, x, x_start, columns, sums, place, apart):  # type: ignore[no-untyped-def]
        kinds = raw, types.UniTuple(_INDEX, 2), scales, _INDEX, _INDEX, x, _INDEX, _INDEX
        return types.none(*kinds, sums, _INDEX, _INDEX), generate

    return dots
