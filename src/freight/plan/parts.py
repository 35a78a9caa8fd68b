"""What a layout is made of: rows of a weight on one tier, and what brings them to another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from freight.model.number_format import (
    DTYPE_BYTES,
    Compressed,
    find_compressed,
    row_bytes,
    rows_together,
)
from freight.model.programme import Weight
from freight.plan.forms import BLOCK
from freight.plan.policy import Tier
from freight.quantities import align_down, align_up

__all__ = ["Part", "Piece", "SlotPart", "Stretch", "granule_rows", "mixed"]

_GRANULE_ROWS: Final = 64


def granule_rows(num_rows: int, dtype: str) -> int:
    """Between how many rows a matrix may be cut: of large ones as many as a product's tiles are
    high, and whole groups."""
    granule = _GRANULE_ROWS if num_rows >= 16 * _GRANULE_ROWS else 1
    return math.lcm(granule, rows_together(dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows of a weight on one tier; ``first_row`` counts within the unit's weight. In memory they
    are of ``dtype``: that of the computation, but what is compressed stays so, and so do narrower
    numbers, which are widened where they are used."""

    weight: Weight
    first_row: int
    num_rows: int
    tier: Tier
    dtype: str

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.weight.num_columns

    @property
    def num_bytes(self) -> int:
        return self.num_rows * row_bytes(self.dtype, self.weight.num_columns)

    @property
    def compressed(self) -> Compressed | None:
        return find_compressed(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPart:
    """A part that is streamed: where it lies in the unit's slot, and its dtype there."""

    part: Part
    slot_offset: int
    dtype: str

    @property
    def is_foreign(self) -> bool:
        """Whether it is to be cast, or not aligned; what is compressed is made plain where it is
        used."""
        if self.part.compressed is not None:
            return False
        return self.dtype != self.part.dtype or self.slot_offset % DTYPE_BYTES[self.dtype] > 0

    @property
    def row_bytes(self) -> int:
        """Of a row in the slot."""
        return row_bytes(self.dtype, self.part.weight.num_columns)

    @property
    def granule_bytes(self) -> int:
        """Of rows that are not cut where a slot is: what comes behind them is to begin where a
        product's results begin lines of a cache, of small matrices, too."""
        return math.lcm(_GRANULE_ROWS, rows_together(self.part.dtype)) * self.row_bytes

    def rows_to(self, border: int) -> int:
        """How many rows a part has that begins before a border of its slot, when it is cut there,
        or else behind it as soon as it can be."""
        granule = self.granule_bytes
        reached = align_up(max(0, border - self.slot_offset), granule) // self.row_bytes
        return min(reached, self.part.num_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One read or copy into a slot.

    From the disk tier: ``path`` and ``offset`` in that file, whole blocks, of which
    ``logical_bytes`` are wanted. From the cpu tier: ``path`` is None and ``offset`` counts in the
    unit's own stretch of that tier.
    """

    path: Path | None
    offset: int
    num_bytes: int
    logical_bytes: int
    slot_offset: int

    @property
    def tier(self) -> Tier:
        return "cpu" if self.path is None else "disk"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Streamed bytes that lie one after the other, on their tier as in the slot: what a piece is
    cut from. ``path``, ``offset`` and ``slot_offset`` are as a piece has them, ``wanted`` the
    places and sizes of what is wanted."""

    path: Path | None
    offset: int
    num_bytes: int
    slot_offset: int
    wanted: tuple[tuple[int, int], ...]

    @property
    def tier(self) -> Tier:
        return "cpu" if self.path is None else "disk"

    @property
    def logical_bytes(self) -> int:
        return sum(size for _, size in self.wanted)

    def cut(self, most_bytes: int) -> Iterator[tuple[int, int]]:
        """(beginning, bytes) of pieces of up to so many, from the stretch's own beginning on."""
        step = most_bytes if self.path is None else max(BLOCK, align_down(most_bytes, BLOCK))
        for start in range(0, self.num_bytes, step):
            yield start, min(step, self.num_bytes - start)

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        for start, size in self.cut(most_bytes):
            offset = self.offset + start
            yield Piece(
                path=self.path,
                offset=offset,
                num_bytes=size,
                logical_bytes=sum(_overlap(*own, offset, size) for own in self.wanted),
                slot_offset=self.slot_offset + start,
            )


class _Sized(Protocol):
    """A piece, in full or as a forecast knows it."""

    @property
    def tier(self) -> Tier: ...

    @property
    def num_bytes(self) -> int: ...


Sized = TypeVar("Sized", bound=_Sized)


def mixed(pieces: Iterable[Sized]) -> list[Sized]:
    """A unit's pieces in the order in which they come: of both tiers evenly from the first to the
    last, so that disk and link work side by side all the time. What is read ahead has few slots: of
    pieces that came tier by tier, the disk would rest while those in RAM are copied."""
    ranked = []
    own = list(pieces)
    for tier in ("disk", "cpu"):
        some = [piece for piece in own if piece.tier == tier]
        whole, before = sum(piece.num_bytes for piece in some), 0
        for piece in some:
            ranked.append(((before + piece.num_bytes / 2) / whole, piece))
            before += piece.num_bytes
    return [piece for _, piece in sorted(ranked, key=lambda pair: pair[0])]


def _overlap(offset: int, length: int, start: int, size: int) -> int:
    return max(0, min(offset + length, start + size) - max(offset, start))
