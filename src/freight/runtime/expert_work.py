"""Computes experts on the tokens that chose them: those that come together, or as many of them as
scratch memory has room for.

Alone an expert of a model with many takes longer to be asked for than to be computed, above all
where it has a token or two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.device_rows import brought
from freight.model.expert_sets import ExpertSets
from freight.model.frame import Frame, Together
from freight.model.layers import run_unit
from freight.model.programme import Programme
from freight.model.workspace import Workspace
from freight.plan.operation import Operation, UnitPlace
from freight.runtime.residual import Parts, ResidualStream
from freight.runtime.routing import Choices, Routing
from freight.runtime.weights import WeightStore

__all__ = ["ExpertWork"]

Ids = npt.NDArray[np.int64]


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
        self._weights = weights
        self._residual = residual
        self._workspace = workspace
        self._routing = routing
        self._chunk_tokens = chunk_tokens
        self._staying: dict[int, tuple[ExpertSets, Mapping[int, int]]] = {}
        """Of a layer those experts that stay, and which of them each unit is."""
        self._latest: tuple[tuple[int, int], ExpertSets] | None = None
        """By sweep and first unit those in the ring that were computed last."""
        self._choices: dict[int, Choices] = {}
        """Of the layer of each micro-batch's last router."""

    def chosen(self, k: int) -> Collection[int]:
        """The experts of the layer whose router has run."""
        self._choices[k] = self._routing.choices(k)
        return frozenset(self._choices[k].names.tolist())

    def perform(self, operation: Operation, k: int, parts: Parts) -> None:
        """What micro-batch ``k`` chose of the operation's experts."""
        places = operation.unit_places
        experts = np.array([self._units[own.unit].expert for own in places])
        for some in self._turns(self._choices[k].within(experts)):
            for first, rows in parts:
                own = _within(some, first, rows.shape[0])
                if len(some.names) == 1:
                    (number,) = np.searchsorted(experts, some.names)
                    self._alone(places[number], k, own, first, rows)
                elif len(own.names):
                    sets, numbers = self._sets(operation)
                    present = numbers[np.searchsorted(experts, own.names)]
                    self._together(k, sets, present, own, rows)

    def _turns(self, choices: Choices) -> Iterator[Choices]:
        """As many of the experts as have no more tokens than are computed at once; or one."""
        begin, count = 0, len(choices.names)
        while begin < count:
            most = choices.borders[begin] + self._chunk_tokens
            fitting = int(np.searchsorted(choices.borders, most, side="right")) - 1
            end = max(begin + 1, fitting)
            yield choices.some(begin, end)
            begin = end

    def _sets(self, operation: Operation) -> tuple[ExpertSets, Ids]:
        """Sets that have the weights of an operation's experts, and which of them are theirs: in
        the ring the same ones for all micro-batches of a sweep."""
        places = operation.unit_places
        if all(own.slot < 0 for own in places):
            layer = self._units[operation.unit].layer
            assert layer is not None
            sets, numbers = self._staying_in(layer)
            return sets, np.array([numbers[own.unit] for own in places])
        key = operation.sweep, operation.unit
        if self._latest is None or self._latest[0] != key:
            weights = [self._weights.parts(own.unit, own.slot) for own in places]
            self._latest = key, ExpertSets([self._units[own.unit] for own in places], weights)
        return self._latest[1], np.arange(len(places))

    def _staying_in(self, layer: int) -> tuple[ExpertSets, Mapping[int, int]]:
        if layer not in self._staying:
            staying = [
                number
                for number, unit in enumerate(self._units)
                if unit.expert is not None and unit.layer == layer and self._weights.stays(number)
            ]
            weights = [self._weights.parts(number, -1) for number in staying]
            sets = ExpertSets([self._units[number] for number in staying], weights)
            self._staying[layer] = sets, {number: i for i, number in enumerate(staying)}
        return self._staying[layer]

    def _alone(
        self, place: UnitPlace, k: int, own: Choices, first: int, rows: torch.Tensor
    ) -> None:
        """``rows`` are those of the tokens from ``first`` on."""
        weights, routes = self._weights.parts(place.unit, place.slot), self._routing.of(k)
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
            run_unit(self._units[place.unit], frame)

    def _together(
        self, k: int, sets: ExpertSets, numbers: Ids, own: Choices, rows: torch.Tensor
    ) -> None:
        in_rounds, borders = _rounds(own.tokens)
        ids = np.stack((own.tokens, in_rounds, own.tokens[in_rounds]))
        tokens, places, targets = brought(ids, rows.device)
        together = Together(
            weights=sets.weights,
            find_rows=sets.find_rows,
            numbers=numbers,
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
