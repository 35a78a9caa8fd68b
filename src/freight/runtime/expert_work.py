"""Computes experts on the tokens that chose them: those that come together, or as many of them as
scratch memory has room for.

Alone an expert of a model with many takes longer to be asked for than to be computed, above all
where it has a token or two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

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
        self._choices: dict[int, Choices] = {}
        """Of the layer of each micro-batch's last router."""

    def chosen(self, k: int) -> Collection[int]:
        """The experts of the layer whose router has run."""
        self._choices[k] = self._routing.choices(k)
        return frozenset(self._choices[k].names.tolist())

    def perform(self, operation: Operation, k: int, parts: Parts) -> None:
        """What micro-batch ``k`` chose of the operation's experts."""
        experts = ((self._units[own.unit].expert, own) for own in operation.unit_places)
        places = {expert: own for expert, own in experts if expert is not None}
        for some in self._turns(self._choices[k].within(places)):
            own_places = [places[name] for name in some.names.tolist()]
            sets, numbers = self._sets(own_places) if len(own_places) > 1 else (None, None)
            for first, rows in parts:
                own = _within(some, first, rows.shape[0])
                if sets is None:
                    self._alone(own_places[0], k, own, first, rows)
                elif len(own.names):
                    assert numbers is not None
                    present = np.searchsorted(some.names, own.names)
                    self._together(k, sets, numbers[present], own, rows)

    def _turns(self, choices: Choices) -> Iterator[Choices]:
        """As many of the experts as have no more tokens than are computed at once; or one."""
        begin, count = 0, len(choices.names)
        while begin < count:
            most = choices.borders[begin] + self._chunk_tokens
            fitting = int(np.searchsorted(choices.borders, most, side="right")) - 1
            end = max(begin + 1, fitting)
            yield choices.some(begin, end)
            begin = end

    def _sets(self, places: Sequence[UnitPlace]) -> tuple[ExpertSets, Ids]:
        """Sets that have these experts' weights, and which of them are theirs."""
        layer = self._units[places[0].unit].layer
        assert layer is not None
        if all(self._weights.stays(own.unit) for own in places):
            sets, numbers = self._staying_in(layer)
            return sets, np.array([numbers[own.unit] for own in places])
        units = [self._units[own.unit] for own in places]
        weights = [self._weights.parts(own.unit, own.slot) for own in places]
        return ExpertSets(units, weights), np.arange(len(places))

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
        ids = torch.from_numpy(np.stack((own.tokens, in_rounds, own.tokens[in_rounds])))
        if rows.device.type == "cuda":  # of other memory the copy would be waited for
            ids = ids.pin_memory()
        tokens, places, targets = ids.to(rows.device, non_blocking=True)
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
