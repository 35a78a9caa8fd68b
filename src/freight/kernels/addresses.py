"""Arrays at addresses, for loops that numba compiles: a table of whole numbers tells them all that
they work on, which one call hands over. Nothing is checked, and nothing kept: whoever calls a loop
keeps what lies there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

__all__ = ["bytes_at", "floats_at", "halves_at", "words_at"]


@intrinsic
def _pointer_to(context, address):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@njit(nogil=True, cache=True)
def bytes_at(address, count):  # type: ignore[no-untyped-def]
    """So many bytes."""
    return carray(_pointer_to(address), (count,), np.uint8)


@njit(nogil=True, cache=True)
def words_at(address, count):  # type: ignore[no-untyped-def]
    """So many uint32."""
    return carray(_pointer_to(address), (count,), np.uint32)


@njit(nogil=True, cache=True)
def floats_at(address, count):  # type: ignore[no-untyped-def]
    """So many float32."""
    return carray(_pointer_to(address), (count,), np.float32)


@njit(nogil=True, cache=True)
def halves_at(address, count):  # type: ignore[no-untyped-def]
    """So many uint16, which are bfloat16."""
    return carray(_pointer_to(address), (count,), np.uint16)
