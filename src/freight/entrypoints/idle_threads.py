"""What torch's libraries read from the environment when they are loaded: how long threads wait, and
how much code for products is kept.

By default threads wait busily for milliseconds, in which they take the cores from the lanes and
loops beside them: on two cores these then take up to twice as long. Code is kept for a thousand
products of different shapes, and by another cache what names and describes it once more: together a
MiB each, outside any budget. Knows no torch.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["wait_briefly"]

_TURNS: Final = "10000"
"""Of waiting: tens of microseconds, as long as it is from one operation of a unit to the next."""

_KEPT_PRODUCTS: Final = "64"
"""Shapes of products whose code is kept: those of a sweep, a few times over. Making it anew takes
milliseconds, as long as such a product or two."""

_KEPT_DESCRIPTIONS: Final = "16"
"""Their descriptions, which are found or made anew within microseconds."""


def wait_briefly() -> None:
    """Set it for this process, unless the user has."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _TURNS)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KEPT_PRODUCTS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", _KEPT_DESCRIPTIONS)
