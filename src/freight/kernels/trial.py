"""Which of several ways to compute the same is faster on this CPU, by trying them."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

__all__ = ["best_times", "cold_rows"]

_MATRICES: Final = 4


def best_times(ways: Sequence[Callable[[int], object]], tries: int) -> list[float]:
    """The best of each in seconds, told the number of the try. In turn and on one thread: threads
    of a busy machine wait for each other longer than they compute."""
    best = [float("inf")] * len(ways)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(tries):
            for number, way in enumerate(ways):
                started_s = time.perf_counter()
                way(turn + number)
                best[number] = min(best[number], time.perf_counter() - started_s)
    finally:
        torch.set_num_threads(num_threads)
    return best


def cold_rows(rows: int, columns: int, kept: torch.dtype) -> list[torch.Tensor]:
    """Matrices of ones, together more than caches hold, as those of a model are. An allocator might
    keep their memory; a map of its own ends with them."""
    shape = _MATRICES, rows, columns
    room = mmap.mmap(-1, math.prod(shape) * kept.itemsize)
    return list(torch.frombuffer(room, dtype=kept).view(shape).fill_(1.0))
