"""A micro-batch made ready for one sweep: where its tokens and keys lie, indexed once.

Also counts what it moves, for the schedule. Knows tiers and pages; the layers see only views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from freight.memory.activations import Activations, TokenCut, slot_bytes
from freight.memory.kv_cache import KVCache, Passage, RowPages, num_pages_of, plan_passage
from freight.model.attention import KVView, index_rows
from freight.model.batch import MicroBatch, chunk_rows
from freight.model.config import ModelConfig
from freight.model.rope import depends_on_length, inverse_frequencies
from freight.plan.policy import Policy
from freight.plan.sweep import BatchWork, Moved
from freight.runtime.weights import EmbeddingTable

__all__ = ["BatchPreparer", "Chunk", "PreparedBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Whole rows that go through an attention unit together: tokens ``start`` to ``end``.

    ``near`` indexes the rows whose pages are on the compute tier, ``slot`` those in a slot.
    """

    start: int
    end: int
    near: KVView | None
    slot: KVView | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """``cos`` and ``sin`` are [T, rotary/2] in the compute dtype, ``positions`` [T] count from 0 in
    each row; ``far_places`` are the tokens
    whose embedding rows come through a buffer; ``logit_places`` those after which logits are
    wanted."""

    batch: MicroBatch
    token_ids: np.ndarray
    far_places: np.ndarray
    cut: TokenCut
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    chunks: tuple[Chunk, ...]
    passage: Passage
    logit_places: torch.Tensor


class BatchPreparer:
    """Prepares micro-batches, and keeps those whose stores may still be under way."""

    def __init__(
        self,
        config: ModelConfig,
        policy: Policy,
        *,
        kv_cache: KVCache,
        activations: Activations,
        embedding: EmbeddingTable,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._policy = policy
        self._kv = kv_cache
        self._activations = activations
        self._embedding = embedding
        self._device = device
        self._dtype = dtype
        self._prepared: dict[tuple[int, int], PreparedBatch] = {}
        self._far_bytes = config.embedding_size * dtype.itemsize

    def get(self, sweep: int, k: int) -> PreparedBatch:
        return self._prepared[sweep, k]

    def describe(self, sweep: int, batch: MicroBatch, continues: bool) -> BatchWork:
        """Prepare ``batch`` for ``sweep`` and say what it moves."""
        prepared = self._prepare(batch)
        old = [key for key in self._prepared if key[0] < sweep - 1]
        for key in old:
            del self._prepared[key]
        self._prepared[sweep, batch.index] = prepared
        passage, page_bytes = prepared.passage, self._kv.page_bytes
        cut, row_bytes = prepared.cut, self._activations.row_bytes
        return BatchWork(
            batch=batch,
            continues=continues,
            embedding_bytes=len(prepared.far_places) * self._far_bytes,
            kv_load=Moved(
                cpu=num_pages_of(passage.cpu_in) * page_bytes,
                disk=num_pages_of(passage.disk_in) * page_bytes,
                tails=num_pages_of(passage.tails_in) * page_bytes,
            ),
            kv_store=Moved(
                cpu=num_pages_of(passage.cpu_out) * page_bytes,
                disk=num_pages_of(passage.disk_out) * page_bytes,
                tails=num_pages_of(passage.tails_out) * page_bytes,
            ),
            kv_slot_bytes=passage.num_pages * page_bytes,
            activations=Moved(cpu=cut.cpu * row_bytes, disk=cut.disk * row_bytes),
            activation_slot_bytes=slot_bytes(cut, row_bytes),
        )

    def _prepare(self, batch: MicroBatch) -> PreparedBatch:
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        pages = [self._kv.rows[span.row] for span in batch.rows]
        num_near = sum(row.home == "compute" for row in pages)
        far = batch.rows[num_near:]
        passage = plan_passage(
            pages[num_near:],
            [span.kv_len for span in far],
            [span.total_len for span in far],
            self._policy.page_tokens,
        )
        cos, sin = self._rotary(batch)
        return PreparedBatch(
            batch=batch,
            token_ids=token_ids,
            far_places=self._embedding.far_places(token_ids),
            cut=self._cut(batch.num_tokens),
            cos=cos,
            sin=sin,
            positions=self._positions(batch),
            chunks=tuple(self._chunks(batch, pages, num_near, passage)),
            passage=passage,
            logit_places=torch.tensor(batch.logit_indices(), device=self._device),
        )

    def _cut(self, num_tokens: int) -> TokenCut:
        cut = self._policy.activations.cut(num_tokens)
        if self._policy.compute_tier == "gpu":
            return TokenCut(resident=cut["gpu"], cpu=cut["cpu"], disk=cut["disk"])
        return TokenCut(resident=cut["cpu"], cpu=0, disk=cut["disk"])

    def _positions(self, batch: MicroBatch) -> torch.Tensor:
        ranges = [np.arange(span.kv_len, span.total_len) for span in batch.rows]
        return torch.from_numpy(np.concatenate(ranges)).to(self._device)

    def _rotary(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        rope, most = self._config.rope, self._config.max_positions
        if rope is None:
            nothing = torch.empty(batch.num_tokens, 0, dtype=self._dtype, device=self._device)
            return nothing, nothing
        angles, scales = [], []
        frequencies, scale = inverse_frequencies(rope, 1, most)
        for span in batch.rows:
            if depends_on_length(rope):
                frequencies, scale = inverse_frequencies(rope, span.total_len, most)
            positions = torch.arange(span.kv_len, span.total_len, dtype=torch.float32)
            angles.append(positions[:, None] * frequencies)
            scales.append(torch.full((span.num_new, 1), scale))
        angle, factor = torch.cat(angles), torch.cat(scales)
        cos = (angle.cos() * factor).to(self._dtype)
        sin = (angle.sin() * factor).to(self._dtype)
        return cos.to(self._device), sin.to(self._device)

    def _chunks(
        self, batch: MicroBatch, pages: Sequence[RowPages], num_near: int, passage: Passage
    ) -> list[Chunk]:
        tables = [row.pages for row in pages[:num_near]] + list(passage.tables)
        chunks = []
        for first, last in chunk_rows(batch.rows, self._policy.chunk_tokens):
            border = min(max(num_near, first), last)
            start = batch.rows[first].start
            chunks.append(
                Chunk(
                    start=start,
                    end=batch.rows[last - 1].end,
                    near=self._view(batch, tables, first, border, start),
                    slot=self._view(batch, tables, border, last, start),
                )
            )
        return chunks

    def _view(
        self,
        batch: MicroBatch,
        tables: Sequence[Sequence[int]],
        first: int,
        last: int,
        chunk_start: int,
    ) -> KVView | None:
        if first == last:
            return None
        return index_rows(
            batch.rows[first:last],
            tables[first:last],
            start=batch.rows[first].start - chunk_start,
            page_tokens=self._policy.page_tokens,
            num_heads=self._config.num_heads,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            element_bytes=self._dtype.itemsize,
            device=self._device,
        )
