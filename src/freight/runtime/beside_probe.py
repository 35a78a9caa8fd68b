"""Measures products and a disk's reads beside each other, its reads beside its writes, and products
that follow a wait for it: what each keeps of its speed.

Knows neither a unit nor how a machine is put together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Final, Protocol

from freight.hardware.curve import Curve
from freight.hardware.machine import Beside
from freight.runtime.disk_probe import DiskProbe, Moved, total
from freight.runtime.processor_probe import LEAST_S

__all__ = ["BothWays", "Pair", "measure_both_ways", "measure_pairs", "of_both_ways", "what_is_left"]

_ROWS: Final = (16, 64, 512, 2048)
_SHORT: Final = (16, 64)
_TRIED_S: Final = 0.25
_TURNS: Final = 3
"""Alone and beside in turn: a shared machine may be half as fast again a second later."""
_WAIT_S: Final = 0.01
"""As some pieces of weights take to be read: where the threads that multiply have slept for so long
they may share a processor for the next few milliseconds."""
_REST_S: Final = 0.2
"""After which the system no longer takes them for busy, as it does right after a long product."""


class _Timed(Protocol):
    """The seconds of a product of so many rows, tried for so long, each time after a pause."""

    def __call__(
        self, rows: int, least_s: float, pause_s: float = ..., *, least_tries: int = ...
    ) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Seconds of a product and reads, each alone and beside the other; and of one that follows a
    wait, where it is short."""

    product_s: float
    after_wait_s: float | None
    beside_s: float
    read: Moved
    read_beside: Moved


@dataclass(frozen=True, kw_only=True, slots=True)
class BothWays:
    """What two links moved, each alone and beside the other."""

    names: tuple[str, str]
    alone: tuple[Moved, Moved]
    beside: tuple[Moved, Moved]


def measure_both_ways(disk: DiskProbe) -> BothWays:
    """A disk's reads and writes."""
    alone = disk.read_some(), disk.write_some()
    stop = Event()
    with ThreadPoolExecutor(2) as pool:
        moving = pool.submit(disk.read_until, stop), pool.submit(disk.write_until, stop)
        time.sleep(_TRIED_S)
        stop.set()
    reads, writes = moving
    return BothWays(
        names=("disk read", "disk write"), alone=alone, beside=(reads.result(), writes.result())
    )


def of_both_ways(rounds: Sequence[BothWays]) -> tuple[Beside, ...]:
    """The share of its speed that each of two links keeps beside the other, of all rounds."""
    first, second = rounds[0].names
    return tuple(
        Beside(
            part=part,
            other=other,
            share=_kept([own.alone[way] for own in rounds], [own.beside[way] for own in rounds]),
        )
        for way, (part, other) in enumerate(((first, second), (second, first)))
    )


def _kept(alone: Sequence[Moved], beside: Sequence[Moved]) -> Curve:
    return Curve.constant(min(1.0, total(beside).bytes_per_s / total(alone).bytes_per_s))


def measure_pairs(product_s: _Timed, disk: DiskProbe) -> list[Pair]:
    """By rows."""
    return [_measure(product_s, disk, rows) for rows in _ROWS]


def what_is_left(rounds: Sequence[Sequence[Pair]]) -> tuple[Beside, ...]:
    """The share of their speed that products keep while the disk reads and after a wait, by rows,
    and that the disk keeps while products run. Of all rounds together: where a disk is twice as
    fast in one moment as in the next, a pair by itself says nothing.

    After a wait a product takes so much longer, however long it is: of a long one the difference
    would be smaller than that between two tries.
    """
    by_rows = [*zip(_ROWS, zip(*rounds, strict=True), strict=True)]
    pairs = [pair for own in rounds for pair in own]
    later = [p.after_wait_s - p.product_s for p in pairs if p.after_wait_s is not None]
    later_s = max(0.0, statistics.mean(later))
    beside, after_wait = [], []
    for rows, own in by_rows:
        alone_s = statistics.mean(p.product_s for p in own)
        share = min(1.0, alone_s / statistics.mean(p.beside_s for p in own))
        beside.append((float(rows), share))
        after_wait.append((float(rows), alone_s / (alone_s + later_s)))
    kept = _kept([p.read for p in pairs], [p.read_beside for p in pairs])
    return (
        Beside(part="compute", other="disk read", share=Curve(points=tuple(beside))),
        Beside(part="compute", other="wait", share=Curve(points=tuple(after_wait))),
        Beside(part="disk read", other="compute", share=kept),
    )


def _measure(product_s: _Timed, disk: DiskProbe, rows: int) -> Pair:
    read = disk.read_some()
    alone_s, beside_s, beside = [], [], []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(_TURNS):
            alone_s.append(product_s(rows, _TRIED_S / _TURNS, least_tries=1))
            stop = Event()
            reading = pool.submit(disk.read_until, stop)
            beside_s.append(product_s(rows, _TRIED_S / _TURNS, least_tries=1))
            stop.set()
            beside.append(reading.result())
    after_wait_s = None
    if rows in _SHORT:
        time.sleep(_REST_S)
        after_wait_s = product_s(rows, LEAST_S, _WAIT_S)
    return Pair(
        product_s=statistics.mean(alone_s),
        after_wait_s=after_wait_s,
        beside_s=statistics.mean(beside_s),
        read=read,
        read_beside=total(beside),
    )
