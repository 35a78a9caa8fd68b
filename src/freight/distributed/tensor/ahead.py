"""Weights in the order of their use; those that are gathered are gathered ahead, a layer's while
the one before it is computed.

They depend on no activation, so only a layer's worth of memory is asked for it. Another thread
gathers, with messages of its own. Knows programmes, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby

import torch

from freight.distributed.tensor.executor import Executor, Moved
from freight.distributed.tensor.layers import StoredLayers
from freight.distributed.tensor.packed import PackedWeight
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.weights import Stored, given_weights
from freight.partition.sharded import Compute, Sharded, Transfer

__all__ = ["WeightsAhead", "gathers_weights", "weights_in_order", "without_gathers"]

_Moved = tuple[dict[str, Parts], Moved]
_Used = tuple[Stored, Sharded, Mapping[str, Parts]]
"""Of a layer what is kept, what is to be computed, and the weights for it."""


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


def gathers_weights(own: Sharded) -> bool:
    """Whether some of its weights are gathered ahead."""
    return bool(without_gathers(own)[0])


def weights_in_order(
    layers: StoredLayers,
    uses: Sequence[tuple[int, Sharded]],
    ranks: Ranks,
    ahead: Callable[[], WeightsAhead],
) -> Iterator[_Used]:
    """For each use of a layer's weights by a programme; the uses of a layer follow each other."""
    split = [without_gathers(own) for _, own in uses]
    if not any(early for early, _ in split):
        yield from _as_they_come(layers, uses, ranks)
        return
    gatherer, places = ahead(), [place for place, _ in uses]
    stored: Stored | None = None
    begun: tuple[Stored, Future[_Moved]] | None = None
    for number in range(len(uses) + 1):
        following = None
        if number < len(uses):
            place, own = uses[number]
            if stored is None or places[number - 1] != place:
                stored = layers.take(place)
            given = given_weights(ranks, own, stored)
            moved = gatherer.begin(split[number][0], given, stored.vectors.packed)
            following = stored, moved
        if begun is not None:
            yield begun[0], split[number - 1][1], gatherer.take(begun[1])
            if places[number - 1] not in places[number : number + 1]:
                layers.release(places[number - 1])
        begun = following


def _as_they_come(
    layers: StoredLayers, uses: Sequence[tuple[int, Sharded]], ranks: Ranks
) -> Iterator[_Used]:
    for place, group in groupby(uses, key=lambda use: use[0]):
        stored = layers.take(place)
        for _, own in group:
            yield stored, own, given_weights(ranks, own, stored)
        layers.release(place)


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
