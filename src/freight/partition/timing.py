"""Seconds of a layer's moves, at the rates of a fabric: bytes one after the other, fixed times
shared.

Transfers of one group go at the same time, those of one value after each other: their bytes add up,
and along each axis the fixed time counts as often as for the value that crosses it most often.
Knows no arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from freight.partition.fabric import Fabric
from freight.partition.sharded import Sharded

__all__ = ["moves_s"]


def moves_s(
    own: Sharded, fabric: Fabric, activation_bytes: float, weight_bytes: float
) -> Iterator[tuple[float, float]]:
    """Of each transfer, in order, the bytes that a chip sends and what it adds to the time."""
    crossed: Counter[tuple[int, str, str]] = Counter()
    counted: Counter[tuple[int, str]] = Counter()
    for step in own.transfers:
        kind, axes, group = step.move.kind, step.move.axes, step.group
        size = weight_bytes if step.is_weight else activation_bytes
        larger = step.after if kind == "all-gather" else step.before
        seconds = fabric.sending_s(kind, larger.elements(own.sizes, own.mesh) * size, axes)
        for axis in axes if kind != "slice" else "":
            crossed[group, step.value, axis] += 2 if kind == "all-reduce" else 1
            more = crossed[group, step.value, axis] - counted[group, axis]
            if more > 0:
                seconds += more * fabric.latency(axis)
                counted[group, axis] += more
        yield step.elements * size, seconds
