"""Measures products and a disk's reads beside each other, and products that follow a wait for it:
what each keeps of its speed.

Knows neither a unit nor how a machine is put together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Final, Protocol

from freight.hardware.curve import Curve
from freight.hardware.machine import Beside
from freight.runtime.disk_probe import DiskProbe, Moved, total
from freight.runtime.processor_probe import LEAST_S

__all__ = ["Pair", "measure_pairs", "what_is_left"]

_ROWS: Final = (16, 64, 512, 2048)
_TRIED_S: Final = 0.25
_WAIT_S: Final = 0.01
"""As some pieces of weights take to be read: where the threads that multiply have slept for so long
they may share a processor for the next few milliseconds."""
_REST_S: Final = 0.2
"""After which the system no longer takes them for busy, as it does right after a long product."""


class _Timed(Protocol):
    """The seconds of a product of so many rows, tried for so long, each time after a pause."""

    def __call__(self, rows: int, least_s: float, pause_s: float = 0.0, /) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Seconds of a product and reads, each alone and beside the other, and of a product that
    follows a wait."""

    product_s: float
    after_wait_s: float
    beside_s: float
    read: Moved
    read_beside: Moved


def measure_pairs(product_s: _Timed, disk: DiskProbe) -> list[Pair]:
    """By rows."""
    return [_measure(product_s, disk, rows) for rows in _ROWS]


def what_is_left(rounds: Sequence[Sequence[Pair]]) -> tuple[Beside, ...]:
    """The share of their speed that products keep while the disk reads and after a wait, by rows,
    and that the disk keeps while products run. Of all rounds together: where a disk is twice as
    fast in one moment as in the next, a pair by itself says nothing."""
    by_rows = [*zip(_ROWS, zip(*rounds, strict=True), strict=True)]
    beside = [
        (float(rows), _share((p.product_s for p in own), (p.beside_s for p in own)))
        for rows, own in by_rows
    ]
    after_wait = [
        (float(rows), _share((p.product_s for p in own), (p.after_wait_s for p in own)))
        for rows, own in by_rows
    ]
    pairs = [pair for own in rounds for pair in own]
    alone, other = total([p.read for p in pairs]), total([p.read_beside for p in pairs])
    kept = min(1.0, other.bytes_per_s / alone.bytes_per_s)
    return (
        Beside(part="compute", other="disk read", share=Curve(points=tuple(beside))),
        Beside(part="compute", other="wait", share=Curve(points=tuple(after_wait))),
        Beside(part="disk read", other="compute", share=Curve.constant(kept)),
    )


def _share(alone_s: Iterable[float], slower_s: Iterable[float]) -> float:
    return min(1.0, sum(alone_s) / sum(slower_s))


def _measure(product_s: _Timed, disk: DiskProbe, rows: int) -> Pair:
    alone_s = product_s(rows, _TRIED_S)
    time.sleep(_REST_S)
    after_wait_s = product_s(rows, LEAST_S, _WAIT_S)
    read = disk.read_some()
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(disk.read_until, stop)
        beside_s = product_s(rows, _TRIED_S)
        stop.set()
    return Pair(
        product_s=alone_s,
        after_wait_s=after_wait_s,
        beside_s=beside_s,
        read=read,
        read_beside=reading.result(),
    )
