"""The computations of an attention unit: whole, or in two halves around what the CPU attends.

Binds a micro-batch's chunks to weights, rows of the residual stream and pages of keys. Knows no
order of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from freight.kernels.pages import Pages
from freight.memory.kv_cache import KVCache
from freight.memory.passage import Passage
from freight.model.config import ModelConfig
from freight.model.frame import DelegatedTokens, Frame, PageCopies
from freight.model.kv_view import KVView
from freight.model.layers import run_unit
from freight.model.programme import Unit
from freight.model.workspace import Workspace
from freight.plan.operation import Kind, Operation
from freight.runtime.batches import Chunk, PreparedBatch
from freight.runtime.buffers import Buffers
from freight.runtime.cpu_attention import CPUAttention, attend_step
from freight.runtime.recompute import Recomputation
from freight.runtime.residual import Parts, ResidualStream
from freight.runtime.row_windows import PageMove
from freight.runtime.weights import WeightStore

__all__ = ["AttentionWork"]


class AttentionWork:
    """Does what the operations of attention units say. ``recomputation`` makes keys of layers that
    do not keep them, which ``recomputes`` names by layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        weights: WeightStore,
        residual: ResidualStream,
        workspace: Workspace,
        kv_cache: KVCache,
        buffers: Buffers,
        cpu_attention: CPUAttention,
        recomputation: Recomputation | None,
        recomputes: tuple[bool, ...],
        chunk_tokens: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._residual = residual
        self._workspace = workspace
        self._kv = kv_cache
        self._buffers = buffers
        self._cpu_attention = cpu_attention
        self._recomputation = recomputation
        self._recomputes = recomputes
        self._chunk_tokens = chunk_tokens
        self._work: Mapping[Kind, Callable[[Operation, PreparedBatch, Unit], None]] = {
            Kind.COMPUTE: self._whole,
            Kind.BEGIN_ATTENTION: self._begin,
            Kind.COPY_QUERIES: self._copy_queries,
            Kind.READ_DELEGATED: self._read,
            Kind.ATTEND: self._attend,
            Kind.WRITE_DELEGATED: self._write,
            Kind.COPY_ATTENDED: self._copy_attended,
            Kind.FINISH_ATTENTION: self._finish,
        }

    def perform(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        """The work of an operation on an attention unit that is no mere copy of its pages."""
        self._work[operation.kind](operation, prepared, unit)

    def _whole(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        weights = self._weights.parts(operation.unit, operation.slot)
        parts = self._residual.parts(operation, prepared)
        layer = _layer(unit)
        self._fetch(layer, operation, prepared)
        again = self._recomputation if self._recomputes[layer] else None
        if again is not None and operation.source_slot >= 0:
            assert prepared.loaded is not None
            again.make(unit, weights, self._slot(layer, operation), prepared.loaded)
        for chunk in prepared.chunks:
            kv, around = self._pools(layer, chunk, operation)
            with self._residual.rows(parts, chunk.start, chunk.end) as x:
                values = self._residual.values(x)
                if again is not None and chunk.slot:
                    view = chunk.slot[self._config.heads(layer)]
                    again.keep(self._slot(layer, operation), view, values["x"])
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values=values,
                    angles=prepared.angles_of(slice(chunk.start, chunk.end)),
                    positions=prepared.positions[chunk.start : chunk.end],
                    kv=kv,
                    around=around,
                )
                run_unit(unit, frame)
        self._keep(layer, operation, prepared)

    def look_back(
        self, operation: Operation, prepared: PreparedBatch, unit: Unit, parts: Parts
    ) -> None:
        """A unit without keys of its own, for what the head has picked."""
        weights = self._weights.parts(operation.unit, operation.slot)
        layer, queries = _layer(unit), prepared.queries
        assert queries is not None
        pages = self._cpu_attention.pages(self._kv.pools["compute"][layer], layer)
        for start, end, views in queries.chunks:
            with self._residual.rows(parts, start, end) as x:
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values=self._residual.values(x),
                    angles=queries.angles_of(slice(start, end)),
                    kv=[(pages, views[self._config.heads(layer)])],
                )
                run_unit(unit, frame)

    def _fetch(self, layer: int, operation: Operation, prepared: PreparedBatch) -> None:
        """Put rows that leave the compute tier into the slot, from where they are stored."""
        kv, passage = self._passing(layer, prepared)
        if passage.near_in:
            kv.fetch_near(layer, passage, self._slot(layer, operation))

    def _keep(self, layer: int, operation: Operation, prepared: PreparedBatch) -> None:
        """Put rows of the slot that come to the compute tier where they will be."""
        kv, passage = self._passing(layer, prepared)
        if passage.near_out:
            kv.keep_near(layer, passage, self._slot(layer, operation))

    def _windows(self, layer: int) -> KVCache | None:
        """What the layer's keys are in, if it keeps the last window of them."""
        return self._kv.windows if self._config.has_window(layer) else None

    def _passing(self, layer: int, prepared: PreparedBatch) -> tuple[KVCache, Passage]:
        windows = self._windows(layer)
        if windows is None:
            return self._kv, prepared.passage
        assert prepared.window_passage is not None
        return windows, prepared.window_passage

    def _slot(self, layer: int, operation: Operation) -> torch.Tensor:
        kv = self._windows(layer) or self._kv
        return kv.pages_in(layer, self._buffers.kv_slot[operation.source_slot])

    def _pools(
        self, layer: int, chunk: Chunk, operation: Operation
    ) -> tuple[list[tuple[Pages, KVView]], list[tuple[PageCopies, PageCopies]]]:
        """Pools with what indexes them; and what is copied around the attention of each."""
        kv, heads = [], self._config.heads(layer)
        windows = self._windows(layer)
        if windows is not None:
            near = windows.pools["compute"][layer]
            scratch = _in_pages(self._buffers.window_scratch, near.shape[1])
            pools = {"near": near, "scratch": scratch}
            if operation.source_slot >= 0:
                pools["slot"] = self._slot(layer, operation)
            around = []
            for rows, views in chunk.windows:
                kv.append((self._cpu_attention.pages(pools[rows.place], layer), views[heads]))
                around.append((_copies(rows.before, pools), _copies(rows.after, pools)))
            return kv, around
        if chunk.near:
            pool = self._kv.pools["compute"][layer]
            kv.append((self._cpu_attention.pages(pool, layer), chunk.near[heads]))
        if chunk.slot:
            if self._recomputation is not None and self._recomputes[layer]:
                pages = self._recomputation.pages(heads)
            else:
                pages = self._cpu_attention.pages(self._slot(layer, operation), layer)
            kv.append((pages, chunk.slot[heads]))
        return kv, []

    # -- attention on the CPU: the last rows of a micro-batch, between two halves of the unit -----

    def _begin(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        first_half, _ = unit.halves()
        weights = self._weights.parts(operation.unit, operation.slot)
        parts = self._residual.parts(operation, prepared)
        attended = self._cpu_attention.attended(_layer(unit), prepared)
        targets = self._cpu_attention.queries(_layer(unit), prepared)
        self._fetch(_layer(unit), operation, prepared)
        for chunk in prepared.chunks:
            with self._residual.rows(parts, chunk.start, chunk.end) as x:
                first, place = chunk.first_delegated, chunk.delegated_place
                count = chunk.end - chunk.start - first
                q, k, v = (target[place : place + count] for target in targets)
                step, tokens = attend_step(first_half), slice(chunk.start, chunk.end)
                kv, around = self._pools(_layer(unit), chunk, operation)
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values={**self._residual.values(x), step.out: attended[tokens]},
                    angles=prepared.angles_of(tokens),
                    positions=prepared.positions[tokens],
                    kv=kv,
                    around=around,
                    delegated=DelegatedTokens(first=first, targets=(q, k, v)),
                )
                run_unit(first_half, frame)
                if step.sinks is not None:
                    self._cpu_attention.note_sinks(_layer(unit), frame.vector(step.sinks))
        self._keep(_layer(unit), operation, prepared)

    def _copy_queries(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        self._cpu_attention.copy_queries(operation, prepared)

    def _read(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        self._cpu_attention.read(operation, _layer(unit), prepared)

    def _attend(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        self._cpu_attention.attend(operation, _layer(unit), prepared, attend_step(unit))

    def _write(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        self._cpu_attention.write(operation, _layer(unit), prepared)

    def _copy_attended(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        self._cpu_attention.copy_attended(operation, prepared)

    def _finish(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        weights = self._weights.parts(operation.unit, operation.slot)
        parts = self._residual.parts(operation, prepared)
        attended = self._cpu_attention.attended(_layer(unit), prepared)
        found, _, _ = self._cpu_attention.queries(_layer(unit), prepared)
        attended[len(attended) - len(found) :].copy_(found.view(len(found), -1))
        count, step = prepared.batch.num_tokens, self._chunk_tokens
        for start in range(0, count, step):
            end = min(start + step, count)
            with self._residual.rows(parts, start, end) as x:
                out = attend_step(unit).out
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values={**self._residual.values(x), out: attended[start:end]},
                )
                run_unit(unit.halves()[1], frame)


def _in_pages(pages: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """As many pages of this size, in the memory of some that are no smaller."""
    return pages.view(-1)[: len(pages) * page_bytes].view(len(pages), page_bytes)


def _layer(unit: Unit) -> int:
    assert unit.layer is not None
    return unit.layer


def _copies(moves: Sequence[PageMove], pools: Mapping[str, torch.Tensor]) -> PageCopies:
    copies = []
    for (source, first), (target, place), count in moves:
        copies.append((pools[source][first : first + count], pools[target][place : place + count]))
    return copies
