"""Operations on a virtual clock: what the executor would do, were each to take its reckoned time.

Lanes work through their operations in order, side by side, waiting for what an operation names.
Where parts of the machine slow each other down, an operation advances at the share of its speed
that is left beside the others. Where the computing thread issues all operations itself (a CPU
computes), nothing begins before the computations that precede it in the stream have ended. Knows
no model, no machine and no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from freight.plan.operation import Lane, Operation

__all__ = ["Demand", "Step", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What an operation asks of its lane: seconds when nothing else works, and the size (rows,
    bytes of a request) that says how much others slow it down."""

    seconds: float
    size: float = 1.0


class Step(NamedTuple):
    """An operation with its time."""

    operation: Operation
    start_s: float
    end_s: float


_new: Final = tuple.__new__
"""A named tuple's own constructor is a function more, for each operation."""

Share = Callable[[Lane, frozenset[Lane], float], float]
"""The share of its speed that a lane keeps beside others, by the size of what it does."""


def simulate(
    operations: Iterable[Operation],
    demand: Callable[[Operation], Demand],
    *,
    overlap: bool,
    is_inline: bool,
    share: Share | None = None,
) -> Iterator[Step]:
    """Run ``operations``; those of each lane end in order. Without ``overlap`` one follows the
    other; ``is_inline`` where the thread that computes also issues. The stream must be legal:
    otherwise it would wait for ever."""
    if share is None:
        return _in_order(operations, demand, overlap=overlap, is_inline=is_inline)
    clock = _Clock(share=share)
    before: Operation | None = None
    computed: Operation | None = None
    for operation in operations:
        waits = dict(operation.after)
        for other in (None if overlap else before, computed if is_inline else None):
            if other is not None and other.lane is not operation.lane:
                waits[other.lane] = max(waits.get(other.lane, -1), other.index)
        clock.add(operation, waits, demand(operation))
        before = operation
        if operation.lane is Lane.COMPUTE:
            computed = operation
    return clock.run()


def _in_order(
    operations: Iterable[Operation],
    demand: Callable[[Operation], Demand],
    *,
    overlap: bool,
    is_inline: bool,
) -> Iterator[Step]:
    """Where nothing slows anything down an operation's time follows from those before it."""
    ends: dict[int, float] = {}
    free = dict.fromkeys(Lane, 0.0)
    before_s = 0.0
    for operation in operations:
        start_s = free[operation.lane] if overlap else before_s
        if is_inline:
            start_s = max(start_s, free[Lane.COMPUTE])
        for _, index in operation.after:
            assert index in ends, "operations wait for each other"
            if ends[index] > start_s:
                start_s = ends[index]
        before_s = start_s + demand(operation).seconds
        ends[operation.index] = free[operation.lane] = before_s
        yield _new(Step, (operation, start_s, before_s))


@dataclass(kw_only=True, slots=True)
class _Active:
    """An operation at work: ``left_s`` of its own seconds remain."""

    operation: Operation
    start_s: float
    left_s: float
    size: float
    speed: float = 1.0


@dataclass(kw_only=True, slots=True)
class _Clock:
    share: Share
    queues: dict[Lane, deque[tuple[Operation, Mapping[Lane, int], Demand]]] = field(
        default_factory=dict
    )
    active: dict[Lane, _Active] = field(default_factory=dict)
    done: dict[Lane, int] = field(default_factory=dict)
    now_s: float = 0.0

    def add(self, operation: Operation, waits: Mapping[Lane, int], demand: Demand) -> None:
        self.queues.setdefault(operation.lane, deque()).append((operation, waits, demand))

    def run(self) -> Iterator[Step]:
        while True:
            if self._start() or not self.active:
                if not self.active:
                    assert not any(self.queues.values()), "operations wait for each other"
                    return
                self._set_speeds()
            passed_s = min(own.left_s / own.speed for own in self.active.values())
            self.now_s += passed_s
            ended = []
            for lane, own in self.active.items():
                own.left_s -= passed_s * own.speed
                if own.left_s <= 1e-12:
                    ended.append(lane)
            for lane in ended:
                own = self.active.pop(lane)
                self.done[lane] = own.operation.index
                yield Step(own.operation, own.start_s, self.now_s)
            self._set_speeds()

    def _start(self) -> bool:
        """Begin what can begin; whether anything did."""
        started = False
        for lane, queue in self.queues.items():
            if lane in self.active or not queue:
                continue
            operation, waits, demand = queue[0]
            for other, index in waits.items():
                if self.done.get(other, -1) < index:
                    break
            else:
                queue.popleft()
                self.active[lane] = _Active(
                    operation=operation,
                    start_s=self.now_s,
                    left_s=demand.seconds,
                    size=demand.size,
                )
                started = True
        return started

    def _set_speeds(self) -> None:
        working = frozenset(self.active)
        for lane, own in self.active.items():
            own.speed = self.share(lane, working - {lane}, own.size)
