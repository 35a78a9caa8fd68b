"""Of sixteen rows of sixteen numbers one number each, side by side: its sum, or its largest, for
loops that numba compiles. It is a third of the work of finding them row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from freight.kernels.llvm import FLOAT, LOADERS, WIDTH, added, larger_of, place_of, totals

__all__ = ["put_largest", "put_totals"]

_INDEX = types.uintp


def _of_rows(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """What makes of the rows' numbers one each, out[place] and what follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, start, out, place = arguments
        of_rows, _, of_out, _ = signature.args
        vectors = []
        for row in range(WIDTH):
            index = builder.add(start, start.type(WIDTH * row))
            load = LOADERS[types.float32]
            vectors.append(load(context, builder, types.none(of_rows), (rows, index)))
        found = totals(builder, vectors, combine=combine)
        target = place_of(context, builder, of_out, out, place, FLOAT)
        builder.store(found, target, align=4)
        return context.get_dummy_value()

    return generate


@intrinsic
def put_totals(context, rows, start, out, place):  # type: ignore[no-untyped-def]
    """out[place + i] = the sum of the sixteen from rows[start + 16 i] on, for sixteen i."""
    return types.none(rows, _INDEX, out, _INDEX), _of_rows(added)


@intrinsic
def put_largest(context, rows, start, out, place):  # type: ignore[no-untyped-def]
    """out[place + i] = the largest of them."""
    return types.none(rows, _INDEX, out, _INDEX), _of_rows(larger_of)
