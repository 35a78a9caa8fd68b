"""Sizes as people write them, and back: "16GiB" <-> bytes.

Knows nothing of tiers or models. Suffixes follow IEC: KiB, MiB, GiB, TiB are powers of 1024; KB,
MB, GB, TB powers of 1000; a bare K, M, G or T is read as its IEC power, as most tools do.
"""

from __future__ import annotations

import re
from typing import Final

from freight.errors import InputError

__all__ = ["GIB", "KIB", "MIB", "align_down", "align_up", "format_bytes", "parse_bytes"]

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PATTERN: Final = re.compile(r"([+-]?[0-9]*\.?[0-9]+)\s*([KMGT]?)(I?B?)", re.IGNORECASE)


def parse_bytes(text: str, *, name: str = "The size") -> int:
    """Parse "1450MiB", "16 GiB", "2GB" or "4096" into a positive number of bytes; ``name`` is what
    they were given as."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{name} {text!r} was given.",
            "It is not a number with a unit.",
            "Write it like 8GiB, 1450MiB or 2GB.",
        )
    number, prefix, suffix = match.groups()
    decimal = bool(prefix) and suffix.upper() == "B"
    num_bytes = int(float(number) * (1000 if decimal else 1024) ** _POWERS[prefix.upper()])
    if num_bytes <= 0:
        raise InputError(
            f"{name} {text!r} was given.",
            "It must be more than zero.",
            "Write it like 8GiB, or leave it out.",
        )
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Format bytes with a binary unit and at most three significant digits after rounding."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """The largest multiple of ``alignment`` that is at most ``value``."""
    return value // alignment * alignment
