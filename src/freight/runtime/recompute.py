"""Keys and values that are not kept but computed again, of what came into attention.

Where a layer's rows off the compute tier keep the residual stream as it entered the layer, their
pages come with it, and keys and values of all of them are made where all is computed, in pages of
the same numbers. After "KVPR" (2411.17089), which does so for the first tokens of a row, where here
it is some of the layers. Knows pages and units, no order of operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from freight.kernels.paged import append_rows
from freight.kernels.pages import Pages
from freight.memory.passage import Passage, RowPages
from freight.model.batch import RowSpan
from freight.model.config import ModelConfig
from freight.model.frame import Angles, Frame, WeightParts
from freight.model.heads import Heads
from freight.model.kv_view import KVCopy, KVView
from freight.model.layers import run_unit
from freight.model.programme import Attend, Unit
from freight.model.rope import inverse_frequencies
from freight.model.rope_config import RopeConfig
from freight.model.workspace import Workspace

__all__ = ["LoadedPages", "Recomputation", "loaded_pages"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPages:
    """The pages of a slot that hold earlier tokens: their numbers [n], and the position in its row
    of the first token of each [n]."""

    pages: torch.Tensor
    positions: torch.Tensor


def loaded_pages(
    passage: Passage,
    rows: list[tuple[RowPages, RowSpan]],
    page_tokens: int,
    device: torch.device,
) -> LoadedPages:
    """Those of a micro-batch's ``rows`` elsewhere, in the order of the passage's tables. Of rows
    whose beginning is in another place tokens are counted without it, but stand behind it."""
    pages, positions = [], []
    for (own, span), table in zip(rows, passage.tables, strict=True):
        for turn, page in enumerate(table[: -(-span.kv_len // page_tokens)]):
            pages.append(page)
            positions.append((own.num_elsewhere + turn) * page_tokens)
    return LoadedPages(
        pages=torch.from_numpy(np.array(pages, np.int64)).to(device),
        positions=torch.from_numpy(np.array(positions, np.int64)).to(device),
    )


class Recomputation:
    """Makes the keys and values of a slot's pages, in ``room`` [pages, page bytes]."""

    def __init__(
        self,
        config: ModelConfig,
        room: torch.Tensor,
        *,
        page_tokens: int,
        most_tokens: int,
        chunk_tokens: int,
        dtype: torch.dtype,
        workspace: Workspace,
    ) -> None:
        self._config = config
        self._page_tokens = page_tokens
        self._chunk_pages = max(1, chunk_tokens // page_tokens)
        self._dtype = dtype
        self._workspace = workspace
        self._units: dict[int, Unit] = {}
        self._room = room
        self._num_positions = -(-most_tokens // page_tokens) * page_tokens
        self._angles = {rope: self._angles_of(rope) for rope in config.rotations}

    def pages(self, heads: Heads) -> Pages:
        """What is made, of a layer with such heads."""
        return Pages(
            raw=self._room,
            num_heads=heads.num_kv,
            page_tokens=self._page_tokens,
            width=heads.width,
            dtype=self._dtype,
            number_format=None,
            keys_alone=self._config.keys_alone,
        )

    def _angles_of(self, rope: RopeConfig) -> Angles:
        """Of all positions."""
        count, device = self._num_positions, self._room.device
        frequencies, scale = inverse_frequencies(rope, 1, self._config.max_positions)
        angles = torch.arange(count, dtype=torch.float32)[:, None] * frequencies
        cos, sin = ((turn * scale).to(self._dtype) for turn in (angles.cos(), angles.sin()))
        return Angles(cos=cos.to(device), sin=sin.to(device))

    def keep(self, slot: torch.Tensor, view: KVView, x: torch.Tensor) -> None:
        """Put what comes into attention, x [T, D], into the pages [P, page bytes] of a slot."""
        own = KVCopy(start=view.start, token_pages=view.token_pages, token_places=view.token_places)
        inputs = self._inputs(slot)
        for row in (own, *view.copies):
            tokens = x[row.start : row.start + len(row.token_pages)]
            inputs[row.token_pages, row.token_places] = tokens

    def make(
        self,
        unit: Unit,
        weights: Mapping[str, WeightParts],
        slot: torch.Tensor,
        loaded: LoadedPages,
    ) -> None:
        """Keys and values of the earlier tokens in a slot."""
        inputs, own = self._inputs(slot), self._unit(unit)
        attend = next(step for step in unit.steps if isinstance(step, Attend))
        assert attend.k is not None and attend.v is not None
        heads, width = attend.num_kv_heads, attend.head_dim
        made = self.pages(Heads(heads, width))
        within = torch.arange(self._page_tokens, device=slot.device)
        for first in range(0, len(loaded.pages), self._chunk_pages):
            pages = loaded.pages[first : first + self._chunk_pages]
            starts = loaded.positions[first : first + self._chunk_pages]
            places = (starts[:, None] + within).flatten().clamp_(max=self._num_positions - 1)
            count = len(places)
            with self._workspace.frame():
                x = self._workspace.take(count, self._config.hidden_size, dtype=self._dtype)
                torch.index_select(inputs, 0, pages, out=x.view(len(pages), self._page_tokens, -1))
                made_of = {
                    name: self._workspace.take(count, heads * width, dtype=self._dtype)
                    for name in dict.fromkeys((attend.k, attend.v))
                }
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values={"x": x, **made_of},
                    angles={rope: own.of(places) for rope, own in self._angles.items()},
                    positions=places,
                )
                run_unit(own, frame)
                append_rows(
                    made,
                    pages.repeat_interleave(self._page_tokens),
                    within.repeat(len(pages)),
                    made_of[attend.k].view(count, heads, width),
                    made_of[attend.v].view(count, heads, width),
                )

    def _unit(self, unit: Unit) -> Unit:
        assert unit.layer is not None
        if unit.layer not in self._units:
            own = unit.keys()
            assert own is not None, "refused when the plan was made"
            self._units[unit.layer] = own
        return self._units[unit.layer]

    def _inputs(self, slot: torch.Tensor) -> torch.Tensor:
        """A slot's pages [P, tokens, D]."""
        width = self._config.hidden_size
        used = slot[:, : self._page_tokens * width * self._dtype.itemsize]
        return used.view(self._dtype).view(len(slot), self._page_tokens, width)
