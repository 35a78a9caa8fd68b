"""Weights that are gathered are gathered ahead: a layer's while the one before it is computed.

They depend on no activation, so only a layer's worth of memory is asked for it. Another thread
gathers, with messages of its own. Knows programmes, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from freight.distributed.tensor.executor import Executor, Moved
from freight.distributed.tensor.packed import PackedWeight
from freight.distributed.tensor.ranks import Parts
from freight.partition.sharded import Compute, Sharded, Transfer

__all__ = ["WeightsAhead", "without_gathers"]

_Moved = tuple[dict[str, Parts], Moved]


def without_gathers(own: Sharded) -> tuple[tuple[Transfer, ...], Sharded]:
    """The moves of weights that nothing has used before, and the rest, whose weights come moved."""
    early: list[Transfer] = []
    used: set[str] = set()
    for step in own.steps:
        if isinstance(step, Compute):
            used |= {*step.operands}
        elif step.is_weight and step.value not in used:
            early.append(step)
    weights = {**own.weights, **{step.value: step.after for step in early}}
    left = tuple(step for step in own.steps if step not in early)
    return tuple(early), replace(own, steps=left, weights=weights)


class WeightsAhead:
    """One thread, which gathers in the order in which it is asked; its bytes are counted with the
    executor's when they are taken."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ranks = executor.ranks.apart()
        self._thread = ThreadPoolExecutor(1)

    def begin(
        self,
        early: tuple[Transfer, ...],
        parts: Mapping[str, Parts],
        packed: Mapping[str, PackedWeight],
    ) -> Future[_Moved]:
        """Begin to move weights."""
        return self._thread.submit(self._moved, early, parts, packed)

    def take(self, begun: Future[_Moved]) -> dict[str, Parts]:
        """All weights, as the rest of the programme uses them."""
        found, moved = begun.result()
        self._executor.moved.update(moved)
        return found

    @torch.inference_mode()
    def _moved(
        self,
        early: tuple[Transfer, ...],
        parts: Mapping[str, Parts],
        packed: Mapping[str, PackedWeight],
    ) -> _Moved:
        mover, found = Executor(self._ranks), dict(parts)
        for step in early:
            before = found[step.value]
            own = packed.get(step.value)
            found[step.value] = mover.move(before, step.before, step.move, "weights", own)
        return found, mover.moved
