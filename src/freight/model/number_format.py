"""How the numbers of a weight are stored: as a plain type, as integers in groups, as integers that
products are made of, as bfloat16 with short exponents, which loses nothing, or as MXFP4.

A group is some neighbours that share a scale and a minimum (FlexGen, section 5): value = minimum +
code * scale; neighbours of a row, along the input dimension, unless asked otherwise. A row is its
codes, then its scales, then its minima, both in float16, or in float32 where they come from a
checkpoint that was quantised already and float16 could not hold them exactly. Of a group's 4-bit
codes byte j holds those of values j and j + group / 2, so that both halves are neighbours in
memory. Codes of 3 bits are stored as 4: they save nothing more, and are there to show what is lost
(the paper's negative control). For integer products a row has one scale, in float32 behind its
signed codes, and no minimum: value = code * scale.

Along the output dimension, as in the paper, groups are neighbours of a column. As many rows as a
group has then lie together: the first byte of each column's group, side by side, the second ones,
and so on, then the scales of all columns, then their minima. Each row counts as an equal part of
these bytes, so that sizes and places are reckoned in rows as ever; rows are cut between groups
alone.

Of bfloat16's sixteen bits eight are the exponent, and nearly all exponents of a row of weights are
among seven neighbours. With short exponents a row is, of each number, its sign and mantissa, a
byte; for each line of 64 numbers three words of 64 bits, those of their exponents' codes, lowest
bits first; for every 256 numbers, in 16 bits, how many before them have an exponent that no code
stands for; the row's largest exponent that has a code; and the exponents without one, a byte each.
Code c stands for the largest less c; the last code, 7, for none. Of a line the first half's numbers
and the second's come in turn, eight at a time, in all of these: registers put bytes and bits
together so. Numbers take 11 bits and little more. (Zhang et al., 2025, keep bfloat16 in 11 bits by
Huffman's codes, which a row cannot be cut out of.)

Floats of 4 and of 8 bits are in ``model.float_formats``. Knows sizes, no tensors.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from freight.errors import InputError
from freight.model.float_formats import (
    EIGHT_COLUMNS,
    MICRO_COLUMNS,
    EightFloats,
    LevelFloats,
    MicroFloats,
    find_levels,
)
from freight.quantities import align_up

__all__ = [
    "BITS",
    "COMPUTES",
    "DIMS",
    "DTYPE_BYTES",
    "EIGHT_COLUMNS",
    "EXPONENT_BITS",
    "EXPONENT_CODES",
    "GROUP_SIZE",
    "GROUP_SIZES",
    "LAID_TOKENS",
    "LINE_CODE_BYTES",
    "LINE_COLUMNS",
    "MICRO_COLUMNS",
    "NOTED_COLUMNS",
    "PAIR_COLUMNS",
    "SUMS",
    "TILE_ROWS",
    "Compressed",
    "Compression",
    "EightFloats",
    "ExactCompression",
    "Grouped",
    "LevelFloats",
    "MicroFloats",
    "PerRow",
    "RowFormat",
    "ShortExponents",
    "check_groups",
    "find_compressed",
    "find_compression",
    "fit_head",
    "integer_scratch",
    "is_widened",
    "row_bytes",
    "rows_together",
]

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

BITS: Final = (3, 4, 8)
GROUP_SIZE: Final = 64
GROUP_SIZES: Final = (32, 64, 128)
DIMS: Final = ("input", "output")
TILE_ROWS: Final = 256
"""Compressed rows that a product makes plain at once: they are used while they are in the cache."""

PAIR_COLUMNS: Final = 128
"""Columns of compressed rows that are made pairs of bfloat16 at once: whole groups."""

SUMS: Final = 1 << 20
"""Sums of an integer product that are there at once: they are scaled while they are in a cache."""

LAID_TOKENS: Final = 512
"""Tokens as integers that are laid for registers at once."""

COMPUTES: Final = ("plain", "int8")

EXPONENT_BITS: Final = 3
"""Of a code that stands for an exponent."""

EXPONENT_CODES: Final = (1 << EXPONENT_BITS) - 1
"""Exponents of a row that codes stand for."""

LINE_COLUMNS: Final = 64
"""Numbers whose codes lie in words of their own."""

LINE_CODE_BYTES: Final = EXPONENT_BITS * LINE_COLUMNS // 8
"""Of these words."""

NOTED_COLUMNS: Final = 256
"""Numbers before which it is noted how many exponents have no code."""

_NAME: Final = re.compile(r"int([348])g(\d+)(f32|out)?")
_SHORT_NAME: Final = re.compile(rf"bfloat16e{EXPONENT_BITS}x(\d+)")
_USUAL_SHARE: Final = 0.03
_USUAL_DEVIATIONS: Final = 6.0
_USUALLY_MORE: Final = 4
"""Of normal numbers' exponents at most so many have no code, whatever their scale; of some rows
more, by so many deviations, and of short ones by more than that."""
_SMALLEST_GROUP: Final = 16
_LAID_TOGETHER: Final = 16
_ALIGNMENT: Final = 4
_MOST_COLUMNS: Final = (2**31 - 1) // 127**2
"""Of a row in an integer product: the sum of so many products of codes fits into 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """Integers of ``bits`` in groups of ``group_size``; ``wide``: scales and minima in float32;
    ``across``: groups are neighbours of a column, along the output dimension. Not both."""

    bits: int
    group_size: int
    wide: bool = False
    across: bool = False

    @property
    def name(self) -> str:
        ending = "f32" if self.wide else "out" if self.across else ""
        return f"int{self.bits}g{self.group_size}{ending}"

    @property
    def rows_together(self) -> int:
        """Rows that share groups, and are not cut apart."""
        return self.group_size if self.across else 1

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def code_bits(self) -> int:
        """What a code takes."""
        return max(4, self.bits)

    @property
    def factor_bytes(self) -> int:
        """Of one scale, or one minimum."""
        return 4 if self.wide else 2

    def code_bytes(self, columns: int) -> int:
        return columns * self.code_bits // 8

    def row_bytes(self, columns: int) -> int:
        """Codes, scales and minima of a row, or its part of those that it has with others."""
        return self.code_bytes(columns) + 2 * self.factor_bytes * columns // self.group_size


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRow:
    """Codes from -127 to 127, and a scale for the row."""

    @property
    def name(self) -> str:
        return "int8row"

    def row_bytes(self, columns: int) -> int:
        """Codes and scale of a row."""
        return columns + 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortExponents:
    """bfloat16, exact; a row has room for ``spare`` exponents without a code."""

    spare: int

    @property
    def name(self) -> str:
        return f"bfloat16e{EXPONENT_BITS}x{self.spare}"

    @property
    def rows_together(self) -> int:
        """Rows that are not cut apart."""
        return 1

    def head_bytes(self, columns: int) -> int:
        """Of a row, what comes before the exponents without a code."""
        lines, notes = columns // LINE_COLUMNS, -(-columns // NOTED_COLUMNS)
        return columns + LINE_CODE_BYTES * lines + 2 * notes + 1

    def row_bytes(self, columns: int) -> int:
        return align_up(self.head_bytes(columns) + self.spare, _ALIGNMENT)


RowFormat = Grouped | ShortExponents | MicroFloats | EightFloats | LevelFloats
"""Formats whose rows are made plain where they are used."""

Compressed = RowFormat | PerRow


@dataclass(frozen=True, slots=True)
class ExactCompression:
    """A model's matrices, and tables, with short exponents where they are bfloat16."""

    flag = "--lossless"
    is_for_integers = False

    def __str__(self) -> str:
        return "exponents of 3 bits, nothing lost"

    def fit(self, columns: int, spare: int | None = None) -> ShortExponents | None:
        """The format of rows of bfloat16; None where it saves nothing. What is to spare is known
        where all numbers have been looked at; else as much as normal numbers want."""
        if columns % LINE_COLUMNS:
            return None
        if spare is None:
            usual = _USUAL_SHARE * columns
            spare = math.ceil(usual + _USUAL_DEVIATIONS * math.sqrt(usual)) + _USUALLY_MORE
        own = ShortExponents(spare=spare)
        return own if own.row_bytes(columns) < 2 * columns else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """What a model's matrices are made: integers of ``bits`` in groups of up to ``group_size``, in
    rows or ``across`` them, or, where the size is None, 8 bits with a scale per row. InputError
    where there is no such format."""

    bits: int
    group_size: int | None
    across: bool = False

    def __post_init__(self) -> None:
        if self.group_size is None and self.bits == 8:
            return
        _check(f"Weights of {self}", self.bits, self.group_size)

    @property
    def is_for_integers(self) -> bool:
        """Whether products are made of the integers themselves."""
        return self.group_size is None

    @property
    def flag(self) -> str:
        """What asks for it on the command line, but for the size of the groups."""
        return "--compute int8" if self.is_for_integers else f"--weight-bits {self.bits}"

    def __str__(self) -> str:
        sharing = "a scale per row" if self.group_size is None else f"groups of {self.group_size}"
        along = " along the output dimension" if self.across else ""
        return f"{self.bits} bits, {sharing}{along}"

    def fit(self, rows: int, columns: int) -> Compressed | None:
        """The format of a matrix of that size; None where it stays plain. Groups are the largest
        that divide the dimension that they run along, and none where only tiny ones would."""
        if self.group_size is None:
            fits = columns % _ALIGNMENT == 0 and columns <= _MOST_COLUMNS
            return PerRow() if fits else None
        size = self.group_size
        while size >= _SMALLEST_GROUP:
            own = Grouped(bits=self.bits, group_size=size, across=self.across)
            # Scales and minima of a group's columns must have equal parts for its rows.
            shared = 2 * own.factor_bytes * columns
            if (rows if self.across else columns) % size == 0 and shared % size == 0:
                return own
            size //= 2
        return None


def find_compression(
    *,
    weight_bits: int | None,
    group_size: int,
    group_dim: str,
    compute: str,
    lossless: bool = False,
) -> Compression | ExactCompression | None:
    """What the flags ask for, None for plain weights. InputError where they do not go together."""
    for flag, value, known in (("--compute", compute, COMPUTES), ("--group-dim", group_dim, DIMS)):
        if value not in known:
            raise InputError(
                f"{flag} {value} was given.", "It is not known.", f"Use {' or '.join(known)}."
            )
    across = group_dim == "output"
    if across and weight_bits is None:
        raise InputError(
            f"--group-dim {group_dim} was given without --weight-bits.",
            "It is of the matrices' groups: integer products have a scale per row, keys and values "
            "groups along the width of a head.",
            "Add --weight-bits 4, or leave it out.",
        )
    if lossless and (weight_bits is not None or compute != "plain"):
        other = f"--compute {compute}" if weight_bits is None else f"--weight-bits {weight_bits}"
        raise InputError(
            f"--lossless was given with {other}.",
            "The one keeps weights as they are, in fewer bits; the other makes other numbers of "
            "them.",
            "Leave one of the two out.",
        )
    if lossless:
        return ExactCompression()
    if compute == "plain":
        if weight_bits is None:
            return None
        return Compression(bits=weight_bits, group_size=group_size, across=across)
    if weight_bits is not None:
        raise InputError(
            f"--compute {compute} was given with --weight-bits {weight_bits}.",
            "Integer products take weights of a format of their own, in 8 bits.",
            "Leave one of the two out.",
        )
    return Compression(bits=8, group_size=None)


def check_groups(*, group_size: int, weight_bits: int | None, kv_bits: int | None) -> None:
    """InputError where a size of groups is asked for and nothing has groups."""
    if group_size != GROUP_SIZE and weight_bits is None and kv_bits is None:
        raise InputError(
            f"--group-size {group_size} was given without --weight-bits and --kv-bits.",
            "Nothing is kept in groups then: integer products have a scale per row.",
            "Add --weight-bits 4 or --kv-bits 4, or leave it out.",
        )


@cache
def find_compressed(dtype: str) -> Compressed | None:
    """The format by its name, None for a plain type."""
    for own in (PerRow(), MicroFloats(), EightFloats()):
        if dtype == own.name:
            return own
    if (short := _SHORT_NAME.fullmatch(dtype)) is not None:
        return ShortExponents(spare=int(short[1]))
    if (levels := find_levels(dtype)) is not None:
        return levels
    found = _NAME.fullmatch(dtype)
    return found and Grouped(
        bits=int(found[1]),
        group_size=int(found[2]),
        wide=found[3] == "f32",
        across=found[3] == "out",
    )


def is_widened(own: str, dtype: str) -> bool:
    """Whether numbers kept as ``own`` are computed with as wider ones, which hold all of them."""
    return own in DTYPE_BYTES and DTYPE_BYTES[own] < DTYPE_BYTES[dtype]


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of a row."""
    compressed = find_compressed(dtype)
    return columns * DTYPE_BYTES[dtype] if compressed is None else compressed.row_bytes(columns)


def rows_together(dtype: str) -> int:
    """How many rows must not be cut apart."""
    compressed = find_compressed(dtype)
    return 1 if compressed is None or isinstance(compressed, PerRow) else compressed.rows_together


def integer_scratch(num_tokens: int, num_rows: int, columns: int) -> int:
    """Words that a product of so many tokens and rows of 8-bit integers wants: for its sums, or for
    as many tokens as are laid at once."""
    laid = align_up(min(num_tokens, LAID_TOKENS), _LAID_TOGETHER) * columns // 4
    return min(SUMS, max(num_tokens * num_rows, laid))


def fit_head(bits: int, group_size: int, width: int) -> Grouped:
    """The format with the largest group, a multiple of 4 up to ``group_size``, that divides a
    head. InputError where there are no such formats, or none divides it."""
    _check(f"Keys and values of {bits} bits, groups of {group_size}", bits, group_size)
    sizes = [size for size in range(4, group_size + 1, 4) if width % size == 0]
    if not sizes:
        raise InputError(
            f"Keys and values of {bits} bits were asked for.",
            f"This model's heads have {width} numbers, which no group of a multiple of 4 divides.",
            "Leave --kv-bits out.",
        )
    return Grouped(bits=bits, group_size=sizes[-1])


def _check(asked: str, bits: int, group_size: int | None) -> None:
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise InputError(
            f"{asked} were asked for.",
            "There are 4 and 8 bits, 3 as a negative control, and groups of "
            f"{', '.join(map(str, GROUP_SIZES))}.",
            "Choose among these, or leave them out: then numbers stay as they are.",
        )
