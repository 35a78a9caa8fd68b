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

__all__ = ["ExpertTokens", "Routing"]

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sorted:
    """What a micro-batch's tokens chose, by expert: the experts ``names`` [n], ascending, have the
    choices from ``borders[i]`` to ``borders[i + 1]``, of the ``tokens``, ascending for each, on the
    host, which are at ``places`` among the choices of all tokens, on the device."""

    names: Ids
    borders: Ids
    tokens: Ids
    places: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTokens:
    """Of some experts, ``names`` [n], the ``counts`` [n] of their choices: the ``tokens``, expert
    by expert and ascending for each, on the host, and their ``places`` among the choices of all
    tokens, on the device."""

    names: Ids
    counts: Ids
    tokens: Ids
    places: torch.Tensor


class Routing:
    """Routes of micro-batches by number, each token with ``per_token`` experts."""

    def __init__(self, per_token: int, dtype: torch.dtype, device: torch.device) -> None:
        self._per_token, self._dtype, self._device = per_token, dtype, device
        self._routes: dict[int, Routes] = {}
        self._made: dict[int, torch.cuda.Event] = {}
        self._sorted: dict[int, _Sorted] = {}
        self._begun: dict[int, int] = {}
        """Of a micro-batch, how many of those that it chose are computed."""

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
        self._sorted[k] = _Sorted(
            names=names,
            borders=np.append(firsts, len(order)),
            tokens=order // self._per_token,
            places=experts.new_tensor(order),
        )
        self._begun[k] = 0
        return frozenset(names.tolist())

    def take(self, k: int, expert: int, behind: int, most: int) -> ExpertTokens | None:
        """The choices of an expert that was ``chosen``, and of those after it up to the one
        ``behind``, while all are ``most`` at most; they are to be computed then. None where it was
        taken with one before it."""
        own, begun = self._sorted[k], self._begun[k]
        if begun and own.names[begun - 1] >= expert:
            return None
        assert own.names[begun] == expert, "experts are computed in order"
        last = np.searchsorted(own.names, behind)
        fits = np.searchsorted(own.borders, own.borders[begun] + most, side="right") - 1
        end = max(begun + 1, min(int(last), int(fits)))
        self._begun[k] = end
        some = slice(own.borders[begun], own.borders[end])
        return ExpertTokens(
            names=own.names[begun:end],
            counts=np.diff(own.borders[begun : end + 1]),
            tokens=own.tokens[some],
            places=own.places[some],
        )
