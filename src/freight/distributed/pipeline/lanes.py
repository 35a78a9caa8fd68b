"""Several blocks of rows in flight, sweep after sweep in turn: what keeps all stages at work.

Each block has its own scheduler and its own pages, and takes requests from one queue. Before a
block's next sweep is made up, the tokens of its last one are taken in, never sooner: so every stage
comes to the same decisions, whenever it hears of tokens. Knows no ranks and no messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from freight.plan.operation import Operation
from freight.plan.sweep import Awaited, Sweep
from freight.runtime.answers import NewTokens
from freight.runtime.performer import Performer
from freight.runtime.request import Completion
from freight.runtime.scheduler import Scheduler

__all__ = ["Lanes"]


@dataclass(kw_only=True, slots=True)
class _Lane:
    scheduler: Scheduler
    performer: Performer
    sweeps: Iterator[Sweep]
    last: Sweep | None = None
    is_open: bool = True


class Lanes:
    """Blocks in turn; sweeps of all are numbered together. ``has_requests`` says whether some are
    still to be drawn."""

    def __init__(
        self, parts: Sequence[tuple[Scheduler, Performer]], has_requests: Callable[[], bool]
    ) -> None:
        self._lanes = [
            _Lane(scheduler=scheduler, performer=performer, sweeps=scheduler.sweeps())
            for scheduler, performer in parts
        ]
        self._has_requests = has_requests
        self._places: dict[int, tuple[_Lane, int]] = {}
        self._current: _Lane | None = None
        self.any_performer = parts[0][1]
        """For what no block has of its own: weights."""

    def turns(self) -> Iterator[Sweep | Awaited]:
        """Sweeps for as long as there are rows, before each the one whose tokens it waits for."""
        index = 0
        turns = deque(self._lanes)
        while turns:
            lane = turns.popleft()
            if lane.last is not None:
                batches = tuple(work.batch for work in lane.last.works)
                yield Awaited(sweep=lane.last.index, batches=batches)
            sweep = next(lane.sweeps, None)
            if sweep is None:
                lane.is_open = False
                continue
            self._places[index] = lane, sweep.index
            lane.last = Sweep(index=index, works=sweep.works)
            yield lane.last
            turns.append(lane)
            index += 1

    def expects_more(self) -> bool:
        """Whether a sweep follows. No block is asked to draw a request: the order in which they do
        would be that of this stage alone."""
        if any(lane.is_open and lane.scheduler.goes_on() for lane in self._lanes):
            return True
        return self._has_requests()

    def own(self, operation: Operation) -> tuple[Performer, Operation]:
        """Who performs an operation, which then counts its block's sweeps alone."""
        lane, number = self._places[operation.sweep]
        return lane.performer, operation._replace(sweep=number)

    def begin(self, sweep: int) -> None:
        """A computation of this sweep comes next."""
        self._current = self._places[sweep][0]

    def chosen(self, k: int) -> Collection[int]:
        """The experts that a micro-batch of the sweep under way has chosen."""
        assert self._current is not None
        return self._current.performer.chosen(k)

    def update(self, operation: Operation, made: NewTokens) -> list[Completion]:
        """Take in the tokens of a micro-batch; the requests that are answered now."""
        assert operation.batch is not None
        lane, _ = self._places[operation.sweep]
        # Stores of a sweep may still be under way when its tokens are taken.
        for old in [index for index in self._places if index < operation.sweep - len(self._lanes)]:
            del self._places[old]
        return lane.scheduler.update(operation.batch, made)
