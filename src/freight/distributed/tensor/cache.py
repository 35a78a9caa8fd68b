"""Keys and values of all rows, on each rank those that the last layout of attention gave it.

When a call's attention is laid out otherwise than the last one's, a layer's keys are moved before
it is computed, by the fewest moves that lead there: where every rank has all keys, its share of
them is a slice. Knows no model.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.moves import own_range
from freight.distributed.tensor.ranks import Parts
from freight.errors import BudgetError
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move, move
from freight.partition.reshard import reshard

__all__ = ["KVCache"]


class KVCache:
    """Of some ``layers``, and rows of up to ``capacity`` tokens. ``sizes`` has all dims of the
    layouts but L, which none cuts."""

    def __init__(
        self,
        executor: Executor,
        *,
        layers: range,
        sizes: dict[str, int],
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        self.capacity = capacity
        self._executor = executor
        self._sizes = {**sizes, "L": 1}
        self._dtype = dtype
        self._longest = 0
        self._kept: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._layouts: dict[int, Layout] = {}

    @property
    def num_bytes(self) -> int:
        """Of all own ranks."""
        return sum(own.nbytes for layer in self._kept.values() for own in layer)

    def lay(self, layer: int, layout: Layout, *, used: int, longest: int) -> None:
        """Lay a layer's keys [B, L, J, K, D] out as attention wants them: rows have up to ``used``
        tokens, and those of the call come to have up to ``longest``.

        BudgetError where a row is longer than the cache."""
        if longest > self.capacity:
            raise BudgetError(
                f"A row of {longest} tokens was to be continued.",
                f"Its keys and values have room for {self.capacity}.",
                "Make room for longer rows, or shorten them.",
            )
        before = self._layouts.get(layer)
        if layout != before:
            self._kept[layer] = self._laid(self._kept[layer], before, layout, used)
        self._layouts[layer], self._longest = layout, longest

    def append(
        self,
        layer: int,
        index: int,
        new: torch.Tensor,
        kv_lens: torch.Tensor,
        real: torch.Tensor,
        seats: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keep the keys and values [B, L, J, K, D] of an own rank's rows behind their ``kv_lens``
        [B] earlier ones, those that are ``real`` [B, L]; all of these rows then, [J, B, K, S, D].
        They are the rows ``seats`` [B] of the cache, in its order; None: all that the rank has."""
        kept = self._kept[layer][index]
        rows, tokens = real.nonzero(as_tuple=True)
        places = kv_lens[rows] + tokens
        if seats is None:
            kept.permute(1, 3, 0, 2, 4)[rows, places] = new[rows, tokens]
            return kept[:, :, :, : self._longest]
        here = seats - self._first(index, self._layouts[layer])
        kept.permute(1, 3, 0, 2, 4)[here[rows], places] = new[rows, tokens]
        return kept[:, :, :, : self._longest].index_select(1, here)

    def _first(self, index: int, layout: Layout) -> int:
        """Of the rows that an own rank has."""
        ranks = self._executor.ranks
        return own_range(ranks.mesh, ranks.own[index], self._sizes["B"], layout.cut("B")).start

    def _laid(
        self, kept: list[torch.Tensor], at: Layout | None, layout: Layout, used: int
    ) -> list[torch.Tensor]:
        mesh = self._executor.ranks.mesh
        sizes = {**self._sizes, "L": used}
        parts: Parts = []
        if at is not None and used:
            parts = [own[:, :, :, : sizes["L"]].permute(1, 3, 0, 2, 4) for own in kept]
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
