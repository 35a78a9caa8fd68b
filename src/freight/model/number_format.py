"""How the numbers of a weight are stored: as a plain type, or as integers in groups.

A group is some neighbours of a row that share a scale and a minimum (FlexGen, section 5): value =
minimum + code * scale. A row is its codes, then its scales, then its minima, both in float16, or in
float32 where they come from a checkpoint that was quantised already and float16 could not hold them
exactly. Of a group's 4-bit codes byte j holds those of values j and j + group / 2, so that both
halves are neighbours in memory. Knows sizes, no tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from freight.errors import InputError
from freight.model.switches import DTYPE_BYTES

__all__ = ["BITS", "GROUP_SIZES", "TILE_ROWS", "Grouped", "find_grouped", "fit_group", "row_bytes"]

BITS: Final = (4, 8)
GROUP_SIZES: Final = (32, 64, 128)
TILE_ROWS: Final = 256
"""Compressed rows that a product makes plain at once: they are used while they are in the cache."""

_NAME: Final = re.compile(r"int([48])g(\d+)(f32)?")
_SMALLEST_GROUP: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """Integers of ``bits`` in groups of ``group_size``; ``wide``: scales and minima in float32."""

    bits: int
    group_size: int
    wide: bool = False

    @property
    def name(self) -> str:
        return f"int{self.bits}g{self.group_size}{'f32' if self.wide else ''}"

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def factor_bytes(self) -> int:
        """Of one scale, or one minimum."""
        return 4 if self.wide else 2

    def code_bytes(self, columns: int) -> int:
        return columns * self.bits // 8

    def row_bytes(self, columns: int) -> int:
        """Codes, scales and minima of a row."""
        return self.code_bytes(columns) + 2 * self.factor_bytes * (columns // self.group_size)


@cache
def find_grouped(dtype: str) -> Grouped | None:
    """The format by its name, None for a plain type."""
    found = _NAME.fullmatch(dtype)
    return found and Grouped(
        bits=int(found[1]), group_size=int(found[2]), wide=found[3] is not None
    )


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of a row."""
    grouped = find_grouped(dtype)
    return columns * DTYPE_BYTES[dtype] if grouped is None else grouped.row_bytes(columns)


def fit_group(bits: int, group_size: int, columns: int) -> Grouped | None:
    """The format with the largest group, up to ``group_size``, that divides a row; None where only
    tiny groups would. InputError where there are no such formats."""
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise InputError(
            f"Weights of {bits} bits in groups of {group_size} were asked for.",
            f"There are {BITS[0]} and {BITS[1]} bits, and groups of "
            f"{', '.join(map(str, GROUP_SIZES))}.",
            "Choose among these, or leave them out: then weights stay as they are.",
        )
    size = group_size
    while size >= _SMALLEST_GROUP:
        if columns % size == 0:
            return Grouped(bits=bits, group_size=size)
        size //= 2
    return None
