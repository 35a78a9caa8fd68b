"""Steps of scores that sink with the distance (ALiBi, https://arxiv.org/abs/2108.12409), as data.

A score has a slope of its head, times the key's position less the query's, added to it. Both are
columns of a head beside its own: keys carry their position, queries the slope, so that attention
itself is as everywhere. What the queries' own position adds is the same for all keys and may be
rounded; the rest is exact in 16 bits: positions as whole 256 and what is left, slopes as a number
and what was rounded off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = [
    "MOST_POSITIONS",
    "SLOPE_COLUMNS",
    "WIDE",
    "Narrow",
    "SlopeStep",
    "Widen",
    "slopes_of",
    "widened",
]

SLOPE_COLUMNS: Final = 8
"""Five are used; heads of a multiple of eight numbers stay such."""
MOST_POSITIONS: Final = 1 << 16
WIDE: Final[Mapping[str, Any]] = {"q": "wide_q", "k": "wide_k", "v": "wide_v"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Widen:
    """out = each head of x with columns behind it: for "k" its position, for "q" the slope over
    ``scale``, which scores are multiplied by; for "v" zeros, of which there may be more ``columns``
    or fewer. Slopes go down to 2^-``span``."""

    x: str
    out: str
    num_heads: int
    role: Literal["q", "k", "v"]
    span: float = 0.0
    scale: float = 1.0
    columns: int = SLOPE_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow:
    """out = each head of x without these columns"""

    x: str
    out: str
    num_heads: int
    columns: int = SLOPE_COLUMNS


SlopeStep = Widen | Narrow


def widened(num_heads: int, num_kv_heads: int, span: float, scale: float) -> list[Widen]:
    """Queries, keys and values with these columns."""
    counts: list[tuple[Literal["q", "k", "v"], int]] = [
        ("q", num_heads),
        ("k", num_kv_heads),
        ("v", num_kv_heads),
    ]
    return [
        Widen(x=role, out=WIDE[role], num_heads=count, role=role, span=span, scale=scale)
        for role, count in counts
    ]


def slopes_of(num_heads: int, span: float) -> list[float]:
    """Of each head: a row of powers for the most heads that are a power of two, then every other
    one of the row for twice as many."""
    most = 1 << math.floor(math.log2(num_heads))
    first = [2.0 ** (-span * (head + 1) / most) for head in range(most)]
    between = [2.0 ** (-span * (head + 0.5) / most) for head in range(num_heads - most)]
    return first + between
