"""Keys and values of all rows, on each rank those that the last layout of attention gave it.

When a call's attention is laid out otherwise than the last one's, what is there is moved first, by
the fewest moves that lead there: where every rank has all keys, its share of them is a slice. Knows
no model.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.ranks import Parts
from freight.errors import BudgetError
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move, move
from freight.partition.reshard import reshard

__all__ = ["KVCache"]


class KVCache:
    """Of rows of up to ``capacity`` tokens. ``sizes`` has all dims of the layouts but L, which no
    layout cuts; ``layout`` is that of [B, L, J, K, D], once there are any."""

    def __init__(
        self,
        executor: Executor,
        *,
        num_layers: int,
        sizes: dict[str, int],
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        self.layout: Layout | None = None
        self.capacity = capacity
        self._executor = executor
        self._sizes = {**sizes, "L": 1}
        self._dtype = dtype
        self._used = 0
        self._kept: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        """Of all own ranks."""
        return sum(own.nbytes for layer in self._kept for own in layer)

    def lay(self, layout: Layout, longest: int) -> None:
        """Lay all keys out as attention wants them, for rows of up to ``longest`` tokens.

        BudgetError where a row is longer than the cache."""
        if longest > self.capacity:
            raise BudgetError(
                f"A row of {longest} tokens was to be continued.",
                f"Its keys and values have room for {self.capacity}.",
                "Make room for longer rows, or shorten them.",
            )
        if layout != self.layout:
            for layer in range(len(self._kept)):
                self._kept[layer] = self._laid(self._kept[layer], layout)
        self.layout, self._used = layout, max(self._used, longest)

    def append(
        self,
        layer: int,
        index: int,
        new: torch.Tensor,
        kv_lens: torch.Tensor,
        real: torch.Tensor,
    ) -> torch.Tensor:
        """Keep the keys and values [B, L, J, K, D] of an own rank's rows behind their ``kv_lens``
        [B] earlier ones, those that are ``real`` [B, L]; all of its rows then, [J, B, K, S, D]."""
        kept = self._kept[layer][index]
        rows, tokens = real.nonzero(as_tuple=True)
        kept.permute(1, 3, 0, 2, 4)[rows, kv_lens[rows] + tokens] = new[rows, tokens]
        return kept[:, :, :, : self._used]

    def _laid(self, before: list[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
        mesh = self._executor.ranks.mesh
        sizes = {**self._sizes, "L": max(self._used, 1)}
        parts: Parts = []
        if self.layout is not None:
            at = self.layout
            parts = [own[:, :, :, : sizes["L"]].permute(1, 3, 0, 2, 4) for own in before]
            for step in moves_between(at, layout, tuple(self._sizes.items()), mesh):
                parts = self._executor.move(parts, at, step, "keys and values")
                at = move(at, step)
        B, _, J, K, D = (int(size) for size in layout.shape(sizes, mesh))
        made = []
        for index in range(len(self._executor.ranks.own)):
            device = self._executor.ranks.device
            own = torch.zeros(J, B, K, self.capacity, D, dtype=self._dtype, device=device)
            if parts:
                own[:, :, :, : sizes["L"]].copy_(parts[index].permute(2, 0, 3, 1, 4))
            made.append(own)
        return made


@lru_cache(maxsize=4096)
def moves_between(
    before: Layout, after: Layout, sizes: tuple[tuple[str, int], ...], mesh: Mesh
) -> tuple[Move, ...]:
    """The cheapest moves from one layout of a tensor to another."""
    return reshard(before, after, dict(sizes), mesh)[0]
