"""What stages say to each other: rows of the residual stream, new tokens, requests.

Rows go from one stage to the next, tokens from the last stage to all others, requests from the
first. Messages that come unasked are received by threads of their own, so that whoever sends need
not wait for who is busy; waiting for one here can be broken off by a signal. Knows bytes and
pickled values; the operations around it decide when.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Final

import torch
from torch.distributed import Work

from freight.distributed.ranks import Group, Ranks
from freight.runtime.answers import NewTokens
from freight.runtime.request import Request

__all__ = ["ConnectionLost", "Inbox", "Requests", "Wires"]

_MOST_UNSENT: Final = 64


class ConnectionLost(RuntimeError):
    """A message cannot come or go any more: some rank has ended."""


class Inbox:
    """Values in the order in which they were put; ``get`` waits for one."""

    def __init__(self) -> None:
        self._values: deque[Any] = deque()
        self._changed = threading.Condition()
        self._error: RuntimeError | None = None

    def put(self, value: Any) -> None:
        with self._changed:
            self._values.append(value)
            self._changed.notify()

    def fail(self, error: RuntimeError) -> None:
        """Nothing comes any more."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def get(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._values or self._error is not None)
            if self._values:
                return self._values.popleft()
            raise ConnectionLost(str(self._error))


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


class _Outbox:
    """Sends values to some ranks without waiting, unless very many are on their way."""

    def __init__(self, group: Group, peers: range | list[int]) -> None:
        self._group = group
        self._peers = peers
        self._unsent: deque[tuple[Work, torch.Tensor]] = deque()

    def send(self, value: Any) -> None:
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        try:
            for peer in self._peers:
                for tensor in (size, payload):
                    self._unsent.append((self._group.send(tensor, peer), tensor))
            while len(self._unsent) > _MOST_UNSENT * max(1, len(self._peers)):
                self._unsent.popleft()[0].wait()
        except RuntimeError as error:
            raise ConnectionLost(str(error)) from error

    def flush(self) -> None:
        """Wait until all has gone."""
        while self._unsent:
            self._unsent.popleft()[0].wait()


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
        self._to_all_tokens = _Outbox(self._tokens, others)
        self._to_all_requests = _Outbox(self._requests, others)
        self._asked = Inbox()
        if self._rank != self._last:
            _receive_all(self._tokens, self._last, self._made)
        if self._rank != 0:
            _receive_all(self._requests, 0, self._asked)

    # -- rows ----------------------------------------------------------------------------------

    def send_rows(self, rows: torch.Tensor) -> None:
        """To the next stage; returns when they have gone."""
        self._wait(lambda: self._rows.send(rows, self._rank + 1))

    def receive_rows(self, rows: torch.Tensor) -> None:
        """From the stage before; returns when they are there."""
        self._wait(lambda: self._rows.receive(rows, self._rank - 1))

    def _wait(self, begin: Callable[[], Work]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise ConnectionLost(str(error)) from error

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
        """The job's, in one order on all stages: ``own`` are those of the first."""
        if self._rank:
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


def _receive_all(group: Group, source: int, inbox: Inbox) -> None:
    """Receive values in a thread until None comes, or the connection breaks."""

    def run() -> None:
        try:
            while True:
                size = torch.zeros(1, dtype=torch.long)
                group.receive(size, source).wait()
                payload = torch.empty(int(size), dtype=torch.uint8)
                group.receive(payload, source).wait()
                value = pickle.loads(payload.numpy().tobytes())
                inbox.put(value)
                if value is None:
                    return
        except RuntimeError as error:
            inbox.fail(error)

    threading.Thread(target=run, name="freight inbox", daemon=True).start()
