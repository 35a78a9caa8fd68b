"""Stages of ranks that a model is cut over: which layers a rank has, and what passes on from it.

A stage is a mesh by itself and has some of the layers. The ranks at one place of their stages hand
the stream on to each other as it lies, so that nothing is laid out anew between stages. Knows ranks
and layers, no rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from freight.distributed.tensor.processes import Exchange, Message
from freight.distributed.tensor.ranks import Parts
from freight.errors import InputError
from freight.model.switches import ModelConfig

__all__ = ["Passage", "ProcessWire", "Stage", "Wire", "in_stage", "largest_part", "passage_of"]

_MESSAGES: Final = 3
"""Of a call: what it is, what its rows bring, and the stream; or its logits, and its scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """``number`` of ``count``, with ``layers`` of all."""

    number: int
    count: int
    layers: range

    @classmethod
    def of(cls, number: int, count: int, num_layers: int) -> Stage:
        """Equal parts, to within a layer."""
        borders = [num_layers * place // count for place in (number, number + 1)]
        return cls(number=number, count=count, layers=range(*borders))

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


class Wire(Protocol):
    """From the own ranks to those at their places in another stage, or from there."""

    def send(self, parts: Parts) -> None:
        """Begin to; nobody waits."""

    def allow(self, num_calls: int) -> None:
        """As many are in a sweep: what they send is on its way at once."""

    def receive(self, like: Parts) -> Parts:
        """What comes next, of these shapes and types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A stage and its wires: from the stage ``before``, to the one ``after``, and for ``answers``
    from the last stage's first rank to the run's. Those that a rank lacks are None."""

    stage: Stage
    before: Wire | None = None
    after: Wire | None = None
    answers: Wire | None = None

    def allow(self, num_calls: int) -> None:
        """Nobody is to wait for what so many calls of a sweep send."""
        for wire in (self.after, self.answers):
            if wire is not None:
                wire.allow(num_calls)

    @classmethod
    def whole(cls, num_layers: int) -> Passage:
        """Of a model that is in one stage."""
        return cls(stage=Stage.of(0, 1, num_layers))


class ProcessWire:
    """Between this process and the one of ``peer``; what is sent is kept until it has gone.
    What the sweeps of ``num_sweeps`` batches send may be on its way."""

    def __init__(self, exchange: Exchange, peer: int, *, num_sweeps: int) -> None:
        self._exchange = exchange
        self._peer = peer
        self._num_sweeps = num_sweeps
        self._most_unsent = 0
        self.allow(1)
        self._unsent: deque[tuple[torch.Tensor, Sequence[Message]]] = deque()
        self._nothing = torch.empty(0)

    def allow(self, num_calls: int) -> None:
        self._most_unsent = max(self._most_unsent, _MESSAGES * self._num_sweeps * num_calls)

    def send(self, parts: Parts) -> None:
        (part,) = parts
        sent = part.contiguous()
        works = self._exchange(sent, self._peer, self._nothing, self._peer)
        self._unsent.append((sent, works))
        while len(self._unsent) > self._most_unsent:
            for work in self._unsent.popleft()[1]:
                work.wait()

    def receive(self, like: Parts) -> Parts:
        come = torch.empty_like(like[0], memory_format=torch.contiguous_format)
        for work in self._exchange(self._nothing, self._peer, come, self._peer):
            work.wait()
        return [come]


def in_stage(connect: Callable[[], Exchange], first: int) -> Callable[[], Exchange]:
    """The same channels, for ranks that count from the run's rank ``first`` on."""

    def connected() -> Exchange:
        exchange = connect()

        def exchanged(
            sent: torch.Tensor, to: int, come: torch.Tensor, origin: int
        ) -> Sequence[Message]:
            return exchange(sent, first + to, come, first + origin)

        return exchanged

    return connected


def passage_of(
    rank: int, num_ranks: int, count: int, num_layers: int, connect: Callable[[], Exchange]
) -> Passage:
    """That of one rank; all ranks call it. InputError where they cannot be put into so many
    stages."""
    size, rest = divmod(num_ranks, count)
    if rest or size < 2 or count > num_layers:
        raise InputError(
            f"--stages {count} was given for {num_ranks} ranks and {num_layers} layers.",
            "A stage has at least one layer, and as many ranks as any other, two or more.",
            "Choose a number of stages that divides the ranks, or use --split layers.",
        )
    stage = Stage.of(rank // size, count, num_layers)
    exchange = connect()

    def wire(peer: int) -> Wire:
        return ProcessWire(exchange, peer, num_sweeps=count + 1)

    last = (count - 1) * size
    ends = {0: last, last: 0}
    return Passage(
        stage=stage,
        before=None if stage.is_first else wire(rank - size),
        after=None if stage.is_last else wire(rank + size),
        answers=wire(ends[rank]) if rank in ends else None,
    )


def largest_part(config: ModelConfig, count: int) -> ModelConfig:
    """A model of the layers that the largest of so many stages has."""

    def weight(own: Stage) -> tuple[int, int]:
        return sum(config.has_experts(layer) for layer in own.layers), len(own.layers)

    stages = [Stage.of(number, count, config.num_layers) for number in range(count)]
    layers = max(stages, key=weight).layers
    return config.of_layers(layers)
