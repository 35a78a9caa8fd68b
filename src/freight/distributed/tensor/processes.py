"""One rank per process, under ``torch.distributed``.

Tensors go from rank to rank by themselves: gloo's own reduce-scatter is an all-reduce inside, which
moves twice as much. Who has started the processes may bring messages of its own: ``connect`` makes
a channel between all ranks. Otherwise they are those of the group that
``torch.distributed.init_process_group`` has made, over gloo or NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from freight.distributed.tensor.groups import members, place
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.errors import InputError
from freight.partition.layout import Mesh

__all__ = ["Exchange", "Message", "ProcessRanks"]


class Message(Protocol):
    """Under way."""

    def wait(self) -> object:
        """It has gone, or come."""


Exchange = Callable[[torch.Tensor, int, torch.Tensor, int], Sequence[Message]]
"""Begins to send a tensor to a rank, and to receive one of another."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """``sent`` is held until it has left."""

    sent: torch.Tensor
    come: torch.Tensor
    works: Sequence[Message]

    def wait(self) -> Parts:
        for work in self.works:
            work.wait()
        return [self.come]


class ProcessRanks(Ranks):
    """The rank of this process in a mesh of as many chips as there are processes.

    Raises InputError where their numbers differ.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device | None = None,
        *,
        rank: int | None = None,
        connect: Callable[[], Exchange] | None = None,
    ) -> None:
        if connect is None and dist.get_world_size() != mesh.num_chips:
            raise InputError(
                f"A mesh of {mesh.num_chips} chips ({mesh}) was asked for.",
                f"{dist.get_world_size()} processes were started.",
                "Start one process for each chip.",
            )
        own = dist.get_rank() if rank is None else rank
        super().__init__(mesh, (own,), device or torch.device("cpu"))
        self._connect = connect
        self._exchange = _messages(None) if connect is None else connect()

    def apart(self) -> ProcessRanks:
        connect = self._connect or (lambda: _messages(dist.new_group()))
        return ProcessRanks(self.mesh, self.device, rank=self.own[0], connect=connect)

    def shift(self, parts: Parts, axes: str, steps: int, like: Parts | None = None) -> _UnderWay:
        rank = self.own[0]
        group, here = members(self.mesh, rank, axes), place(self.mesh, rank, axes)
        to, origin = (group[(here + step) % len(group)] for step in (steps, -steps))
        sent = parts[0].contiguous()
        if to == rank:
            return _UnderWay(sent, sent, ())
        come = torch.empty_like((like or parts)[0], memory_format=torch.contiguous_format)
        self.sent_bytes += sent.nbytes
        return _UnderWay(sent, come, self._exchange(sent, to, come, origin))


def _messages(group: dist.ProcessGroup | None) -> Exchange:
    """Those of a group, or of all processes."""

    def exchange(sent: torch.Tensor, to: int, come: torch.Tensor, origin: int) -> Sequence[Message]:
        # Both at once, as NCCL wants it.
        leaving = dist.P2POp(dist.isend, sent, to, group)
        return dist.batch_isend_irecv([leaving, dist.P2POp(dist.irecv, come, origin, group)])

    return exchange
