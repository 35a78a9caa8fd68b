"""Measures products and a disk's reads beside each other: what each keeps of its speed.

Knows neither a unit nor how a machine is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Final

from freight.hardware.curve import Curve
from freight.hardware.machine import Beside
from freight.runtime.disk_probe import DiskProbe, Moved, total
from freight.runtime.processor_probe import LEAST_S

__all__ = ["Pair", "measure_pairs", "what_is_left"]

_ROWS: Final = (16, 64, 512, 2048)
_BESIDE_S: Final = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Seconds of a product and reads, each alone and beside the other."""

    product_s: float
    beside_s: float
    read: Moved
    read_beside: Moved


def measure_pairs(product_s: Callable[[int, float], float], disk: DiskProbe) -> list[Pair]:
    """By rows; ``product_s`` tells the seconds of a product of so many, tried for so long."""
    return [_measure(product_s, disk, rows) for rows in _ROWS]


def what_is_left(rounds: Sequence[Sequence[Pair]]) -> tuple[Beside, Beside]:
    """The share of their speed that products keep while the disk reads, by rows, and that the disk
    keeps while products run. Of all rounds together: where a disk is twice as fast in one moment
    as in the next, a pair by itself says nothing."""
    points = [
        (float(rows), min(1.0, sum(p.product_s for p in own) / sum(p.beside_s for p in own)))
        for rows, own in zip(_ROWS, zip(*rounds, strict=True), strict=True)
    ]
    pairs = [pair for own in rounds for pair in own]
    alone, beside = total([p.read for p in pairs]), total([p.read_beside for p in pairs])
    kept = min(1.0, beside.bytes_per_s / alone.bytes_per_s)
    return (
        Beside(part="compute", other="disk read", share=Curve(points=tuple(points))),
        Beside(part="disk read", other="compute", share=Curve.constant(kept)),
    )


def _measure(product_s: Callable[[int, float], float], disk: DiskProbe, rows: int) -> Pair:
    alone_s = product_s(rows, LEAST_S)
    read = disk.read_some()
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(disk.read_until, stop)
        beside_s = product_s(rows, _BESIDE_S)
        stop.set()
    return Pair(product_s=alone_s, beside_s=beside_s, read=read, read_beside=reading.result())
