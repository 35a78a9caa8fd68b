"""How many layers each stage of a pipeline gets, where machines differ.

All stages of a pipeline wait for the slowest, so the layers are cut such that the slowest takes as
little time as can be. Knows rates and bytes, no machine and no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from freight.plan.shares import layer_ranges, ranges_of

__all__ = ["Capacity", "balance_layers"]

_BESIDE: Final = 1.25
"""Memory that a layer takes, keys, slots and scratch among it, in units of its weights."""
_ALIKE: Final = 1.25
"""Machines whose times differ by less are taken as equal: a measured rate is no surer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What a stage's machine can do: products, in floating-point operations per second; the memory
    that weights and what goes with them may take; how fast what finds no room there is read."""

    flops_per_s: float
    memory_bytes: int
    read_bytes_per_s: float

    def seconds(self, num_layers: int, layer_bytes: int, layer_flops: float) -> float:
        """Of a sweep over so many layers; reading and computing go side by side."""
        outside = max(0.0, num_layers * layer_bytes * _BESIDE - self.memory_bytes)
        computing_s = num_layers * layer_flops / self.flops_per_s
        return max(computing_s, outside / self.read_bytes_per_s)


def balance_layers(
    num_layers: int, stages: Sequence[Capacity], *, layer_bytes: int, layer_flops: float
) -> list[range]:
    """The layers of each stage, at least one. ``layer_flops`` are those of a sweep.

    Layers are given out one by one, each to the stage that is then done soonest, which is optimal
    as no stage is faster with more of them. Equal parts are kept where they cost little more.
    """

    def seconds(stage: int, count: int) -> float:
        return stages[stage].seconds(count, layer_bytes, layer_flops)

    counts = [1] * len(stages)
    for _ in range(num_layers - len(stages)):
        soonest = min(range(len(stages)), key=lambda own: (seconds(own, counts[own] + 1), own))
        counts[soonest] += 1
    equal = layer_ranges(num_layers, len(stages))
    slowest_s = max(seconds(stage, len(own)) for stage, own in enumerate(equal))
    if slowest_s <= _ALIKE * max(map(seconds, range(len(stages)), counts)):
        return equal
    return ranges_of(counts)
