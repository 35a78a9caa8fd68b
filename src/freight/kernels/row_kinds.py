"""Rows of matrices as loops take them: flat arrays and sizes, a kind of tuple for each way in which
rows are kept. Loops that take several kinds are chosen by it when they are compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "EXPONENT",
    "CodeRows",
    "EightRows",
    "ExponentRows",
    "FourRows",
    "KeptBytes",
    "KeptCodes",
    "KeptEights",
    "KeptLevels",
    "KeptPairs",
    "KeptSixteens",
    "LevelRows",
    "MicroRows",
    "NumberRows",
    "PairRows",
    "SummedCodeRows",
    "kind_of",
]


EXPONENT = 1
"""Byte of a scale that is a power of two: MXFP4, whose codes are floats, without minima."""


class NumberRows(NamedTuple):
    """Plain ones: float32, bfloat16 as uint16, float16 as int16."""

    numbers: Any
    columns: int


class PairRows(NamedTuple):
    """bfloat16 as pairs, uint32, of which a row has so many ``columns``."""

    pairs: Any
    columns: int


class ExponentRows(NamedTuple):
    """With short exponents: bytes, and how many in a row."""

    raw: Any
    columns: int
    row_bytes: int


class MicroRows(NamedTuple):
    """MXFP4: likewise."""

    raw: Any
    columns: int
    row_bytes: int


class EightRows(NamedTuple):
    """Floats of 8 bits: bytes, and the same as float32."""

    raw: Any
    factors: Any
    columns: int
    row_bytes: int


class LevelRows(NamedTuple):
    """Codes of 4 bits for ``levels``, float32, in groups as long as two to the power of ``bits``:
    bytes, the same as float32, and what floats of 8 bits are where scales are such, else none."""

    raw: Any
    factors: Any
    eights: Any
    levels: Any
    columns: int
    row_bytes: int
    bits: int


class CodeRows(NamedTuple):
    """Integers in groups of ``size``: bytes, and the same as numbers as wide as a scale."""

    raw: Any
    numbers: Any
    size: int
    bits: int
    columns: int
    row_bytes: int


class SummedCodeRows(NamedTuple):
    """The same, with the sums of each group's columns of the tokens that meet them."""

    raw: Any
    numbers: Any
    size: int
    bits: int
    columns: int
    row_bytes: int
    sums: Any


class KeptPairs(NamedTuple):
    """How rows of bfloat16 are kept that few tokens meet."""

    row_bytes: int


class KeptCodes(NamedTuple):
    """How rows of 4-bit codes are: bytes of a row, columns of a group, and bytes of its scale."""

    row_bytes: int
    size: int
    factor_bytes: int


class KeptBytes(NamedTuple):
    """The same of codes in 8 bits."""

    row_bytes: int
    size: int
    factor_bytes: int


class KeptEights(NamedTuple):
    """How rows of floats of 8 bits are."""

    row_bytes: int


class KeptLevels(NamedTuple):
    """How rows of codes for levels are, whose scales are float32: bytes of a row, columns of a
    group, and the levels as two numbers of bfloat16 each, twice all sixteen."""

    row_bytes: int
    size: int
    levels: Any
    rest: Any


class KeptSixteens(NamedTuple):
    """How those of groups of sixteen are, whose scales are bytes: the levels, which bfloat16 has,
    likewise, and what floats of 8 bits are."""

    row_bytes: int
    size: int
    levels: Any
    eights: Any


class FourRows(NamedTuple):
    """Integers of 8 bits as fours, uint32, rows ``pitch`` apart with ``width`` of them and a scale
    behind these, in ``scales``, the same as float32; and the tokens' scales."""

    fours: Any
    pitch: int
    width: int
    scales: Any
    token_scales: Any


def kind_of(rows: Any) -> Any:
    """The kind, by the type that the compiler has for rows."""
    return rows.instance_class
