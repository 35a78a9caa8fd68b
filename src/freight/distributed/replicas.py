"""The rows of one job shared out over ranks that each run the whole model.

The first rank has the rows and keeps the answers: every rank asks it for the next row as it has
room, and sends back what it has answered. So each row is answered once, however fast ranks are.
Knows requests and completions, no plans and no layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from freight.distributed.messages import Inbox, Outbox, receive_all, receive_value
from freight.distributed.ranks import ConnectionLost, Ranks
from freight.runtime.engine import Engine
from freight.runtime.request import Completion, Request

__all__ = ["ReplicaEngine"]


class ReplicaEngine:
    """One replica, ``engine``, among those of all ranks. ``run`` is called on all of them; it
    yields what all have answered on the first rank, and nothing elsewhere."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks
        self._rows = ranks.group("rows asked for")
        self._answers = ranks.group("answers")
        self._is_done = False

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        """Answer rows, here and elsewhere; ``requests`` are looked at on the first rank alone."""
        try:
            if self._ranks.rank:
                self._serve()
            else:
                yield from self._gather(_Shared(requests))
            self._is_done = True
        except BaseException:  # also where the caller has had enough
            self._ranks.abandon()
            raise

    def _serve(self) -> None:
        answers = Outbox(self._answers, [0])
        for completion in self._engine.run(self._asked()):
            answers.send(completion)
        answers.send(None)
        answers.flush()

    def _asked(self) -> Iterator[Request]:
        asks = Outbox(self._rows, [0])
        while True:
            asks.send("next")
            if (request := receive_value(self._rows, 0)) is None:
                return
            yield request

    def _gather(self, requests: _Shared) -> Iterator[Completion]:
        inbox = Inbox()
        threading.Thread(target=self._answer, args=(requests, inbox), daemon=True).start()
        for peer in range(1, self._ranks.size):
            threading.Thread(
                target=self._hand_out, args=(requests, peer, inbox), daemon=True
            ).start()
            receive_all(self._answers, peer, inbox)
        num_working = self._ranks.size
        while num_working:
            answer = inbox.get()
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                num_working -= 1
            else:
                yield answer

    def _answer(self, requests: _Shared, inbox: Inbox) -> None:
        """This rank's own part, beside what the others do."""
        try:
            for completion in self._engine.run(requests):
                inbox.put(completion)
            inbox.put(None)
        except Exception as error:
            inbox.put(error)

    def _hand_out(self, requests: _Shared, peer: int, inbox: Inbox) -> None:
        outbox = Outbox(self._rows, [peer])
        try:
            while True:
                receive_value(self._rows, peer)
                try:
                    request = next(requests, None)
                except Exception as error:
                    inbox.put(error)
                    return
                outbox.send(request)
                if request is None:
                    outbox.flush()
                    return
        except ConnectionLost:
            return  # who waits for its answers notices too

    def status(self) -> str:
        return f"{self._ranks.size} replicas: {self._engine.status()}"

    def summary(self) -> str:
        """That of every replica: called on all ranks."""
        name = f"replica {self._ranks.rank + 1} of {self._ranks.size}"
        told = f"{name}\n{self._engine.summary()}"
        return "\n".join(self._ranks.exchange("summary", told))

    def close(self) -> None:
        """Give memory and files back; not under the hands of a thread that still computes."""
        if self._is_done:
            self._engine.close()


class _Shared(Iterator[Request]):
    """Requests that several threads draw."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._lock = threading.Lock()

    def __next__(self) -> Request:
        with self._lock:
            return next(self._requests)
