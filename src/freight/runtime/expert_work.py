"""Computes experts on the tokens that chose them: one, or where the weights of several that follow
each other are at hand, as many as scratch memory has room for.

Alone an expert of a model with many takes longer to be asked for than to be computed, above all
where it has a token or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from freight.model.expert_sets import ExpertSets
from freight.model.frame import Frame, Together
from freight.model.layers import run_unit
from freight.model.programme import Programme, Unit
from freight.model.workspace import Workspace
from freight.plan.operation import Operation
from freight.runtime.residual import Parts, ResidualStream
from freight.runtime.routing import ExpertTokens, Routing
from freight.runtime.weights import WeightStore

__all__ = ["ExpertWork"]

Ids = npt.NDArray[np.int64]


class _Place(NamedTuple):
    """Of a unit among neighbours that stay: all of these, and its own expert's number less its
    place among them."""

    sets: ExpertSets
    first: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """Choices of some experts among the tokens of one tensor: tokens count from its first row."""

    numbers: Ids
    counts: Ids
    tokens: Ids
    places: torch.Tensor


class ExpertWork:
    """Of all layers; ``chunk_tokens`` choices are computed at once at most."""

    def __init__(
        self,
        programme: Programme,
        *,
        weights: WeightStore,
        residual: ResidualStream,
        workspace: Workspace,
        routing: Routing,
        chunk_tokens: int,
    ) -> None:
        self._programme = programme
        self._weights = weights
        self._residual = residual
        self._workspace = workspace
        self._routing = routing
        self._chunk_tokens = chunk_tokens
        self._places: dict[int, _Place | None] = {}

    def perform(self, operation: Operation, k: int, unit: Unit, parts: Parts) -> None:
        """What micro-batch ``k`` chose of the unit's expert and of its neighbours, if it was not
        computed with those."""
        assert unit.expert is not None
        place = self._place(operation.unit)
        behind = unit.expert + 1 if place is None else place.first + place.sets.count
        taken = self._routing.take(k, unit.expert, behind, self._chunk_tokens)
        if taken is None:
            return
        for first, rows in parts:
            if len(taken.names) == 1:
                self._alone(operation, k, unit, _within(taken, first, rows.shape[0]), rows)
            elif (own := _within(taken, first, rows.shape[0])).tokens.size:
                assert place is not None
                self._together(k, place, own, rows)

    def _alone(
        self, operation: Operation, k: int, unit: Unit, own: _Turn, rows: torch.Tensor
    ) -> None:
        weights = self._weights.parts(operation.unit, operation.slot)
        tokens = torch.from_numpy(own.tokens).to(rows.device)
        shares = self._routing.of(k).weights.flatten()[own.places]
        for start in range(0, len(tokens), self._chunk_tokens):
            some = slice(start, start + self._chunk_tokens)
            frame = Frame(
                weights=weights,
                workspace=self._workspace,
                values=self._residual.values(rows),
                chosen=tokens[some],
                shares=shares[some],
            )
            run_unit(unit, frame)

    def _together(self, k: int, place: _Place, own: _Turn, rows: torch.Tensor) -> None:
        sets, in_rounds, borders = place.sets, *_rounds(own.tokens)
        ids = np.stack((own.tokens, in_rounds, own.tokens[in_rounds]))
        tokens, places, targets = torch.from_numpy(ids).to(rows.device)
        together = Together(
            weights=sets.weights,
            find_rows=sets.find_rows,
            numbers=own.numbers - place.first,
            firsts=np.cumsum(own.counts) - own.counts,
            counts=own.counts,
            rounds=[(places[some], targets[some]) for some in borders],
        )
        frame = Frame(
            weights=sets.weights[0],
            workspace=self._workspace,
            values=self._residual.values(rows),
            chosen=tokens,
            shares=self._routing.of(k).weights.flatten()[own.places],
            together=together,
        )
        run_unit(sets.first, frame)

    def _place(self, number: int) -> _Place | None:
        if number not in self._places:
            layer = self._programme.units[number].layer
            units = enumerate(self._programme.units)
            self._note([n for n, own in units if own.layer == layer and own.expert is not None])
        return self._places[number]

    def _note(self, numbers: Sequence[int]) -> None:
        """Which of a layer's experts have neighbours that stay as they do."""
        for stay, some in groupby(numbers, self._weights.stays):
            own = list(some)
            units = [self._programme.units[number] for number in own]
            place = None
            if stay and len(own) > 1:
                expert = units[0].expert
                assert expert is not None
                weights = [self._weights.parts(number, -1) for number in own]
                place = _Place(ExpertSets(units, weights), expert)
            self._places.update(dict.fromkeys(own, place))


def _within(taken: ExpertTokens, first: int, count: int) -> _Turn:
    """Those of the tokens from ``first`` on, so many."""
    tokens = taken.tokens - first
    here = (tokens >= 0) & (tokens < count)
    if here.all():
        return _Turn(numbers=taken.names, counts=taken.counts, tokens=tokens, places=taken.places)
    of_expert = np.repeat(np.arange(len(taken.names)), taken.counts)[here]
    counts = np.bincount(of_expert, minlength=len(taken.names))
    places = taken.places[torch.from_numpy(np.flatnonzero(here)).to(taken.places.device)]
    some = counts > 0
    return _Turn(numbers=taken.names[some], counts=counts[some], tokens=tokens[here], places=places)


def _rounds(tokens: Ids) -> tuple[Ids, list[slice]]:
    """Choices by how many their token has had before, and by token; where each number's are."""
    by_token = np.argsort(tokens, kind="stable")
    ordered = tokens[by_token]
    is_first = np.append(True, ordered[1:] != ordered[:-1])
    count = np.arange(len(tokens))
    turn = count - np.maximum.accumulate(np.where(is_first, count, 0))
    in_rounds = np.argsort(turn, kind="stable")
    borders = np.append(0, np.cumsum(np.bincount(turn))).tolist()
    some = [slice(*own) for own in pairwise(borders)]
    return by_token[in_rounds], some
