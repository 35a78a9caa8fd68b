"""Codes of rows' groups times few tokens, in registers: no row is made plain. A product with
minimum + code * scale is the scale times that with the codes, and the minimum times the sum of the
token's columns.
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
    HALF,
    WIDTH,
    WORD,
    address_of,
    call,
    fetch,
    joined,
    put_lanes,
    totals,
)
from freight.kernels.register_blocks import ROWS_TOGETHER

__all__ = ["CODE_ROWS_OF_TOKENS", "codes_by_tokens"]

CODE_ROWS_OF_TOKENS: Final = 2
"""Rows that meet TOKENS_TOGETHER at once; fewer tokens meet ROWS_TOGETHER."""

_LANES: Final = WIDTH if HAS_WIDE_REGISTERS else HALF
"""Of a register."""
_FLOATS: Final = ir.VectorType(FLOAT, _LANES)
_WORDS: Final = ir.VectorType(WORD, _LANES)
_FUSED: Final = call(f"llvm.fma.v{_LANES}f32", _FLOATS)
_NOTHING: Final = ir.Constant(_FLOATS, [0.0] * _LANES)


def _dots(num_rows: int, num_tokens: int, *, halves: bool) -> Any:
    """What generates products of so many rows and tokens. A group's codes meet all tokens before
    these sums are scaled, and each token's sums are made in the same order however many others
    there are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw, factors, x, shared, target = (
            _Parts(context, builder, kind, value)
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        start, line, height, step = raw.numbers
        first_factor, wide, groups = factors.numbers
        (columns,), (place, apart) = x.numbers[1:], target.numbers
        pairs = [(row, token) for row in range(num_rows) for token in range(num_tokens)]

        def at(index: int) -> Any:
            return ir.Constant(start.type, index)

        def begins(first: Any, pitch: Any, count: int) -> list[Any]:
            return [builder.add(first, builder.mul(pitch, at(k))) for k in range(count)]

        def same(value: int) -> Any:
            return ir.Constant(_WORDS, [value] * _LANES)

        def add_product(to: Any, a: Any, b: Any) -> None:
            builder.store(_FUSED(context, builder, None, (a, b, builder.load(to))), to)

        def new_sums() -> dict[tuple[int, int], Any]:
            return {pair: cgutils.alloca_once_value(builder, _NOTHING) for pair in pairs}

        # Rows that are not there are the last one once more.
        last = builder.sub(height, at(1))
        numbers = [
            builder.select(builder.icmp_unsigned("<", at(row), height), at(row), last)
            for row in range(num_rows)
        ]
        rows = [builder.add(start, builder.mul(line, number)) for number in numbers]
        scales = [builder.add(first_factor, builder.mul(wide, number)) for number in numbers]
        minima = [builder.add(own, builder.mul(wide, at(ROWS_TOGETHER))) for own in scales]
        tokens = begins(x.numbers[0], columns, num_tokens)
        shares = begins(shared.numbers[0], wide, num_tokens)
        ahead = begins(builder.add(start, builder.mul(line, at(ROWS_TOGETHER))), line, num_rows)
        kept, found = new_sums(), new_sums()
        with cgutils.for_range(builder, builder.udiv(wide, at(_LANES))) as loop:
            group = builder.mul(loop.index, at(_LANES))
            some = [shared.load(builder.add(own, group)) for own in shares]
            lowest = [factors.load(builder.add(own, group)) for own in minima]
            for row, token in pairs:
                add_product(kept[row, token], lowest[row], some[token])
        part = builder.udiv(line, groups)
        with cgutils.for_range(builder, groups) as loop:
            group = loop.index
            first = builder.mul(group, step)
            begin = builder.mul(first, at(2)) if halves else first
            for own in ahead:
                fetch(builder, raw.address(builder.add(own, builder.mul(group, part))))
            for own in found.values():
                builder.store(_NOTHING, own)
            with cgutils.for_range(builder, builder.udiv(step, at(_LANES))) as inner:
                byte = builder.mul(inner.index, at(_LANES))
                column = builder.add(begin, byte)
                places = [column, builder.add(column, step)] if halves else [column]
                some_of = [[x.load(builder.add(own, k)) for own in tokens] for k in places]
                for row, own in enumerate(rows):
                    codes = raw.load(builder.add(own, builder.add(first, byte)), BYTE)
                    words = builder.zext(codes, _WORDS)
                    parts = [words]
                    if halves:
                        parts = [builder.and_(words, same(15)), builder.lshr(words, same(4))]
                    for values, some in zip(parts, some_of, strict=True):
                        plain = builder.sitofp(values, _FLOATS)
                        for token in range(num_tokens):
                            add_product(found[row, token], plain, some[token])
            for row, own in enumerate(scales):
                scale = _splat(builder, builder.load(factors.address(builder.add(own, group))))
                for token in range(num_tokens):
                    add_product(kept[row, token], scale, builder.load(found[row, token]))
        sums = [builder.load(kept[pair]) for pair in pairs]
        lanes = list(range(len(sums)))
        if _LANES == HALF:
            half = len(sums) // 2
            sums = [joined(builder, *both) for both in zip(sums[:half], sums[half:], strict=True)]
            lanes = [*range(half), *range(HALF, HALF + half)]
        all_totals = totals(builder, sums, _LANES)
        for row, to in enumerate(begins(place, apart, num_rows)):
            own_lanes = lanes[row * num_tokens : (row + 1) * num_tokens]
            put_lanes(builder, all_totals, own_lanes, target.address(to))
        return context.get_dummy_value()

    return generate


class _Parts:
    """An argument that is a tuple: an array, and numbers about it."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array, *self.numbers = cgutils.unpack_tuple(builder, value)
        self._array = context, builder, kind[0], array
        self._builder = builder

    def address(self, index: Any) -> Any:
        return address_of(*self._array, index)

    def load(self, index: Any, kind: ir.Type = FLOAT) -> Any:
        """A register of elements from one on."""
        pointer = ir.VectorType(kind, _LANES).as_pointer()
        return self._builder.load(self._builder.bitcast(self.address(index), pointer), align=1)


def _splat(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * _LANES))


def codes_by_tokens(num_rows: int, num_tokens: int, *, bits: int) -> Any:
    """What multiplies so many rows in groups, codes in 4 or 8 bits, by so many tokens. It takes

    - (raw, start, line, height, step): bytes, where rows begin and how far they are apart, how many
      of them there are, and bytes of a group's codes, whole vectors
    - (factors, first, wide, groups): float32, where the first row's scale of the first group is,
      how far those of rows are apart, and groups; minima lie ROWS_TOGETHER rows behind
    - (x, start, columns): float32, where tokens begin and how far they are apart
    - (shared, start): of each token the sums of each group's columns, ``wide`` apart, zeros where
      there is no group
    - (sums, place, apart): sums[place + apart r + t] becomes the product of row r and token t
    """
    generate = _dots(num_rows, num_tokens, halves=bits == 4)

    @intrinsic
    def dots(context, raw, factors, x, shared, target):  # type: ignore[no-untyped-def]
        return types.none(raw, factors, x, shared, target), generate

    return dots
