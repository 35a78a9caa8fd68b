"""How loops that are called by loops are compiled.

numba counts references to arrays wherever one is passed on, sliced or put into a tuple: each by an
instruction that locks its memory, that other cores may want at the time, and that waits for all
loads and stores before it. What neither allocates nor returns an array needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from numba import njit

__all__ = ["UNCOUNTED", "uncounted"]

UNCOUNTED: Final[Mapping[str, bool]] = {"nogil": True, "boundscheck": False, "_nrt": False}
"""What numba compiles a loop with; ``_nrt`` is its run time for memory."""


def uncounted(function: Callable[..., Any]) -> Any:
    """A loop that allocates nothing and returns no array, and calls none that returns one."""
    return njit(cache=True, **UNCOUNTED)(function)
