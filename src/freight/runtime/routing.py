"""The experts that the tokens of each micro-batch chose in the layer whose router came last.

Who runs the schedule asks for them, outside of the stream that computes: on a CUDA device a router
whose work has been issued has chosen nothing yet.
"""

from __future__ import annotations

import torch

from freight.model.layers import Routes

__all__ = ["Routing"]


class Routing:
    """Routes of micro-batches by number, each token with ``per_token`` experts."""

    def __init__(self, per_token: int, dtype: torch.dtype, device: torch.device) -> None:
        self._per_token, self._dtype, self._device = per_token, dtype, device
        self._routes: dict[int, Routes] = {}
        self._made: dict[int, torch.cuda.Event] = {}

    def begin(self, k: int, num_tokens: int) -> Routes:
        """For micro-batch ``k``'s router to fill."""
        shape = (num_tokens, self._per_token)
        self._routes[k] = Routes(
            experts=torch.empty(shape, dtype=torch.int64, device=self._device),
            weights=torch.empty(shape, dtype=self._dtype, device=self._device),
        )
        return self._routes[k]

    def end(self, k: int) -> None:
        """All of it has been issued, on the stream that is current."""
        if self._device.type == "cuda":
            self._made[k] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._made[k].record()

    def of(self, k: int) -> Routes:
        """For the stream that ran the router."""
        return self._routes[k]

    def chosen(self, k: int) -> frozenset[int]:
        """The experts that any token chose, once the router has run."""
        if k in self._made:
            self._made[k].synchronize()
        return frozenset(self._routes[k].experts.flatten().tolist())
