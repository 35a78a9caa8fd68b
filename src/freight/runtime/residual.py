"""The residual stream of a micro-batch as the arithmetic sees it: rows of tokens, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freight.memory.activations import Activations
from freight.model.programme import Programme
from freight.model.workspace import Workspace
from freight.plan.operation import Operation
from freight.runtime.batches import PreparedBatch
from freight.runtime.borrowed_rows import BorrowedRows

__all__ = ["Parts", "ResidualStream", "by_name"]

Parts = Sequence[tuple[int, torch.Tensor]]
"""(first token, rows [n, columns]), in order, without gaps."""


class ResidualStream:
    """Where an operation finds its tokens' rows."""

    def __init__(
        self,
        activations: Activations,
        slots: torch.Tensor,
        programme: Programme,
        workspace: Workspace,
    ) -> None:
        self._activations = activations
        self._slots = slots
        self._programme = programme
        self._workspace = workspace

    @property
    def dtype(self) -> torch.dtype:
        return self._activations.dtype

    @property
    def device(self) -> torch.device:
        return self._workspace.device

    def parts(
        self, operation: Operation, prepared: PreparedBatch
    ) -> list[tuple[int, torch.Tensor]]:
        """Of all tokens of the micro-batch."""
        index = operation.activation_slot
        slot = self._slots[index] if index >= 0 else None
        return self._activations.parts(prepared.batch.index, prepared.cut, slot)

    def rows(self, parts: Parts, start: int, end: int) -> BorrowedRows:
        """Tokens ``start`` to ``end`` as one tensor."""
        return BorrowedRows(parts, start, end, self._workspace)

    def values(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What passes from unit to unit, by name: views of the columns of ``rows``."""
        return by_name(self._programme.carried, rows)


def by_name(carried: Sequence[tuple[str, int]], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is ``carried`` side by side in ``rows``: the columns of each value."""
    values, first = {}, 0
    for name, columns in carried:
        values[name] = rows[:, first : first + columns]
        first += columns
    return values
