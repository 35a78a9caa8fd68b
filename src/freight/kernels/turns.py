"""Shares of a loop's work that threads take in turns while they hold no lock of the interpreter,
for loops that numba compiles. Counters are int64, in an array that all threads see."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from freight.kernels.compiled import uncounted
from freight.kernels.llvm import address_of

__all__ = ["take", "wait_for"]

_BYTES = 8


@intrinsic
def take(context, counters, index, amount):  # type: ignore[no-untyped-def]
    """Add an amount to a counter and return what it was, as one step that no thread comes
    between: whoever sees the new number sees all that was written before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, place, more = arguments
        at = address_of(context, builder, signature.args[0], data, place)
        return builder.atomic_rmw("add", at, more, "acq_rel")

    return types.int64(counters, types.uintp, types.int64), generate


@intrinsic
def _seen(context, counters, index):  # type: ignore[no-untyped-def]
    """A counter as it is, with what was written before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = address_of(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(at, "acquire", _BYTES)

    return types.int64(counters, types.uintp), generate


@uncounted
def wait_for(counters, index, least):  # type: ignore[no-untyped-def]
    """Until a counter is ``least`` or more, which others bring about in a moment."""
    while _seen(counters, index) < least:
        pass
