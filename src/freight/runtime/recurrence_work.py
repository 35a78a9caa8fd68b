"""The work of units that keep a state for each row: on the compute tier, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freight.model.frame import Frame, LayerStates
from freight.model.layers import run_unit
from freight.model.programme import Unit
from freight.model.workspace import Workspace
from freight.plan.operation import Operation
from freight.runtime.batches import PreparedBatch
from freight.runtime.residual import ResidualStream
from freight.runtime.weights import WeightStore

__all__ = ["RecurrenceWork", "StatePool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePool:
    """What rows keep in one layer, by their seats (see :class:`LayerStates`)."""

    columns: torch.Tensor
    memory: torch.Tensor

    def copy(self, source: int, target: int) -> None:
        for own in (self.columns, self.memory):
            own[target].copy_(own[source])


class RecurrenceWork:
    """``pools`` are by layer; None of those that attend."""

    def __init__(
        self,
        *,
        weights: WeightStore,
        residual: ResidualStream,
        workspace: Workspace,
        pools: Sequence[StatePool | None],
    ) -> None:
        self._weights = weights
        self._residual = residual
        self._workspace = workspace
        self._pools = pools

    def perform(self, operation: Operation, prepared: PreparedBatch, unit: Unit) -> None:
        assert unit.layer is not None
        pool = self._pools[unit.layer]
        assert pool is not None
        weights = self._weights.parts(operation.unit, operation.slot)
        parts = self._residual.parts(operation, prepared)
        for chunk in prepared.chunks:
            own = chunk.states
            assert own is not None
            states = LayerStates(rows=own.rows, columns=pool.columns, memory=pool.memory)
            with self._residual.rows(parts, chunk.start, chunk.end) as x:
                frame = Frame(
                    weights=weights,
                    workspace=self._workspace,
                    values=self._residual.values(x),
                    states=states,
                )
                run_unit(unit, frame)
            for source, target in own.copies:
                pool.copy(source, target)
