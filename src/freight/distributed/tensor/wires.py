"""Tensors from rank to rank over the messages of a run that torchrun has started.

They pass through the host's memory, also between devices. Knows ranks and tensors, no meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from freight.distributed.ranks import Message, Ranks
from freight.distributed.tensor.processes import Exchange

__all__ = ["connector"]


@dataclass(frozen=True, slots=True)
class _Message:
    """Under way; what has come ``host`` goes on to ``device`` where that is another memory."""

    work: Message
    host: torch.Tensor
    device: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        if self.device is not self.host:
            self.device.copy_(self.host)


def connector(ranks: Ranks) -> Callable[[], Exchange]:
    """What makes a channel, with connections of its own; all ranks make theirs in one order."""
    numbers = count()

    def connect() -> Exchange:
        group = ranks.group(f"tensors {next(numbers)}")

        def exchange(
            sent: torch.Tensor, to: int, come: torch.Tensor, origin: int
        ) -> list[_Message]:
            messages = []
            if sent.numel():
                host = sent.cpu()
                messages.append(_Message(group.send(host, to), host, host))
            if come.numel():
                host = come if come.device.type == "cpu" else torch.empty_like(come, device="cpu")
                messages.append(_Message(group.receive(host, origin), host, come))
            return messages

        return exchange

    return connect
