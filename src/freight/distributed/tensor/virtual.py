"""All ranks of a mesh in one process, side by side: for tests and for models that are looked at.

Nothing is copied that a rank only passes on; what would leave a rank is counted all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freight.distributed.tensor.groups import members, place
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.partition.layout import Mesh

__all__ = ["VirtualRanks"]


@dataclass(frozen=True, slots=True)
class _Come:
    """Tensors that are there already."""

    parts: Parts

    def wait(self) -> Parts:
        return self.parts


class VirtualRanks(Ranks):
    """Of a whole mesh."""

    def __init__(self, mesh: Mesh, device: torch.device | None = None) -> None:
        super().__init__(mesh, range(mesh.num_chips), device or torch.device("cpu"))

    def apart(self) -> VirtualRanks:
        return VirtualRanks(self.mesh, self.device)

    def shift(self, parts: Parts, axes: str, steps: int, like: Parts | None = None) -> _Come:
        come = []
        for index, rank in enumerate(self.own):
            group = members(self.mesh, rank, axes)
            part = parts[group[(place(self.mesh, rank, axes) - steps) % len(group)]]
            assert part.shape == (like or parts)[index].shape
            come.append(part)
        if steps % self.mesh.size(axes):
            self.sent_bytes += sum(part.nbytes for part in parts)
        return _Come(come)
