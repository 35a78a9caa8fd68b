"""Rows of the residual stream as one tensor, wherever their parts are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freight.memory.activations import gather, scatter
from freight.model.workspace import Workspace

__all__ = ["BorrowedRows"]


class BorrowedRows:
    """Tokens ``start`` to ``end`` as one tensor: in place where they lie together, else a copy
    that is written back."""

    def __init__(
        self,
        parts: Sequence[tuple[int, torch.Tensor]],
        start: int,
        end: int,
        workspace: Workspace,
    ) -> None:
        self._parts = list(parts)
        self._start, self._end = start, end
        self._frame = workspace.frame()
        self._workspace = workspace
        self._copy: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        self._frame.__enter__()
        for first, rows in self._parts:
            if first <= self._start and self._end <= first + rows.shape[0]:
                return rows[self._start - first : self._end - first]
        columns, dtype = self._parts[0][1].shape[1], self._parts[0][1].dtype
        self._copy = self._workspace.take(self._end - self._start, columns, dtype=dtype)
        gather(self._parts, self._start, self._copy)
        return self._copy

    def __exit__(self, *exception: object) -> None:
        if self._copy is not None and exception[0] is None:
            scatter(self._parts, self._start, self._copy)
        self._frame.__exit__(None, None, None)
