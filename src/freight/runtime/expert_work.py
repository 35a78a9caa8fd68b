"""Computes experts on the tokens that chose them: one, or where the weights of several that follow
each other are at hand, as many as scratch memory has room for.

Alone an expert of a model with many takes longer to be asked for than to be computed, above all
where it has a token or two. Of those that are computed together the first one's unit is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
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
from freight.runtime.routing import Choices, Routing
from freight.runtime.weights import WeightStore

__all__ = ["ExpertWork"]

Ids = npt.NDArray[np.int64]


class _Place(NamedTuple):
    """Of an expert among neighbours that stay: all of these, and the first one's number."""

    sets: ExpertSets
    first: int


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
        self._units = programme.units
        self._numbers: dict[int, list[int]] = {}
        """Of a layer's experts, the units."""
        for number, unit in enumerate(self._units):
            if unit.expert is not None and unit.layer is not None:
                self._numbers.setdefault(unit.layer, []).append(number)
        self._weights = weights
        self._residual = residual
        self._workspace = workspace
        self._routing = routing
        self._chunk_tokens = chunk_tokens
        self._places: dict[int, dict[int, _Place | None]] = {}
        """By layer and expert."""
        self._turns: dict[int, dict[int, Choices]] = {}
        """Of the layer of each micro-batch's last router, by the first of those that are computed
        together."""

    def chosen(self, k: int, layer: int) -> Collection[int]:
        """The experts that are to be asked for in a layer whose router has run."""
        choices, places = self._routing.choices(k), self._places_in(layer)
        turns = self._turns[k] = {}
        begin, count = 0, len(choices.names)
        while begin < count:
            place, end = places[int(choices.names[begin])], begin + 1
            if place is not None:
                behind = np.searchsorted(choices.names, place.first + len(place.sets.weights))
                most = choices.borders[begin] + self._chunk_tokens
                fitting = np.searchsorted(choices.borders, most, side="right") - 1
                end = max(end, min(int(behind), int(fitting)))
            turns[int(choices.names[begin])] = choices.some(begin, end)
            begin = end
        return turns.keys()

    def perform(self, operation: Operation, k: int, unit: Unit, parts: Parts) -> None:
        """What micro-batch ``k`` chose of the unit's expert and of those that are computed with
        it."""
        assert unit.expert is not None and unit.layer is not None
        choices, place = self._turns[k][unit.expert], self._places_in(unit.layer)[unit.expert]
        for first, rows in parts:
            own = _within(choices, first, rows.shape[0])
            if len(choices.names) == 1:
                self._alone(operation, k, unit, own, first, rows)
            elif len(own.names):
                assert place is not None
                self._together(k, place, own, rows)

    def _alone(
        self,
        operation: Operation,
        k: int,
        unit: Unit,
        own: Choices,
        first: int,
        rows: torch.Tensor,
    ) -> None:
        """``rows`` are those of the tokens from ``first`` on."""
        weights, routes = self._weights.parts(operation.unit, operation.slot), self._routing.of(k)
        tokens = own.places // routes.weights.shape[1] - first
        shares = routes.weights.flatten()[own.places]
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

    def _together(self, k: int, place: _Place, own: Choices, rows: torch.Tensor) -> None:
        sets, in_rounds, borders = place.sets, *_rounds(own.tokens)
        ids = torch.from_numpy(np.stack((own.tokens, in_rounds, own.tokens[in_rounds])))
        if rows.device.type == "cuda":  # of other memory the copy would be waited for
            ids = ids.pin_memory()
        tokens, places, targets = ids.to(rows.device, non_blocking=True)
        together = Together(
            weights=sets.weights,
            find_rows=sets.find_rows,
            numbers=own.names - place.first,
            firsts=own.borders[:-1],
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

    def _places_in(self, layer: int) -> Mapping[int, _Place | None]:
        if layer not in self._places:
            self._places[layer] = dict(self._neighbours(self._numbers[layer]))
        return self._places[layer]

    def _neighbours(self, numbers: Sequence[int]) -> Iterator[tuple[int, _Place | None]]:
        """Experts of a layer, and what they are in if neighbours stay as they do."""
        for stay, some in groupby(numbers, self._weights.stays):
            own = list(some)
            units = [self._units[number] for number in own]
            experts = [unit.expert for unit in units if unit.expert is not None]
            place = None
            if stay and len(own) > 1:
                weights = [self._weights.parts(number, -1) for number in own]
                place = _Place(ExpertSets(units, weights), experts[0])
            yield from ((expert, place) for expert in experts)


def _within(choices: Choices, first: int, count: int) -> Choices:
    """Those of the tokens from ``first`` on, so many, which count from there."""
    tokens = choices.tokens - first
    here = (tokens >= 0) & (tokens < count)
    if here.all():
        return replace(choices, tokens=tokens)
    # Of each expert they are neighbours; a device is not waited for.
    own = [
        begin + np.searchsorted(tokens[begin:end], (0, count))
        for begin, end in pairwise(choices.borders)
    ]
    counts = np.array([end - begin for begin, end in own])
    some = counts > 0
    return Choices(
        names=choices.names[some],
        borders=np.append(0, np.cumsum(counts[some])),
        tokens=tokens[here],
        places=torch.cat([choices.places[begin:end] for begin, end in own]),
    )


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
