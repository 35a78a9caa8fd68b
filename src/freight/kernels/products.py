"""Products of tokens and rows of plain numbers: by torch, or in float32 on a CPU by loops of our
own where these are faster.

Rows may be narrower than the tokens: bfloat16 or float16 rows meet float32 tokens as the numbers
that they are, which float32 has all of. So what a file keeps in 16 bits stays so in memory on a CPU
that is slow at products of such numbers, and is widened where it is used. Knows no model.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.threads import Loops, as_words, find_loops, has_words, share
from freight.model.number_format import TILE_ROWS

__all__ = ["loops_are_faster", "multiply", "multiply_by_torch", "scratch_values"]

_FEW_TOKENS: Final = 8
_LEAST_PRODUCTS: Final = 1 << 21
"""Of numbers, in a product that is worth calling threads for."""
_MOST_TOKENS: Final = TILE_ROWS
"""Tokens that are laid in tiles at once: a cache holds what a panel of rows meets."""
_TILE: Final = 16
_LEAST_SHARED: Final = 1 << 23
_LEAST_SHARED_OF_FEW: Final = 1 << 22
"""Products of numbers in a share: waking a thread takes as long as some millions of them."""
_TURNS: Final = 4

_TRIES: Final = 3
_PROBE_TOKENS: Final = 16
_PROBE_ROWS: Final = 2048
_PROBE_COLUMNS: Final = 2048
_PROBE_MATRICES: Final = 3
_TIMES_FASTER: Final = 1.2


def scratch_values(columns: int) -> int:
    """How many float32 numbers ``multiply`` may want as scratch for rows of so many columns."""
    return TILE_ROWS * columns


def multiply(
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scratch: Callable[[int], torch.Tensor],
    *,
    adds: bool,
) -> None:
    """out [T, rows] = x [T, columns] times the rows [rows, columns], plus the bias, or out += that
    where it ``adds``.

    x and out are of one type, rows of that or of a narrower one. ``scratch`` is asked once for some
    numbers of x's type, ``scratch_values`` at most, which are free again after the call.
    """
    loops = find_loops() if _is_for_loops(x, rows, out) else None
    if loops is not None and loops_are_faster():
        _by_loops(loops, x, rows, bias, out, scratch, adds=adds)
        return
    for first, some in _widened(rows, x.dtype, scratch):
        last = first + some.shape[0]
        own_bias = None if bias is None else bias[first:last]
        multiply_by_torch(x, some, own_bias, out[:, first:last], adds=adds)


def _widened(
    rows: torch.Tensor, dtype: torch.dtype, scratch: Callable[[int], torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) in ``dtype``, of narrower ones a tile at a time."""
    if rows.dtype == dtype:
        yield 0, rows
        return
    tile = scratch(min(TILE_ROWS, rows.shape[0]) * rows.shape[1]).view(-1, rows.shape[1])
    for first in range(0, rows.shape[0], TILE_ROWS):
        some = rows[first : first + TILE_ROWS]
        yield first, tile[: len(some)].copy_(some)


def multiply_by_torch(
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool,
) -> None:
    """As ``multiply``, of one type."""
    if adds:
        torch.addmm(out, x, rows.t(), out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, x, rows.t(), out=out)
    else:
        torch.mm(x, rows.t(), out=out)


# -- loops of our own -----------------------------------------------------------------------------


def _is_for_loops(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the loops can take it, and it is worth it."""
    return (
        x.dtype is torch.float32
        and out.shape[0] * rows.numel() >= _LEAST_PRODUCTS
        and rows.shape[1] % _TILE == 0
        and rows.is_contiguous()
        and has_words(x)
        and has_words(out)
    )


def _by_loops(
    loops: Loops,
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scratch: Callable[[int], torch.Tensor],
    *,
    adds: bool,
) -> None:
    own, target, pitch = _numbers(rows), as_words(out).view(np.float32), out.stride(0)
    added = np.empty(0, np.float32) if bias is None else bias.numpy()
    num_rows = rows.shape[0]
    if x.shape[0] <= _FEW_TOKENS:
        flat = x.reshape(-1).numpy()

        def few(first: int, last: int) -> None:
            loops.products.few_tokens(own[first:last], flat, added, adds, target, pitch, first)

        least = -(-_LEAST_SHARED_OF_FEW // x.numel())
        share(np.ones(num_rows, np.int64), few, least, turns=_TURNS)
        return
    height = loops.products.PANEL_ROWS
    num_tiles = -(-min(x.shape[0], _MOST_TOKENS) // _TILE)
    tiles: npt.NDArray[np.float32] = scratch(num_tiles * _TILE * rows.shape[1]).numpy()

    def many(begin: int) -> None:
        some, own_target = x[begin : begin + _MOST_TOKENS], target[begin * pitch :]
        count = some.shape[0]
        _lay_in_tiles(loops, some, tiles)

        def panels(first: int, last: int) -> None:
            top, bottom = height * first, height * last
            loops.products.many_tokens(
                own[top:bottom], tiles, count, added, adds, own_target, pitch, top
            )

        least = -(-_LEAST_SHARED // (height * rows.shape[1] * count))
        share(np.ones(-(-num_rows // height), np.int64), panels, least, turns=_TURNS)

    for begin in range(0, x.shape[0], _MOST_TOKENS):
        many(begin)


def _lay_in_tiles(loops: Loops, x: torch.Tensor, tiles: npt.NDArray[np.float32]) -> None:
    """Tokens sixteen side by side."""
    tokens, columns = x.shape
    source, pitch = as_words(x).view(np.float32), x.stride(0)

    def lay(first: int, last: int) -> None:
        loops.products.lay_in_tiles(source, pitch, columns, tokens, first, last, tiles)

    share(np.ones(-(-tokens // _TILE), np.int64), lay, 1)


def _numbers(rows: torch.Tensor) -> np.ndarray:
    """As the loops tell types apart."""
    if rows.dtype is torch.bfloat16:
        return rows.view(torch.int16).numpy().view(np.uint16)
    return (rows.view(torch.int16) if rows.dtype is torch.float16 else rows).numpy()


@cache
def loops_are_faster() -> bool:
    """Whether this CPU multiplies float32 numbers faster by our loops than by torch: tried on one
    thread, as threads of a busy machine wait for each other longer than they multiply, and with
    rows that no cache holds, as those of a model are."""
    loops = find_loops()
    if loops is None:
        return False
    tokens, columns = _PROBE_TOKENS, _PROBE_COLUMNS
    x, scratch = torch.rand(tokens, columns), torch.empty(tokens * columns)
    out = torch.empty(tokens, _PROBE_ROWS)

    def by_loops(rows: torch.Tensor) -> None:
        _by_loops(loops, x, rows, None, out, lambda size: scratch[:size], adds=False)

    def by_torch(rows: torch.Tensor) -> None:
        multiply_by_torch(x, rows, None, out, adds=False)

    best = [float("inf")] * 2
    matrices = _cold_rows()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(_TRIES * len(matrices)):
            for number, way in enumerate((by_loops, by_torch)):
                started_s = time.perf_counter()
                way(matrices[(turn + number) % len(matrices)])
                best[number] = min(best[number], time.perf_counter() - started_s)
    finally:
        torch.set_num_threads(num_threads)
    return best[0] * _TIMES_FASTER < best[1]


def _cold_rows() -> list[torch.Tensor]:
    """Matrices, together more than caches hold. An allocator might keep their memory; a map of its
    own ends with them."""
    shape = _PROBE_MATRICES, _PROBE_ROWS, _PROBE_COLUMNS
    numbers = np.frombuffer(mmap.mmap(-1, math.prod(shape) * 4), np.float32).reshape(shape)
    numbers.fill(1.0)
    return list(torch.from_numpy(numbers))
