"""The experts that the tokens of each micro-batch chose in the layer whose router came last.

Who runs the schedule asks for them, outside of the stream that computes: on a CUDA device a router
whose work has been issued has chosen nothing yet. What it chose is brought to the host once, and
sorted there, so that no expert waits for the device to count its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from freight.model.routes import Routes

__all__ = ["Choices", "Routing"]

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Of some experts: ``names`` [n], ascending, have the choices from ``borders[i]`` to
    ``borders[i + 1]``, of the ``tokens``, ascending for each expert, on the host, which are at
    ``places`` among the choices of all tokens, on the device."""

    names: Ids
    borders: Ids
    tokens: Ids
    places: torch.Tensor

    @property
    def counts(self) -> Ids:
        """Of each expert."""
        return np.diff(self.borders)

    def within(self, names: Ids) -> Choices:
        """Those of experts from the first to the last of some, ascending."""
        begin, end = np.searchsorted(self.names, (names[0], names[-1] + 1))
        return self.some(int(begin), int(end))

    def some(self, begin: int, end: int) -> Choices:
        """Those of neighbours."""
        first, last = self.borders[[begin, end]]
        return Choices(
            names=self.names[begin:end],
            borders=self.borders[begin : end + 1] - first,
            tokens=self.tokens[first:last],
            places=self.places[first:last],
        )


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

    def choices(self, k: int) -> Choices:
        """What all tokens chose, once the router has run."""
        if k in self._made:
            self._made[k].synchronize()
        experts = self._routes[k].experts
        chosen = experts.flatten().cpu().numpy()
        order = np.argsort(chosen, kind="stable")
        names, firsts = np.unique(chosen[order], return_index=True)
        return Choices(
            names=names,
            borders=np.append(firsts, len(order)),
            tokens=order // self._per_token,
            places=experts.new_tensor(order),
        )
