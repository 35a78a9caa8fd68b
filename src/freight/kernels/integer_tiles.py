"""Products of 8-bit integers by loops of our own, where the processor multiplies such numbers in
registers of sixteen by sixteen."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import torch

from freight.kernels import threads
from freight.kernels.product import LEAST_SHARED
from freight.kernels.row_kinds import FourRows
from freight.kernels.sharing import together
from freight.kernels.sums import ADDS, PUTS
from freight.kernels.threads import as_numbers, has_words
from freight.model.number_format import LAID_TOKENS
from freight.quantities import align_up

__all__ = ["multiply_in_tiles"]

_TILE: Final = 16
_ALIKE: Final = 2 * _TILE
"""Tokens that are multiplied at once: parts are whole ones but for the last."""
_FEWEST_TOKENS: Final = 8
"""Fewer leave most of a register empty."""
_COUNTERS: Final = 4
_NUMBER: Final = 3
"""Of tiles that are taken, tiles that are laid, and rows that are done; the last one is of rows
that are taken."""


def multiply_in_tiles(
    codes: torch.Tensor,
    scales: torch.Tensor,
    raw: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    room: torch.Tensor,
    *,
    adds: bool,
) -> bool:
    """out [T, rows] = tokens (codes [T, columns] with scales [T]) times the rows of raw uint8
    [rows, columns + 4], plus the bias, or out += that where it ``adds``; False, and nothing is
    done, where there is no such loop, or ``room``, words of scratch, is too small."""
    loops = threads.find_loops()
    tokens, columns = codes.shape
    most = 4 * room.numel() // columns // _TILE * _TILE
    if loops is None or loops.tiles is None or min(tokens, most) < _FEWEST_TOKENS:
        return False
    if not (loops.tiles.HAS_INTEGERS and _can_take(codes, raw, out)):
        return False
    own_loops = loops.tile_blocks
    if min(tokens, most) < own_loops.FEWEST_TOKENS_OF_INTEGERS:
        own_loops, most = loops.tiles, min(most, LAID_TOKENS)
    alike = _ALIKE if most >= _ALIKE else _TILE
    parts = -(-tokens // (most // alike * alike)) if tokens > most else 1
    borders = [align_up(tokens * part // parts, alike) for part in range(parts)] + [tokens]
    wide: Any = np.empty(0, np.float32) if bias is None else bias.float().numpy()
    flat = raw.numpy().reshape(-1).view(np.uint32)
    for first, last in itertools.pairwise(borders):
        own = slice(first, last)
        results = wide, ADDS if adds else PUTS, as_numbers(out[own]), out.stride(0)
        pitch = raw.shape[1] // 4
        _multiply_part(own_loops, loops, codes[own], scales[own], flat, pitch, room, results)
    return True


def _can_take(codes: torch.Tensor, raw: torch.Tensor, out: torch.Tensor) -> bool:
    """Fours in whole registers, that begin where words do."""
    return (
        codes.shape[1] % (4 * _TILE) == 0
        and codes.is_contiguous()
        and codes.data_ptr() % 4 == 0
        and raw.is_contiguous()
        and raw.data_ptr() % 4 == 0
        and has_words(out)
    )


def _multiply_part(
    own_loops: Any,
    loops: Any,
    codes: torch.Tensor,
    scales: torch.Tensor,
    flat: np.ndarray,
    pitch: int,
    room: torch.Tensor,
    results: tuple[Any, ...],
) -> None:
    """``flat`` are the rows' words, ``pitch`` of each."""
    tokens, columns = codes.shape[0], codes.shape[1] // 4
    source = codes.numpy().reshape(-1).view(np.float32)
    padded = np.zeros(align_up(tokens, _TILE), np.float32)
    padded[:tokens] = scales.numpy()
    tiles = room[: len(padded) * columns].numpy().view(np.uint32)
    laid = tiles.view(np.float32)
    rows = FourRows(flat, pitch, columns, flat.view(np.float32), padded)
    count = len(flat) // pitch
    length, cores = own_loops.columns_together(columns, tokens), torch.get_num_threads()
    turn = own_loops.rows_of_a_turn(count, columns, length, cores)
    counters = np.zeros(_COUNTERS, np.int64)

    def work() -> None:
        loops.pairs.lay_in_turns(counters, source, columns, columns, tokens, length, laid)
        given = rows, tiles, tokens, length, *results
        gates = (rows, results[0], False) if own_loops is loops.tile_blocks else ()
        own_loops.many_in_turns(counters, _NUMBER, turn, *given, *gates)

    together(work, max(1, codes.numel() * count // LEAST_SHARED))
