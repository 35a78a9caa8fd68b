"""What ranks send each other: one small interface, and the collectives that are made of it.

A back end shifts tensors along the axes of a mesh and counts the bytes that leave its ranks; all
moves are made of shifts, each rank sending to each other one only what that one needs. Over K ranks
of D bytes, D (K - 1) / K leave each (Pope et al., appendix A.1); a reduction for all takes twice
that. Sums are made in the order of ranks along the axes, so that they do not depend on who makes
them. Collectives over several axes are joint: the ranks along them are one group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from freight.distributed.tensor.groups import place
from freight.partition.layout import Mesh

__all__ = ["Parts", "Pending", "Ranks"]

Parts = list[torch.Tensor]
"""One tensor for each of a process's own ranks."""


class Pending(Protocol):
    """Tensors under way."""

    def wait(self) -> Parts:
        """They have come."""


class Ranks(ABC):
    """The ranks ``own`` of a mesh, which this process computes for; ``sent_bytes`` have left them
    for other ranks."""

    def __init__(self, mesh: Mesh, own: Sequence[int], device: torch.device) -> None:
        self.mesh = mesh
        self.own = tuple(own)
        self.device = device
        self.sent_bytes = 0

    @abstractmethod
    def shift(self, parts: Parts, axes: str, steps: int, like: Parts | None = None) -> Pending:
        """Each rank sends its part to the rank ``steps`` places on along ``axes``, the last one's
        next being the first. What comes has the shape of ``like``, which is that of ``parts`` where
        it is left out."""

    @abstractmethod
    def apart(self) -> Ranks:
        """The same ranks with messages of their own, for another thread. All ranks call it."""

    def places(self, axes: str) -> list[int]:
        """Of the own ranks along some axes."""
        return [place(self.mesh, rank, axes) for rank in self.own]

    def all_gather(
        self, parts: Parts, axes: str, like: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> list[Parts]:
        """For each own rank the parts of all ranks along ``axes``, in order. Where these differ in
        shape, ``like`` has for each own rank tensors of the shapes that come."""
        count, places = self.mesh.size(axes), self.places(axes)
        pending = []
        for steps in range(1, count):
            shapes = None
            if like is not None:
                pairs = zip(like, places, strict=True)
                shapes = [own[(here - steps) % count] for own, here in pairs]
            pending.append(self.shift(parts, axes, steps, shapes))
        return _in_order(parts, pending, places, count)

    def all_to_all(self, chunks: Sequence[Parts], axes: str) -> list[Parts]:
        """Each rank has a chunk for each rank along ``axes``, in order; for each own rank the
        chunks that all have for it."""
        count, places = self.mesh.size(axes), self.places(axes)
        kept = [own[here] for own, here in zip(chunks, places, strict=True)]
        pending = []
        for steps in range(1, count):
            pairs = zip(chunks, places, strict=True)
            leaving = [own[(here + steps) % count] for own, here in pairs]
            pending.append(self.shift(leaving, axes, steps, kept))
        return _in_order(kept, pending, places, count)

    def reduce_scatter(self, chunks: Sequence[Parts], axes: str) -> Parts:
        """Each rank has a chunk for each rank along ``axes``; for each own rank the sum of those
        that are for it."""
        return [_sum(own) for own in self.all_to_all(chunks, axes)]

    def all_reduce(self, parts: Parts, axes: str) -> Parts:
        """For each own rank the sum over the ranks along ``axes``, the same for all of them."""
        count = self.mesh.size(axes)
        chunks = [[*part.reshape(-1).tensor_split(count)] for part in parts]
        sums = self.reduce_scatter(chunks, axes)
        whole = self.all_gather(sums, axes, like=chunks)
        return [torch.cat(own).view(part.shape) for own, part in zip(whole, parts, strict=True)]


def _in_order(
    kept: Parts, pending: Sequence[Pending], places: Sequence[int], count: int
) -> list[Parts]:
    """What has come, by the place that it comes from; ``pending`` are shifts by 1, 2 and so on."""
    come = [kept, *(own.wait() for own in pending)]
    return [
        [come[(here - source) % count][index] for source in range(count)]
        for index, here in enumerate(places)
    ]


def _sum(terms: Parts) -> torch.Tensor:
    if len(terms) == 1:
        return terms[0]
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total += term
    return total
