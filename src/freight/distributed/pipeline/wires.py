"""What stages say to each other: rows of the residual stream, new tokens, requests.

Rows go from one stage to the next, tokens from the last stage to all others, requests from the
first. Knows what goes where; the operations around it decide when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Final

import torch

from freight.distributed.messages import Inbox, Outbox, receive_all
from freight.distributed.ranks import Ranks
from freight.plan.pipeline import Hop
from freight.runtime.answers import NewTokens
from freight.runtime.request import Request

__all__ = ["Requests", "Wires", "hop_of"]

_LEAST_BYTES: Final = 1 << 16
_MOST_BYTES: Final = 1 << 22
_LONG_S: Final = 0.02
"""A message is as large as takes so long, within those bounds: a slow network is not held up."""
_TRIES: Final = 5


class Requests(Iterator[Request]):
    """Requests in order, each drawn when the one before is handed out; None ends them. So on all
    stages it is known at once whether one is left."""

    def __init__(self, draw: Callable[[], Request | None]) -> None:
        self._draw = draw
        self._next = draw()

    def has_more(self) -> bool:
        return self._next is not None

    def __next__(self) -> Request:
        request = self._next
        if request is None:
            raise StopIteration
        self._next = self._draw()
        return request


def hop_of(size: int, taken_s: float, alone_s: float) -> Hop:
    """A link on which ``size`` bytes took so long, and a message of none ``alone_s``: what it takes
    however small it is goes there and back. Half of the time at least was the bytes' own."""
    return Hop(bytes_per_s=size / max(taken_s - alone_s, taken_s / 2), latency_s=alone_s / 2)


class Wires:
    """A stage's messages; stages are ranks in their order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rank, self._last = ranks.rank, ranks.size - 1
        self._rows = ranks.group("rows")
        self._tokens = ranks.group("tokens")
        self._requests = ranks.group("requests")
        others = [rank for rank in range(ranks.size) if rank != self._rank]
        self._made = Inbox()
        self._to_all_tokens = Outbox(self._tokens, others)
        self._to_all_requests = Outbox(self._requests, others)
        self._asked = Inbox()
        self._listeners: list[threading.Thread] = []

    # -- rows ----------------------------------------------------------------------------------

    def send_rows(self, rows: torch.Tensor) -> None:
        """To the next stage; returns when they have gone."""
        self._rows.send(rows, self._rank + 1).wait()

    def receive_rows(self, rows: torch.Tensor) -> None:
        """From the stage before; returns when they are there."""
        self._rows.receive(rows, self._rank - 1).wait()

    def measure_hops(self) -> list[Hop]:
        """From each stage to the next, and from the last one to the first; called on all at once,
        before there are rows to send. The same on each."""
        own = Hop(bytes_per_s=float("inf"), latency_s=0.0)
        for rank in range(self._last + 1):
            after = (rank + 1) % (self._last + 1)
            if rank == after:
                continue
            if self._rank == rank:
                own = self._measure_hop(after)
            elif self._rank == after:
                self._answer(rank)
        return self._ranks.exchange("hop", own)

    def _measure_hop(self, after: int) -> Hop:
        """Messages to a rank that says of each that it has come."""
        nothing = torch.zeros(0, dtype=torch.uint8)
        alone_s = min(self._ask(nothing, after) for _ in range(_TRIES))
        size, taken_s = _LEAST_BYTES, 0.0
        while True:
            rows = torch.zeros(size, dtype=torch.uint8)
            taken_s = min(self._ask(rows, after) for _ in range(2))
            if taken_s >= _LONG_S or size >= _MOST_BYTES:
                break
            size *= 4
        # Once more: on a busy machine small messages may all have waited for a core before.
        alone_s = min(alone_s, *(self._ask(nothing, after) for _ in range(_TRIES)))
        self._rows.send(torch.tensor([-1]), after).wait()
        return hop_of(size, taken_s, alone_s)

    def _ask(self, rows: torch.Tensor, after: int) -> float:
        size, back = torch.tensor([rows.numel()]), torch.empty(1, dtype=torch.int64)
        begun_s = time.perf_counter()
        self._rows.send(size, after).wait()
        if rows.numel():
            self._rows.send(rows, after).wait()
        self._rows.receive(back, after).wait()
        return time.perf_counter() - begun_s

    def _answer(self, before: int) -> None:
        """The other end of that."""
        size = torch.empty(1, dtype=torch.int64)
        rows = torch.empty(_MOST_BYTES, dtype=torch.uint8)
        while True:
            self._rows.receive(size, before).wait()
            if (count := int(size)) < 0:
                return
            if count:
                self._rows.receive(rows[:count], before).wait()
            self._rows.send(size, before).wait()

    # -- tokens, from the last stage -------------------------------------------------------------

    def send_tokens(self, made: NewTokens) -> None:
        self._to_all_tokens.send(made)

    def keep_tokens(self, made: NewTokens) -> None:
        """Those of this stage itself, the last one, until it takes them too. Scores may lie where
        those of another micro-batch will."""
        self._made.put(deepcopy(made))

    def take_tokens(self) -> NewTokens:
        """Those of the next micro-batch that all stages take."""
        made: NewTokens = self._made.get()
        return made

    # -- requests, from the first stage ----------------------------------------------------------

    def requests(self, own: Iterator[Request]) -> Requests:
        """A job's, in one order on all stages: ``own`` are those of the first. What other stages
        say of it is listened to from here until they have said all."""
        for listener in self._listeners:  # those of the job before, to which an end is on its way
            listener.join()
        self._made, self._asked = Inbox(), Inbox()
        self._listeners = []
        if self._rank != self._last:
            self._listeners.append(receive_all(self._tokens, self._last, self._made))
        if self._rank:
            self._listeners.append(receive_all(self._requests, 0, self._asked))
            return Requests(self._asked.get)

        def draw() -> Request | None:
            request = next(own, None)
            self._to_all_requests.send(request)
            return request

        return Requests(draw)

    def finish(self) -> None:
        """After the last sweep: nothing more goes out."""
        if self._rank == self._last:
            self._to_all_tokens.send(None)
            self._to_all_tokens.flush()
        if self._rank == 0:
            self._to_all_requests.flush()
