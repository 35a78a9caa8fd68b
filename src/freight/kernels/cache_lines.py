"""Lines of the processor's caches, for loops that numba compiles: room that begins with one, and
lines that are brought before they are wanted. Indices count elements; nothing is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from freight.kernels.llvm import WIDTH, address_of, fetch

__all__ = ["prefetch", "prefetch_further", "whole_lines", "zero_lines"]


@intrinsic
def prefetch(context, array, index):  # type: ignore[no-untyped-def]
    """Have the cache line of an element brought; it need not be there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fetch(builder, address_of(context, builder, signature.args[0], *arguments))
        return context.get_dummy_value()

    return types.none(array, types.uintp), generate


@intrinsic
def prefetch_further(context, array, index):  # type: ignore[no-untyped-def]
    """The same, into the second cache: more of them may be under way."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = address_of(context, builder, signature.args[0], *arguments)
        fetch(builder, at, near=False)
        return context.get_dummy_value()

    return types.none(array, types.uintp), generate


@njit(nogil=True, cache=True, boundscheck=False)
def whole_lines(count):  # type: ignore[no-untyped-def]
    """So many floats that begin where a cache line does: of others each vector lies in two."""
    room = np.empty(count + WIDTH, np.float32)
    first = -room.ctypes.data // 4 % WIDTH
    return room[first : first + count]


@njit(nogil=True, cache=True, boundscheck=False)
def zero_lines(count):  # type: ignore[no-untyped-def]
    """The same, that are zeros."""
    found = whole_lines(count)
    found[:] = np.float32(0.0)
    return found
