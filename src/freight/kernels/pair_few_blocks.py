"""Blocks of a product of a few tokens of bfloat16 and some rows, by pairs of neighbours, whose sums
stay in registers, and what those have in common that take rows kept in other ways: rows are read as
they lie, and those that come next are fetched meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import (
    FLOAT,
    FLOATS,
    WIDTH,
    address_of,
    constant,
    fetch,
    pair_products,
    put_lanes,
    totals,
)

__all__ = ["INDEX", "ROWS", "FewBlock", "put_few_products"]

ROWS: Final = 4
"""That meet tokens together. With six tokens, sums and tokens leave room for a row."""
INDEX: Final = types.uintp


class FewBlock:
    """Steps of a block of ROWS rows and so many tokens. Each row's sums with a token are a
    register, whose sixteen lanes are added up in the end."""

    def __init__(self, context: Any, builder: Any, num_tokens: int) -> None:
        self._context = context
        self._index = context.get_value_type(INDEX)
        self.builder = builder
        self.num_tokens = num_tokens
        self.nothing = constant(FLOAT, 0.0)
        self._kept = {}
        for row in range(ROWS):
            for token in range(num_tokens):
                self._kept[row, token] = cgutils.alloca_once(builder, FLOATS)
                builder.store(self.nothing, self._kept[row, token])

    def whole(self, value: int) -> Any:
        return ir.Constant(self._index, value)

    def address(self, kind: Any, array: Any, index: Any) -> Any:
        """Where an element of an array is."""
        return address_of(self._context, self.builder, kind, array, index)

    def load(self, begin: Any, index: Any, kind: ir.Type = FLOAT, count: int = WIDTH) -> Any:
        """So many of a type, from an element on behind the one that ``begin`` is the address of."""
        pointer = ir.VectorType(kind, count).as_pointer()
        at = self.builder.bitcast(self.builder.gep(begin, [index]), pointer)
        return self.builder.load(at, align=4 if kind is FLOAT else 1)

    def rows(self, kind: Any, raw: Any, start: Any, pitch: Any, count: int = ROWS) -> list[Any]:
        """Where rows begin."""
        builder = self.builder
        return [
            self.address(kind, raw, builder.add(start, builder.mul(pitch, self.whole(row))))
            for row in range(count)
        ]

    def rows_there(self, kind: Any, raw: Any, start: Any, pitch: Any, height: Any) -> list[Any]:
        """Where those begin, of which there are so many; others are the last one once more."""
        builder, found = self.builder, []
        last = builder.sub(height, self.whole(1))
        for row in range(ROWS):
            is_there = builder.icmp_unsigned("<", self.whole(row), height)
            number = builder.select(is_there, self.whole(row), last)
            at = builder.add(start, builder.mul(pitch, number))
            found.append(self.address(kind, raw, at))
        return found

    def fetch(self, rows: Sequence[Any], index: Any) -> None:
        """To the second cache, which may await more lines than the nearest."""
        for row in rows:
            fetch(self.builder, self.builder.gep(row, [index]), near=False)

    def tokens(self, begin: Any, number: Any, parts: int = 1) -> list[list[Any]]:
        """Each token's parts, sixteen pairs each, that lie side by side: those of a chunk."""
        builder, together = self.builder, self.num_tokens * parts * WIDTH
        first = builder.mul(number, self.whole(together))
        return [
            [
                self.load(begin, builder.add(first, self.whole(WIDTH * (parts * token + part))))
                for part in range(parts)
            ]
            for token in range(self.num_tokens)
        ]

    def add_products(self, row: int, token: int, a: Any, b: Any) -> None:
        """To a sum those of pairs."""
        own = self._kept[row, token]
        self.builder.store(pair_products(self.builder, self.builder.load(own), a, b), own)

    def add_times(self, row: int, token: int, a: Any, b: Any) -> None:
        """To a sum those of numbers."""
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        fused = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.fma.v16f32")
        own = self._kept[row, token]
        self.builder.store(self.builder.call(fused, [a, b, self.builder.load(own)]), own)

    def put(self, kind: Any, sums: Any, place: Any) -> None:
        """sums[place + 16 r + t], of all tokens up to the next power of two."""
        lanes = range(1 << (self.num_tokens - 1).bit_length())
        for row in range(ROWS):
            own = [self.builder.load(self._kept[row, t % self.num_tokens]) for t in lanes]
            target = self.builder.add(place, self.whole(WIDTH * row))
            at = self.address(kind, sums, target)
            put_lanes(self.builder, totals(self.builder, own), lanes, at)


def put_few_products(num_tokens: int, num_fetched: int = ROWS) -> Any:
    """What makes sums[place + 16 r + t] the products of ROWS rows[start + pitch r + k] and
    num_tokens x[16 (num_tokens k + t) + i], over k = 0 to ``count``, sixteen pairs each; of each
    row all lanes up to the next power of two are written. So much of as many rows is fetched, to
    the second cache, the first of which begins ``ahead``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, start, pitch, x, count, sums, place, ahead = arguments
        of_rows, _, _, of_x, _, of_sums, _, _ = signature.args
        block = FewBlock(context, builder, num_tokens)
        own_rows = block.rows(of_rows, rows, start, pitch)
        coming = block.rows(of_rows, rows, ahead, pitch, num_fetched)
        columns = block.address(of_x, x, block.whole(0))
        with cgutils.for_range(builder, count) as loop:
            column = builder.mul(loop.index, block.whole(WIDTH))
            block.fetch(coming, column)
            tokens = block.tokens(columns, loop.index)
            for row, begin in enumerate(own_rows):
                values = block.load(begin, column)
                for token, (own,) in enumerate(tokens):
                    block.add_products(row, token, values, own)
        block.put(of_sums, sums, place)
        return context.get_dummy_value()

    @intrinsic
    def put(context, rows, start, pitch, x, count, sums, place, ahead):  # type: ignore[no-untyped-def]
        return types.none(rows, INDEX, INDEX, x, INDEX, sums, INDEX, INDEX), generate

    return put
