"""How many rows of a compressed matrix are made plain at once: few on a CPU, which keeps them in a
cache, many on a device, where every call costs some microseconds. And how many tokens a CPU lays
anew at once, or are widened together."""

from __future__ import annotations

from typing import Final

from freight.model.number_format import TILE_ROWS

__all__ = [
    "KEPT_BYTES",
    "KEPT_QUERIES",
    "KEPT_TOKENS",
    "STREAM_TOKENS",
    "TOKENS_OF_A_LAUNCH",
    "laid_tokens",
    "tile_rows",
]

STREAM_TOKENS: Final = 64
"""Tokens whose streams are wide at once."""
KEPT_TOKENS: Final = 256
"""Of a row that attends what is kept of it, tokens that are compressed at once."""
KEPT_QUERIES: Final = 32
"""Of these the ones that attend at once."""
KEPT_BYTES: Final = 4 << 20
"""What is gathered at once of rows that attend what is kept of them."""
TOKENS_OF_A_LAUNCH: Final = 64
"""Up to so many of an expert a device multiplies by one launch for several: their rows are read
once. For more torch's products are as good."""
_DEVICE_NUMBERS: Final = 1 << 24
_LAID_NUMBERS: Final = 1 << 22
_MOST_LAID: Final = 2048
_FEWEST_LAID: Final = 2 * TILE_ROWS
_ALIKE: Final = 32


def tile_rows(rows: int, columns: int, *, on_device: bool) -> int:
    """Of a matrix of so many rows and columns; whole groups across rows, if it has them."""
    most = TILE_ROWS
    if on_device:
        most = max(most, _DEVICE_NUMBERS // columns // TILE_ROWS * TILE_ROWS)
    return min(most, -(-rows // TILE_ROWS) * TILE_ROWS)


def laid_tokens(columns: int) -> int:
    """Tokens of so many columns, in 16 bits, that are laid anew for loops at once: rows are laid
    for these, and again for the next ones."""
    most = min(_LAID_NUMBERS // columns // _ALIKE * _ALIKE, _MOST_LAID)
    return max(most, _FEWEST_LAID)
