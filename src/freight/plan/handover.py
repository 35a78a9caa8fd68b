"""The part of the schedule between the stages of a pipeline: what comes, what goes, and when.

Rows of the residual stream come from the stage before and go to the next one, tokens come from the
last. Who is in a sweep depends on tokens of an earlier one; all stages take them in the same place
of their streams, just before the sweep is made up, and so all make up the same. A stage that
receives makes a sweep up as soon as it has entered the rows of the one before: what it brings can
then arrive while that is computed. Knows no ranks and no tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from freight.model.batch import MicroBatch
from freight.plan.operation import Access, Kind, Lane, Operation
from freight.plan.scoreboard import Scoreboard, read, write
from freight.plan.sweep import Awaited, BatchWork, StreamModel, Sweep

__all__ = ["Handover"]

_TOKEN_BYTES = 8

_Asked = Generator[Operation, None, Sweep | None]


@dataclass(kw_only=True, slots=True)
class Handover:
    """``turns`` are sweeps and, between them, those whose tokens the next one waits for. Without a
    pipeline they are sweeps alone, and nothing comes or goes."""

    turns: Iterator[Sweep | Awaited]
    model: StreamModel
    board: Scoreboard
    held: Awaited | None = None
    ahead: Sweep | None = None

    def next_sweep(self) -> _Asked:
        """The next one, after the tokens that it waits for have been taken; None at the end."""
        if self.ahead is not None:
            sweep, self.ahead = self.ahead, None
            return sweep
        return (yield from self._ask(None))

    def look_ahead(self, current: Sweep) -> Iterator[Operation]:
        """Ask for the sweep after ``current``, unless that waits for tokens of ``current``
        itself."""
        if self.model.receives:
            self.ahead = yield from self._ask(current)

    def _ask(self, current: Sweep | None) -> _Asked:
        while True:
            turn = self.held or next(self.turns, None)
            self.held = None
            if isinstance(turn, Awaited):
                if current is not None and turn.sweep >= current.index:
                    self.held = turn
                    return None
                for batch in turn.batches:
                    yield self._take(turn.sweep, batch)
                continue
            if turn is not None and self.model.receives:
                for work in turn.works:
                    yield self._receive(turn.index, work)
            return turn

    def _take(self, sweep: int, batch: MicroBatch) -> Operation:
        accesses = [self.board.new_home("tokens", batch.index, (sweep,))]
        return self.board.make(
            Kind.TAKE_TOKENS,
            Lane.COMPUTE,
            accesses,
            sweep=sweep,
            unit=len(self.model.units) - 1,
            batch=batch,
            num_bytes=_TOKEN_BYTES * batch.num_logits,
            is_last=True,
        )

    def _receive(self, sweep: int, work: BatchWork) -> Operation:
        k, size = work.batch.index, work.embedding_bytes
        return self.board.make(
            Kind.RECEIVE_HIDDEN,
            Lane.RECEIVE,
            [write("embedding rows", k, (sweep, k), size)],
            sweep=sweep,
            unit=0,
            batch=work.batch,
            slot=k,
            num_bytes=size,
        )

    def departure(self, sweep: int, work: BatchWork) -> Access:
        """Where the last unit puts the rows that go on."""
        k = work.batch.index
        if self._is_staged:
            return write("departing slot", 0, (sweep, k), work.departing_bytes)
        return write("departing rows", k, (sweep, k), work.departing_bytes)

    @property
    def _is_staged(self) -> bool:
        return self.model.compute_tier == "gpu"

    def hand_over(self, sweep: int, unit: int, work: BatchWork) -> Iterator[Operation]:
        """After the last unit of a micro-batch: its rows to the next stage, or its tokens to all
        others."""
        k, size = work.batch.index, work.departing_bytes
        if self.model.sends and self._is_staged:
            accesses = [
                read("departing slot", 0, (sweep, k)),
                write("departing rows", k, (sweep, k), size),
            ]
            yield self.board.make(
                Kind.COPY_DEPARTING,
                Lane.FROM_DEVICE,
                accesses,
                sweep=sweep,
                unit=unit,
                batch=work.batch,
                slot=k,
                source_slot=0,
                num_bytes=size,
            )
        if self.model.sends:
            yield self.board.make(
                Kind.SEND_HIDDEN,
                Lane.SEND,
                [read("departing rows", k, (sweep, k))],
                sweep=sweep,
                unit=unit,
                batch=work.batch,
                source_slot=k,
                num_bytes=size,
            )
        elif self.model.receives:
            yield self.board.make(
                Kind.SEND_TOKENS,
                Lane.SEND,
                [self.board.home("made tokens", k)],
                sweep=sweep,
                unit=unit,
                batch=work.batch,
                num_bytes=_TOKEN_BYTES * work.batch.num_logits,
            )
