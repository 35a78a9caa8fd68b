"""How many rows of a compressed matrix are made plain at once: few on a CPU, which keeps them in a
cache, many on a device, where every call costs some microseconds."""

from __future__ import annotations

from typing import Final

from freight.model.number_format import TILE_ROWS

__all__ = ["tile_rows"]

_DEVICE_NUMBERS: Final = 1 << 24


def tile_rows(rows: int, columns: int, *, on_device: bool) -> int:
    """Of a matrix of so many rows and columns; whole groups across rows, if it has them."""
    most = TILE_ROWS
    if on_device:
        most = max(most, _DEVICE_NUMBERS // columns // TILE_ROWS * TILE_ROWS)
    return min(most, -(-rows // TILE_ROWS) * TILE_ROWS)
