"""Does the work of each operation: binds the schedule's places to the tensors that are there.

Nothing is decided here and nothing waits; the executor calls in an order that is proven legal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.memory.activations import scatter
from freight.memory.kv_cache import KVCache
from freight.memory.passage import Passage
from freight.memory.transfer import Link, host_view
from freight.model.batch import MicroBatch
from freight.model.config import ModelConfig
from freight.model.frame import Frame
from freight.model.layers import run_unit, select_rows
from freight.model.programme import Embed, Programme, Route, Unit
from freight.model.routes import Routes
from freight.plan.operation import Kind, Operation
from freight.runtime.answers import NewTokens
from freight.runtime.attention_work import AttentionWork
from freight.runtime.batches import BatchPreparer, PreparedBatch
from freight.runtime.cpu_attention import CPUAttention
from freight.runtime.expert_work import ExpertWork
from freight.runtime.head import Head
from freight.runtime.placement import Placement
from freight.runtime.recurrence_work import RecurrenceWork
from freight.runtime.residual import Parts, ResidualStream
from freight.runtime.routing import Routing
from freight.runtime.scores import Scores
from freight.runtime.weights import EmbeddingTable

__all__ = ["Performer"]


_MADE: Final = frozenset({"x", "inputs", "streams"})
"""What the embedding makes of the values that pass from unit to unit."""

Ids = npt.NDArray[np.int64]


class Performer:
    """``perform`` is called once per operation, on the operation's lane."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        programme: Programme,
        placement: Placement,
        batches: BatchPreparer,
        to_device: Link,
        from_device: Link,
        finish: Callable[[MicroBatch, torch.Tensor, Scores | None], NewTokens],
        lane: int = 0,
    ) -> None:
        self._config = config
        self._programme = programme
        self._policy = placement.plan.policy
        self._weights = placement.weights
        self._tables = placement.tables
        self._kv = placement.kv_caches[lane]
        self._activations = placement.activations
        self._buffers = placement.buffers
        self._workspace = placement.workspace
        self._head = Head(
            self._policy,
            programme.carried,
            is_read=config.readout is not None,
            buffers=self._buffers,
            workspace=self._workspace,
        )
        self._batches = batches
        self._to_device = to_device
        self._from_device = from_device
        self._finish = finish
        cpu_attention = CPUAttention(
            config,
            dtype=self._activations.dtype,
            page_tokens=self._policy.page_tokens,
            kv_cache=self._kv,
            buffers=self._buffers,
            workspace=placement.host_workspace,
            to_device=to_device,
            from_device=from_device,
        )
        self._residual = ResidualStream(
            self._activations, self._buffers.activation_slot, programme, self._workspace
        )
        self._attention = AttentionWork(
            self._config,
            weights=self._weights,
            residual=self._residual,
            workspace=self._workspace,
            kv_cache=self._kv,
            buffers=self._buffers,
            cpu_attention=cpu_attention,
            recomputation=placement.recomputation,
            recomputes=self._policy.recomputes(config.num_layers),
            chunk_tokens=self._policy.chunk_tokens,
        )
        self._recurrence = RecurrenceWork(
            config,
            dtype=self._activations.dtype,
            weights=self._weights,
            residual=self._residual,
            workspace=self._workspace,
            states=self._kv.states,
            buffers=self._buffers,
        )
        self._on_device = self._policy.compute_tier == "gpu"
        self._staging = [host_view(slot) for slot in self._buffers.weight_staging]
        self._routing = Routing(
            0 if config.experts is None else config.experts.per_token,
            self._activations.dtype,
            self._workspace.device,
        )
        self._experts = ExpertWork(
            programme,
            weights=self._weights,
            residual=self._residual,
            workspace=self._workspace,
            routing=self._routing,
            chunk_tokens=self._policy.chunk_tokens,
        )
        self._work: Final[Mapping[Kind, Callable[[Operation], NewTokens | None]]] = {
            Kind.READ_WEIGHTS: self._read_weights,
            Kind.COPY_WEIGHTS: self._copy_weights,
            Kind.DECODE_WEIGHTS: self._decode_weights,
            Kind.READ_EMBEDDING: self._read_embedding,
            Kind.COPY_EMBEDDING: self._copy_embedding,
            Kind.READ_KV: self._read_kv,
            Kind.COPY_KV: self._copy_kv,
            Kind.COPY_BACK_KV: self._copy_back_kv,
            Kind.WRITE_KV: self._write_kv,
            Kind.READ_HIDDEN: self._read_activations,
            Kind.COPY_HIDDEN: self._copy_activations,
            Kind.COPY_BACK_HIDDEN: self._copy_back_activations,
            Kind.WRITE_HIDDEN: self._write_activations,
            Kind.COMPUTE: self._compute,
            Kind.BEGIN_ATTENTION: self._attend,
            Kind.COPY_QUERIES: self._attend,
            Kind.READ_DELEGATED: self._attend,
            Kind.ATTEND: self._attend,
            Kind.WRITE_DELEGATED: self._attend,
            Kind.COPY_ATTENDED: self._attend,
            Kind.FINISH_ATTENTION: self._attend,
        }

    def perform(self, operation: Operation) -> NewTokens | None:
        """The operation's work; new tokens after the last computation of a micro-batch."""
        if operation.kind is Kind.READ_WEIGHTS:
            self._read_weights(operation)
            return None
        with torch.inference_mode():
            return self._work[operation.kind](operation)

    def stream(self, operation: Operation) -> list[tuple[int, torch.Tensor]]:
        """(first token, rows [n, columns]) of the residual stream, where the operation finds it."""
        return self._residual.parts(operation, self._prepared(operation))

    def _prepared(self, operation: Operation) -> PreparedBatch:
        assert operation.batch is not None
        return self._batches.get(operation.sweep, operation.batch.index)

    def _layer(self, operation: Operation) -> int:
        layer = self._programme.units[operation.unit].layer
        assert layer is not None
        return layer

    # -- weights and embedding rows ----------------------------------------------------------

    def _read_weights(self, operation: Operation) -> None:
        if self._on_device:
            piece = self._weights.piece(operation.unit, operation.piece)
            self._weights.read(piece, [self._staging[operation.slot][: piece.num_bytes]])
            return
        places = operation.unit_places
        self._weights.read_into_slots(
            [(self._weights.piece(own.unit, own.piece), own.slot) for own in places]
        )

    def _copy_weights(self, operation: Operation) -> None:
        pairs = []
        for own in operation.unit_places:
            piece = self._weights.piece(own.unit, own.piece)
            if piece.path is None:
                source = self._weights.host_stretch(own.unit, piece)
            else:
                source = self._buffers.weight_staging[operation.source_slot, : piece.num_bytes]
            pairs += self._weights.bring_into_slot(source, piece, own.slot)
        self._to_device.move(pairs)

    def _decode_weights(self, operation: Operation) -> None:
        self._weights.decode(operation.unit, operation.source_slot)

    def _read_embedding(self, operation: Operation) -> None:
        prepared = self._prepared(operation)
        fetched = self._fetched(self._buffers.embedding_rows[operation.slot], prepared)
        for table, places, rows in zip(self._tables, prepared.far_places, fetched, strict=True):
            if len(places):
                table.fetch(prepared.token_ids[places], rows)

    def _copy_embedding(self, operation: Operation) -> None:
        num_bytes = operation.num_bytes
        source = self._buffers.embedding_rows[operation.source_slot, :num_bytes]
        target = self._buffers.embedding_slot[operation.slot, :num_bytes]
        self._to_device.move([(source, target)])

    def _fetched(self, buffer: torch.Tensor, prepared: PreparedBatch) -> list[torch.Tensor]:
        """Of each table the rows [n, columns] that come through a buffer, one after the other."""
        dtype, found, begin = self._activations.dtype, list[torch.Tensor](), 0
        for table, places in zip(self._tables, prepared.far_places, strict=True):
            end = begin + len(places) * table.columns * dtype.itemsize
            found.append(buffer[begin:end].view(dtype).view(len(places), table.columns))
            begin = end
        return found

    # -- KV cache, and states ----------------------------------------------------------------

    def _passing(self, operation: Operation) -> tuple[KVCache, Passage]:
        """What of rows elsewhere passes in a unit, and how."""
        prepared = self._prepared(operation)
        unit = self._programme.units[operation.unit]
        if unit.kind != "recurrence":
            assert unit.layer is not None
            if self._kv.windows is None or not self._config.has_window(unit.layer):
                return self._kv, prepared.passage
            assert prepared.window_passage is not None
            return self._kv.windows, prepared.window_passage
        assert self._kv.states is not None and prepared.state_passage is not None
        return self._kv.states, prepared.state_passage

    def _read_kv(self, operation: Operation) -> None:
        ring = self._buffers.kv_in if self._on_device else self._buffers.kv_slot
        kv, passage = self._passing(operation)
        kv.read_disk(self._layer(operation), passage, ring[operation.slot])

    def _copy_kv(self, operation: Operation) -> None:
        kv, passage = self._passing(operation)
        slot = self._buffers.kv_slot[operation.slot]
        pairs = [*kv.pairs_in(self._layer(operation), passage, slot)]
        if operation.source_slot >= 0:
            source = self._buffers.kv_in[operation.source_slot]
            runs = (*passage.disk_in, *passage.tails_in)
            pairs += kv.staged_pairs(self._layer(operation), runs, source, slot)
        self._to_device.move(pairs)

    def _copy_back_kv(self, operation: Operation) -> None:
        kv, passage = self._passing(operation)
        slot = self._buffers.kv_slot[operation.source_slot]
        pairs = [*kv.pairs_out(self._layer(operation), passage, slot)]
        if operation.slot >= 0:
            target = self._buffers.kv_out[operation.slot]
            runs = (*passage.disk_out, *passage.tails_out)
            pairs += kv.staged_pairs(self._layer(operation), runs, slot, target)
        self._from_device.move(pairs)

    def _write_kv(self, operation: Operation) -> None:
        ring = self._buffers.kv_out if self._on_device else self._buffers.kv_slot
        kv, passage = self._passing(operation)
        kv.write_disk(self._layer(operation), passage, ring[operation.source_slot])

    # -- activations -------------------------------------------------------------------------

    def _read_activations(self, operation: Operation) -> None:
        prepared = self._prepared(operation)
        buffers = self._buffers
        ring = buffers.activations_in if self._on_device else buffers.activation_slot
        self._activations.read_disk(prepared.batch.index, prepared.cut, ring[operation.slot])

    def _copy_activations(self, operation: Operation) -> None:
        prepared = self._prepared(operation)
        cut, slot = prepared.cut, self._buffers.activation_slot[operation.slot]
        pairs = [self._activations.pair_in(prepared.batch.index, cut, slot)]
        if operation.source_slot >= 0:
            source = self._buffers.activations_in[operation.source_slot]
            pairs.append(self._activations.staged_pair(cut, source, slot))
        self._to_device.move(pairs)

    def _copy_back_activations(self, operation: Operation) -> None:
        prepared = self._prepared(operation)
        cut, slot = prepared.cut, self._buffers.activation_slot[operation.source_slot]
        pairs = [self._activations.pair_out(prepared.batch.index, cut, slot)]
        if operation.slot >= 0:
            target = self._buffers.activations_out[operation.slot]
            pairs.append(self._activations.staged_pair(cut, slot, target))
        self._from_device.move(pairs)

    def _write_activations(self, operation: Operation) -> None:
        prepared = self._prepared(operation)
        buffers = self._buffers
        ring = buffers.activations_out if self._on_device else buffers.activation_slot
        source = ring[operation.source_slot]
        self._activations.write_disk(prepared.batch.index, prepared.cut, source)

    # -- computation -------------------------------------------------------------------------

    def _compute(self, operation: Operation) -> NewTokens | None:
        prepared = self._prepared(operation)
        unit = self._programme.units[operation.unit]
        if operation.unit == self._programme.picks_at:
            self._head.pick(prepared, self._residual.parts(operation, prepared))
        if unit.kind == "embedding":
            self._embed(operation, prepared, unit)
        elif unit.kind == "attention":
            self._attention.perform(operation, prepared, unit)
        elif unit.kind == "queries":
            self._attention.look_back(operation, prepared, unit, self._left(operation, prepared))
        elif unit.kind == "recurrence":
            self._recurrence.perform(operation, prepared, unit)
        elif unit.kind == "expert":
            parts = self._left(operation, prepared)
            self._experts.perform(operation, prepared.batch.index, parts)
        elif unit.kind in ("mlp", "router"):
            self._mlp(operation, prepared, unit)
        else:
            weights = self._weights.parts(operation.unit, operation.slot)
            self._head.compute(prepared, unit, weights)
        if not operation.is_last:
            return None
        return self._finish(prepared.batch, *self._head.result(prepared.batch))

    def _attend(self, operation: Operation) -> None:
        unit = self._programme.units[operation.unit]
        self._attention.perform(operation, self._prepared(operation), unit)

    def _embed(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        parts = self._residual.parts(operation, prepared)
        ring = self._buffers.embedding_slot if self._on_device else self._buffers.embedding_rows
        is_far = any(map(len, prepared.far_places))
        fetched = self._fetched(ring[operation.source_slot], prepared) if is_far else ()
        weights = self._weights.parts(operation.unit, -1)
        ranges = [*_ranges(prepared.batch.num_tokens, self._policy.chunk_tokens)]
        # From the last on: rows that were fetched may lie where these tokens' own will, and no
        # further behind.
        for start, end in reversed(ranges):
            with self._workspace.frame():
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values=self._entrance(unit, prepared, start, end, fetched),
                    positions=prepared.positions[start:end],
                )
                run_unit(unit, frame)
                for name in _MADE & frame.values.keys():
                    own = [(first, self._residual.values(rows)[name]) for first, rows in parts]
                    scatter(own, start, frame.values[name])

    def _entrance(
        self,
        unit: Unit,
        prepared: PreparedBatch,
        start: int,
        end: int,
        fetched: Sequence[torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """What the embedding unit starts with for some tokens: rows of tables, those that were
        ``fetched`` among them, and where x is to be put."""
        dtype, values = self._activations.dtype, dict[str, torch.Tensor]()
        embeds = [step for step in unit.steps if isinstance(step, Embed)]
        for number, (step, table) in enumerate(zip(embeds, self._tables, strict=True)):
            rows = self._workspace.take(end - start, table.columns, dtype=dtype)
            self._look_up(table, prepared.token_ids[start:end], rows)
            far = prepared.far_places[number]
            if len(far):
                first, last = np.searchsorted(far, (start, end))
                places = torch.from_numpy(far[first:last] - start).to(rows.device)
                rows.index_copy_(0, places, fetched[number][first:last])
            values[step.out] = rows
        if "x" not in values:
            width = self._config.hidden_size
            values["x"] = self._workspace.take(end - start, width, dtype=dtype)
        return values

    def _look_up(self, table: EmbeddingTable, token_ids: Ids, x: torch.Tensor) -> None:
        """Rows of the table that are on the compute tier, into ``x`` [n, columns]."""
        for first, rows in table.near:
            here = (token_ids >= first) & (token_ids < first + rows.shape[0])
            places = torch.from_numpy(here.nonzero()[0]).to(x.device)
            ids = torch.from_numpy(token_ids[here] - first).to(x.device)
            with self._workspace.frame():
                found = self._workspace.take(len(ids), x.shape[1], dtype=x.dtype)
                select_rows(rows, ids, found, self._workspace)
                x.index_copy_(0, places, found)

    def _mlp(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        """An MLP, or a router, which leaves what it chose in the batch's routes."""
        weights = self._weights.parts(operation.unit, operation.slot)
        parts = self._left(operation, prepared)
        k, count = prepared.batch.index, sum(rows.shape[0] for _, rows in parts)
        routes = self._routing.begin(k, count) if unit.kind == "router" else None
        ids = self._ids(operation, prepared, unit) if routes is not None else None
        for start, end in _ranges(count, self._policy.chunk_tokens):
            with self._residual.rows(parts, start, end) as x:
                frame = Frame(
                    weights=weights, workspace=self._workspace, values=self._residual.values(x)
                )
                if routes is not None:
                    frame.routes = Routes(
                        experts=routes.experts[start:end], weights=routes.weights[start:end]
                    )
                    frame.token_ids = None if ids is None else ids[start:end]
                run_unit(unit, frame)
        if routes is not None:
            self._routing.end(k)

    def _ids(
        self, operation: Operation, prepared: PreparedBatch, unit: Unit
    ) -> torch.Tensor | None:
        """Of the tokens that a router works on, where it goes by them."""
        if not any(isinstance(step, Route) and step.table is not None for step in unit.steps):
            return None
        ids, places = torch.from_numpy(prepared.token_ids), prepared.batch.picked_indices()
        own = ids[places] if operation.unit >= self._programme.picks_at else ids
        return own.to(self._residual.device)

    def chosen(self, k: int) -> Collection[int]:
        """The experts that are to be computed for micro-batch ``k`` in the layer whose router was
        computed last."""
        return self._experts.chosen(k)

    def _left(self, operation: Operation, prepared: PreparedBatch) -> Parts:
        """The residual stream of those tokens that are left to compute."""
        if operation.unit < self._programme.picks_at:
            return self._residual.parts(operation, prepared)
        return self._head.picked(prepared.batch)


def _ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, step):
        yield start, min(start + step, total)
