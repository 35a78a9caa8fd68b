"""Attention on the CPU for rows whose keys and values are near it, between two halves of a unit.

Their queries, new keys and new values come from the device in one stretch; what was attended goes
back in the queries' place. Knows pages and buffers, no weights and no order of operations.
"""

from __future__ import annotations

import torch

from freight.kernels.pages import Pages
from freight.memory.kv_cache import KVCache
from freight.memory.passage import Passage
from freight.memory.transfer import Link
from freight.model.attention import append, attend, sink
from freight.model.config import ModelConfig
from freight.model.programme import Attend, Unit
from freight.model.workspace import Workspace
from freight.plan.operation import Operation
from freight.runtime.batches import DelegatedRows, PreparedBatch
from freight.runtime.buffers import Buffers

__all__ = ["CPUAttention", "attend_step"]


def attend_step(unit: Unit) -> Attend:
    """The step of a unit, or of half of one, that attends."""
    return next(step for step in unit.steps if isinstance(step, Attend))


class CPUAttention:
    """Does what the operations between the halves say; ``queries`` and ``attended`` are what the
    halves themselves need of it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        page_tokens: int,
        kv_cache: KVCache,
        buffers: Buffers,
        workspace: Workspace,
        to_device: Link,
        from_device: Link,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._page_tokens = page_tokens
        self._kv = kv_cache
        self._buffers = buffers
        self._workspace = workspace
        self._to_device = to_device
        self._from_device = from_device
        self._sinks: dict[int, torch.Tensor] = {}

    def note_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        """Those of a layer, on the device: here they are wanted on the CPU."""
        if layer not in self._sinks:
            self._sinks[layer] = sinks.cpu()

    def copy_queries(self, operation: Operation, prepared: PreparedBatch) -> None:
        k, num_bytes = prepared.batch.index, operation.num_bytes
        source = self._buffers.delegated[k, :num_bytes]
        self._from_device.move([(source, self._buffers.delegated_on_cpu[k, :num_bytes])])

    def read(self, operation: Operation, layer: int, prepared: PreparedBatch) -> None:
        slot = self._buffers.delegated_kv[operation.slot]
        kv, passage = self._passing(layer, prepared)
        kv.read_disk(layer, passage, slot)

    def attend(
        self, operation: Operation, layer: int, prepared: PreparedBatch, step: Attend
    ) -> None:
        """Single queries over keys where they are; the answers take the queries' place."""
        rows = _rows(prepared)
        q, k, v = self._of(self._buffers.delegated_on_cpu, layer, prepared)
        pools, heads = [], self._config.heads(layer)
        kv, _ = self._passing(layer, prepared)
        on_cpu, on_disk = (rows.on_cpu, rows.on_disk) if kv is self._kv else rows.windows
        if on_cpu:
            pools.append((kv.pools["cpu"][layer], on_cpu[heads]))
        if on_disk:
            pools.append((self._buffers.delegated_kv[operation.slot], on_disk[heads]))
        for pool, view in pools:
            pages = self.pages(pool, layer)
            append(pages, view, k, v)
            with self._workspace.frame():
                lse = None
                if step.sinks is not None:
                    lse = self._workspace.take(*q.shape[:2], dtype=torch.float32)
                attend(step, q, pages, view, q, self._workspace, lse)
                if lse is not None:
                    own = slice(view.start, view.start + len(view.token_pages))
                    sink(q[own], lse[own], self._sinks[layer])

    def write(self, operation: Operation, layer: int, prepared: PreparedBatch) -> None:
        slot = self._buffers.delegated_kv[operation.source_slot]
        kv, passage = self._passing(layer, prepared)
        kv.write_disk(layer, passage, slot)

    def _passing(self, layer: int, prepared: PreparedBatch) -> tuple[KVCache, Passage]:
        """What the layer's keys are in, and how those of rows on disk pass."""
        rows, windows = _rows(prepared), self._kv.windows
        if windows is None or not self._config.has_window(layer):
            return self._kv, rows.passage
        assert rows.window_passage is not None
        return windows, rows.window_passage

    def copy_attended(self, operation: Operation, prepared: PreparedBatch) -> None:
        k, num_bytes = prepared.batch.index, operation.num_bytes
        source = self._buffers.delegated_on_cpu[k, :num_bytes]
        self._to_device.move([(source, self._buffers.delegated[k, :num_bytes])])

    def queries(
        self, layer: int, prepared: PreparedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device: queries [n, N, H], keys and values [n, K, H] of the rows attended here;
        after ``copy_attended`` the first are what was attended."""
        return self._of(self._buffers.delegated, layer, prepared)

    def attended(self, layer: int, prepared: PreparedBatch) -> torch.Tensor:
        """On the device: what all tokens of a micro-batch have attended, [T, N·H]."""
        count = prepared.batch.num_tokens
        width = self._config.query_heads(layer) * self._config.heads(layer).width
        size = count * width * self._dtype.itemsize
        used = self._buffers.attended[prepared.batch.index, :size]
        return used.view(self._dtype).view(count, width)

    def pages(self, pool: torch.Tensor, layer: int) -> Pages:
        """A layer's pages, uint8 [P, page bytes], as what they hold."""
        heads = self._config.heads(layer)
        return Pages(
            raw=pool,
            num_heads=heads.num_kv,
            page_tokens=self._page_tokens,
            width=heads.width,
            dtype=self._dtype,
            number_format=self._config.kv_format,
            keys_alone=self._config.keys_alone,
        )

    def _of(
        self, buffer: torch.Tensor, layer: int, prepared: PreparedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, (num_kv, width) = _rows(prepared).num_rows, self._config.heads(layer)
        heads = (self._config.query_heads(layer), *[num_kv] * self._config.num_key_parts)
        own = buffer[prepared.batch.index].view(self._dtype)
        ends = [count * width * sum(heads[: place + 1]) for place in range(len(heads))]
        found = [
            own[end - count * num * width : end].view(count, num, width)
            for end, num in zip(ends, heads, strict=True)
        ]
        return found[0], found[1], found[-1]


def _rows(prepared: PreparedBatch) -> DelegatedRows:
    assert prepared.delegated is not None
    return prepared.delegated
