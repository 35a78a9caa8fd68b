"""What becomes of a product's sums, as loops are told: they are put where results belong, added to
what is there, or have its silu times them there."""

from __future__ import annotations

from typing import Final

__all__ = ["ADDS", "GATES", "PUTS"]

PUTS: Final = 0
ADDS: Final = 1
GATES: Final = 2
