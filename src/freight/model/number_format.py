"""How the numbers of a weight are stored: as a plain type, or as integers in groups.

A group is some neighbours of a row that share a scale and a minimum (FlexGen, section 5): value =
minimum + code * scale. A row is its codes, then its scales, then its minima, both in float16. Of a
group's 4-bit codes byte j holds those of values j and j + group / 2, so that both halves are
neighbours in memory. Codes of 3 bits are stored as 4: they save nothing more, and are there to show
what is lost (the paper's negative control). Knows sizes, no tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from freight.errors import InputError

__all__ = [
    "BITS",
    "DTYPE_BYTES",
    "GROUP_SIZES",
    "TILE_ROWS",
    "Grouped",
    "find_grouped",
    "fit_group",
    "fit_head",
    "row_bytes",
]

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

BITS: Final = (3, 4, 8)
GROUP_SIZES: Final = (32, 64, 128)
TILE_ROWS: Final = 256
"""Compressed rows that a product makes plain at once: they are used while they are in the cache."""

_NAME: Final = re.compile(r"int([348])g(\d+)")
_SMALLEST_GROUP: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """Integers of ``bits`` in groups of ``group_size``."""

    bits: int
    group_size: int

    @property
    def name(self) -> str:
        return f"int{self.bits}g{self.group_size}"

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def code_bits(self) -> int:
        """What a code takes."""
        return max(4, self.bits)

    def code_bytes(self, columns: int) -> int:
        return columns * self.code_bits // 8

    def row_bytes(self, columns: int) -> int:
        """Codes, scales and minima of a row."""
        return self.code_bytes(columns) + 4 * (columns // self.group_size)


@cache
def find_grouped(dtype: str) -> Grouped | None:
    """The format by its name, None for a plain type."""
    found = _NAME.fullmatch(dtype)
    return found and Grouped(bits=int(found[1]), group_size=int(found[2]))


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of a row."""
    grouped = find_grouped(dtype)
    return columns * DTYPE_BYTES[dtype] if grouped is None else grouped.row_bytes(columns)


def fit_group(bits: int, group_size: int, columns: int) -> Grouped | None:
    """The format with the largest group, up to ``group_size``, that divides a row; None where only
    tiny groups would. InputError where there are no such formats."""
    _check(bits, group_size)
    size = group_size
    while size >= _SMALLEST_GROUP:
        if columns % size == 0:
            return Grouped(bits=bits, group_size=size)
        size //= 2
    return None


def fit_head(bits: int, group_size: int, width: int) -> Grouped:
    """The format with the largest group, a multiple of 4 up to ``group_size``, that divides a
    head. InputError where there are no such formats, or none divides it."""
    _check(bits, group_size)
    sizes = [size for size in range(4, group_size + 1, 4) if width % size == 0]
    if not sizes:
        raise InputError(
            f"Keys and values of {bits} bits were asked for.",
            f"This model's heads have {width} numbers, which no group of a multiple of 4 divides.",
            "Leave --kv-bits out.",
        )
    return Grouped(bits=bits, group_size=sizes[-1])


def _check(bits: int, group_size: int) -> None:
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise InputError(
            f"Numbers of {bits} bits in groups of {group_size} were asked for.",
            "There are 4 and 8 bits, 3 as a negative control, and groups of "
            f"{', '.join(map(str, GROUP_SIZES))}.",
            "Choose among these, or leave them out: then numbers stay as they are.",
        )
