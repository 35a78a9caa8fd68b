"""Rows of floats of 4 and of 8 bits, as checkpoints that are quantised already have them.

MXFP4 (OCP Microscaling Formats 1.0) has floats of 4 bits, a sign, two bits of exponent and one of
mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6; and for each group of 32 neighbours a byte, the exponent of
a power of two, with 127 added. A row is its floats, then these bytes. Floats of 8 bits (e4m3, of
blocks of 128 by 128 that share a scale) are a row's floats, then its scales in float32.

Levels are sixteen numbers that a table has, which codes of 4 bits stand for: those of MXFP4, or of
bitsandbytes, NF4 (Dettmers et al., 2023) and FP4. A group's numbers are its levels times a scale.
A row is its codes, then its scales: in float32, or, as NVIDIA's NVFP4 has them, bytes, floats of 8
bits (e4m3), which a number in float32 behind them multiplies.

Byte j of each sixteen has, in its lower half, the code of number j of 32 neighbours, and in its
upper half that of number j + 16. Knows sizes, no tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = [
    "EIGHT_COLUMNS",
    "LEVELS",
    "LEVEL_COLUMNS",
    "MICRO_COLUMNS",
    "EightFloats",
    "LevelFloats",
    "MicroFloats",
    "find_levels",
]

EIGHT_COLUMNS: Final = 128
"""Of a group of floats of 8 bits."""

MICRO_COLUMNS: Final = 32
"""Of a group of MXFP4."""

LEVEL_COLUMNS: Final = 32
"""Numbers whose codes lie together."""

_MICRO: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4: Final = tuple(own / 12 for own in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))

LEVELS: Final = {
    "e2m1": (*_MICRO, *(-own for own in _MICRO)),
    "fp4": (*_FP4, *(-own for own in _FP4)),
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
}
"""What codes of 4 bits stand for, from 0 on, as float32 has it."""

_NAME: Final = re.compile(rf"({'|'.join(LEVELS)})g(\d+)(e4m3)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroFloats:
    """MXFP4, as it is published: floats of 4 bits, and an exponent for each group."""

    @property
    def name(self) -> str:
        return "mxfp4"

    @property
    def rows_together(self) -> int:
        """Rows that are not cut apart."""
        return 1

    def code_bytes(self, columns: int) -> int:
        return columns // 2

    def row_bytes(self, columns: int) -> int:
        """Codes and exponents of a row."""
        return self.code_bytes(columns) + columns // MICRO_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class EightFloats:
    """Floats of 8 bits, e4m3, and a scale in float32 for each group of a row."""

    @property
    def name(self) -> str:
        return "fp8"

    @property
    def rows_together(self) -> int:
        """Rows that are not cut apart."""
        return 1

    def row_bytes(self, columns: int) -> int:
        """Floats and scales of a row."""
        return columns + 4 * -(-columns // EIGHT_COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelFloats:
    """Codes of 4 bits for the ``levels`` of that name, in groups of ``group_size``, whose scales
    are float32, or ``in_bytes``."""

    levels: str
    group_size: int
    in_bytes: bool = False

    @property
    def name(self) -> str:
        return f"{self.levels}g{self.group_size}{'e4m3' if self.in_bytes else ''}"

    @property
    def rows_together(self) -> int:
        """Rows that are not cut apart."""
        return 1

    def code_bytes(self, columns: int) -> int:
        return columns // 2

    def row_bytes(self, columns: int) -> int:
        """Codes and scales of a row, and what multiplies these."""
        groups = columns // self.group_size
        return self.code_bytes(columns) + (groups + 4 if self.in_bytes else 4 * groups)

    def fits(self, columns: int) -> bool:
        """Whether there are rows of so many: of whole groups, a power of two long, whose numbers in
        float32 lie where float32 can be loaded."""
        size = self.group_size
        is_whole = columns % LEVEL_COLUMNS == 0 and columns % size == 0
        return is_whole and size.bit_count() == 1 and self.row_bytes(columns) % 4 == 0


def find_levels(name: str) -> LevelFloats | None:
    """The format by its name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return LevelFloats(levels=found[1], group_size=int(found[2]), in_bytes=found[3] is not None)
