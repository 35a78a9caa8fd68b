"""Compiled loops of the CPU on threads of our own, where numba can be had.

Rows are shared out over the threads; the loops hold no lock of the interpreter. Numba's own threads
would not do: lanes call in side by side. It takes a second to load and is loaded when it is first
wanted; where it is not installed, or fails, the caller uses the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from freight.model.number_format import Grouped

__all__ = ["dequantise_on_cpu", "product_on_cpu", "warm_up"]

_LEAST_ROWS = 16


@cache
def _loops() -> Any | None:
    try:
        from freight.kernels import loops
    except ImportError:
        return None
    return loops


def warm_up() -> None:
    """Load and compile what will be needed: it takes seconds, and 130 MiB."""
    number_format = Grouped(bits=4, group_size=64)
    for dtype in (torch.bfloat16, torch.float32):
        raw = torch.zeros(1, number_format.row_bytes(64), dtype=torch.uint8)
        dequantise_on_cpu(raw, 64, number_format, torch.empty(1, 64, dtype=dtype))
    product_on_cpu(raw, number_format, torch.zeros(1, 64))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="kernel")


def product_on_cpu(
    raw: torch.Tensor, number_format: Grouped, x: torch.Tensor
) -> torch.Tensor | None:
    """x [tokens, columns] times the rows of raw, in float32 [tokens, rows]; None where there is no
    such loop."""
    loops, source, numbers = _loops(), raw.numpy(), _numbers(raw, number_format)
    if loops is None or numbers is None:
        return None
    wide = x.float().contiguous().numpy()
    out = torch.empty(raw.shape[0], x.shape[0])
    target = out.numpy()
    size, bits = number_format.group_size, number_format.bits

    def work(first: int, last: int) -> None:
        own = slice(first, last)
        loops.product(source[own], numbers[own], size, bits, wide, target[own])

    _share(raw.shape[0], work)
    return out.t()


def _numbers(raw: torch.Tensor, number_format: Grouped) -> npt.NDArray[Any] | None:
    """The rows as whole numbers as wide as a scale; None where they do not lie as loops want."""
    source, size = raw.numpy(), number_format.factor_bytes
    if not source.flags.c_contiguous or source.ctypes.data % size or source.shape[1] % size:
        return None
    return source.view(np.uint32 if number_format.wide else np.uint16)


def _share(count: int, work: Callable[[int, int], None]) -> None:
    """Call ``work`` for ranges of rows that make up ``count``, one for each core."""
    shares = max(1, min(torch.get_num_threads(), count // _LEAST_ROWS))
    borders = [count * number // shares for number in range(shares + 1)]
    others = [_pool().submit(work, borders[n], borders[n + 1]) for n in range(1, shares)]
    work(borders[0], borders[1])
    wait(others)
    for other in others:
        other.result()


def dequantise_on_cpu(
    raw: torch.Tensor, columns: int, number_format: Grouped, out: torch.Tensor
) -> bool:
    """raw uint8 [rows, row bytes] to out [rows, columns]; False where there is no such loop."""
    loops = _loops()
    if loops is None or not out.is_contiguous():
        return False
    if out.dtype is torch.bfloat16:
        target, is_wide = out.view(torch.int16).numpy().view(np.uint16), False
    elif out.dtype is torch.float32:
        target, is_wide = out.numpy(), True
    else:
        return False
    source, numbers = raw.numpy(), _numbers(raw, number_format)
    if numbers is None:
        return False
    loop = loops.to_float32 if is_wide else loops.to_bfloat16
    size, bits = number_format.group_size, number_format.bits

    def work(first: int, last: int) -> None:
        own = slice(first, last)
        loop(source[own], numbers[own], size, bits, target[own])

    _share(raw.shape[0], work)
    return True
