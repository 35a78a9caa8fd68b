"""Values sent from rank to rank: in order, received by threads of their own.

So whoever sends need not wait for who is busy, and waiting for a value can be broken off by a
signal. Knows bytes and queues, not what is said.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

import torch

from freight.distributed.ranks import ConnectionLost, Group, Message
from freight.distributed.values import pack, unpack
from freight.errors import RankError

__all__ = ["Inbox", "Outbox", "receive_all", "receive_value"]

_MOST_UNSENT: Final = 64


class Inbox:
    """Values in the order in which they were put; ``get`` waits for one."""

    def __init__(self) -> None:
        self._values: deque[Any] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None

    def put(self, value: Any) -> None:
        with self._changed:
            self._values.append(value)
            self._changed.notify()

    def fail(self, error: Exception) -> None:
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


class Outbox:
    """Sends values to some ranks without waiting, unless very many are on their way."""

    def __init__(self, group: Group, peers: range | list[int]) -> None:
        self._group = group
        self._peers = peers
        self._unsent: deque[tuple[Message, torch.Tensor]] = deque()

    def send(self, value: Any) -> None:
        payload = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        for peer in self._peers:
            for tensor in (size, payload):
                self._unsent.append((self._group.send(tensor, peer), tensor))
        while len(self._unsent) > _MOST_UNSENT * max(1, len(self._peers)):
            self._unsent.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until all has gone."""
        while self._unsent:
            self._unsent.popleft()[0].wait()


def receive_all(group: Group, source: int, inbox: Inbox) -> threading.Thread:
    """Receive values in a thread until None comes, or the connection breaks. Nothing else may
    receive from there before it has ended: it would get parts of these values."""

    def run() -> None:
        try:
            while True:
                value = receive_value(group, source)
                inbox.put(value)
                if value is None:
                    return
        except (RuntimeError, RankError) as error:
            inbox.fail(error)

    thread = threading.Thread(target=run, name="freight inbox", daemon=True)
    thread.start()
    return thread


def receive_value(group: Group, source: int) -> Any:
    """The next value from a rank; ConnectionLost where the connection breaks."""
    size = torch.zeros(1, dtype=torch.long)
    group.receive(size, source).wait()
    payload = torch.empty(int(size), dtype=torch.uint8)
    group.receive(payload, source).wait()
    return unpack(payload.numpy().tobytes())
