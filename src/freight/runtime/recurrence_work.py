"""The work of units that keep a state for each row, chunk by chunk: where the rows' states are."""

from __future__ import annotations

import torch

from freight.memory.kv_cache import KVCache
from freight.model.config import ModelConfig
from freight.model.frame import Frame, LayerStates
from freight.model.layers import run_unit
from freight.model.programme import Unit
from freight.model.workspace import Workspace
from freight.plan.operation import Operation
from freight.runtime.batches import PreparedBatch
from freight.runtime.buffers import Buffers
from freight.runtime.residual import ResidualStream
from freight.runtime.row_states import PoolRows
from freight.runtime.weights import WeightStore

__all__ = ["RecurrenceWork"]


class RecurrenceWork:
    """``states`` has those of all rows; rows elsewhere have theirs in a slot of ``buffers``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        weights: WeightStore,
        residual: ResidualStream,
        workspace: Workspace,
        states: KVCache | None,
        buffers: Buffers,
    ) -> None:
        self._kept = config.recurrence
        self._dtype = dtype
        self._weights = weights
        self._residual = residual
        self._workspace = workspace
        self._states = states
        self._buffers = buffers

    def perform(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        assert unit.layer is not None and self._states is not None
        near = self._states.pools["compute"][unit.layer]
        slot = near
        if operation.source_slot >= 0:
            own = self._buffers.kv_slot[operation.source_slot]
            slot = self._states.pages_in(unit.layer, own)
        weights = self._weights.parts(operation.unit, operation.slot)
        parts = self._residual.parts(operation, prepared)
        for chunk in prepared.chunks:
            own_states = chunk.states
            assert own_states is not None
            with self._residual.rows(parts, chunk.start, chunk.end) as x:
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values=self._residual.values(x),
                    angles=prepared.angles_of(slice(chunk.start, chunk.end)),
                    positions=prepared.positions[chunk.start : chunk.end],
                    states=[self._layer_states(own, near, slot) for own in own_states.pools],
                )
                run_unit(unit, frame)
            for source, target in own_states.copies:
                pages = slot if source.is_in_slot else near
                (slot if target.is_in_slot else near)[target.page].copy_(pages[source.page])

    def _layer_states(self, own: PoolRows, near: torch.Tensor, slot: torch.Tensor) -> LayerStates:
        memory, columns = self._views(slot if own.is_in_slot else near)
        beginnings = []
        if own.beginnings:
            first_memory, first_columns = self._views(near)
            beginnings = [
                (seat, first_columns[page], first_memory[page]) for page, seat in own.beginnings
            ]
        return LayerStates(rows=own.rows, columns=columns, memory=memory, beginnings=beginnings)

    def _views(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Matrices and columns in pages [P, bytes]."""
        own = self._kept
        assert own is not None
        count, border = len(pages), own.matrix_bytes
        memory = pages[:, :border].view(torch.float32).view(count, *own.matrix_shape)
        size = own.state_bytes(self._dtype.itemsize) - border
        columns = pages[:, border : border + size].view(self._dtype)
        return memory, columns.view(count, *own.columns_shape)
