"""The experts that the tokens of each micro-batch chose in the layer whose router came last.

Who runs the schedule asks for them, outside of the stream that computes: on a CUDA device a router
whose work has been issued has chosen nothing yet. What it chose is brought to the host once, and
sorted there, so that no expert waits for the device to count its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from freight.model.routes import Routes

__all__ = ["ExpertTokens", "Routing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTokens:
    """An expert's ``tokens`` [n] in a micro-batch, ascending, on the host, and ``places`` [n] of
    its choices among those of all tokens, on the device."""

    tokens: npt.NDArray[np.int64]
    places: torch.Tensor


class Routing:
    """Routes of micro-batches by number, each token with ``per_token`` experts."""

    def __init__(self, per_token: int, dtype: torch.dtype, device: torch.device) -> None:
        self._per_token, self._dtype, self._device = per_token, dtype, device
        self._routes: dict[int, Routes] = {}
        self._made: dict[int, torch.cuda.Event] = {}
        self._sorted: dict[int, dict[int, ExpertTokens]] = {}

    def begin(self, k: int, num_tokens: int) -> Routes:
        """For micro-batch ``k``'s router to fill."""
        self._sorted.pop(k, None)
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
        experts = self._routes[k].experts
        chosen = experts.flatten().cpu().numpy()
        order = np.argsort(chosen, kind="stable")
        names, firsts = np.unique(chosen[order], return_index=True)
        places = experts.new_tensor(order)
        self._sorted[k] = {
            int(name): ExpertTokens(
                tokens=order[first:last] // self._per_token, places=places[first:last]
            )
            for name, (first, last) in zip(names, pairwise([*firsts, len(order)]), strict=True)
        }
        return frozenset(self._sorted[k])

    def tokens_of(self, k: int, expert: int) -> ExpertTokens:
        """Those of one that was ``chosen``."""
        return self._sorted[k][expert]
