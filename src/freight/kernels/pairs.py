"""Products of bfloat16 tokens and rows by loops of our own, where the processor multiplies pairs of
such numbers at once and these are faster than torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import numpy as np
import torch

from freight.kernels.product import LEAST_SHARED, LEAST_SHARED_OF_FEW, Product, Target
from freight.kernels.threads import Loops, as_words, find_loops, has_words, together
from freight.kernels.trial import best_times, cold_rows

__all__ = ["are_pairs", "multiply_pairs", "pairs_are_faster"]

_MOST_TOKENS: Final = 128
"""With more, torch is as fast."""
_TILE: Final = 16
_COUNTERS_OF_TILES: Final = 2

_TRIES: Final = 12
_PROBE_ROWS: Final = 2046
_PROBE_COLUMNS: Final = 2048
_PROBE_TOKENS: Final = (8, 64)
"""Of few and of more."""


def are_pairs(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether they are what the loops take: neighbours that are whole vectors of pairs."""
    return (
        x.dtype is torch.bfloat16
        and x.shape[1] % (2 * _TILE) == 0
        and _lies_in_pairs(x)
        and all(_takes(own) for own in products)
    )


def _takes(product: Product) -> bool:
    rows = product.rows
    return (
        isinstance(rows, torch.Tensor)
        and rows.dtype is torch.bfloat16
        and rows.is_contiguous()
        and _lies_in_pairs(rows)
        and has_words(product.out)
    )


def _lies_in_pairs(x: torch.Tensor) -> bool:
    return has_words(x) and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0


def multiply_pairs(
    x: torch.Tensor, products: Sequence[Product], scratch: Callable[[int], torch.Tensor]
) -> None:
    """As ``multiply`` of those that are pairs."""
    loops, columns = find_loops(), x.shape[1]
    assert loops is not None
    targets = []
    for own in products:
        assert isinstance(own.rows, torch.Tensor)
        targets.append(Target(own, 1, (as_words(own.rows).view(np.uint32), columns // 2)))
    num_rows = sum(own.count for own in targets)
    if x.shape[0] <= loops.pairs.FEW_TOKENS:
        shares = x.numel() * num_rows // LEAST_SHARED_OF_FEW
        _multiply_few(loops, x, targets, shares)
    else:
        room = scratch(-(-x.shape[0] // _TILE) * _TILE * columns)
        shares = x.numel() * num_rows // LEAST_SHARED
        _multiply_many(loops, x, targets, as_words(room[None]).view(np.uint32), shares)


def _multiply_few(loops: Loops, x: torch.Tensor, targets: Sequence[Target], shares: int) -> None:
    pairs = as_words(x.contiguous()).view(np.uint32)
    counters = np.zeros(len(targets), np.int64)

    def work() -> None:
        for number, own in enumerate(targets):
            loops.pairs.few_in_turns(counters, number, own.rows, pairs, *own.results)

    together(work, max(1, shares))


def _multiply_many(
    loops: Loops, x: torch.Tensor, targets: Sequence[Target], tiles: np.ndarray, shares: int
) -> None:
    """Tokens are laid sixteen side by side first."""
    tokens, columns, pitch = x.shape[0], x.shape[1] // 2, x.stride(0) // 2
    source, laid = as_words(x).view(np.float32), tiles.view(np.float32)
    length = _evenly(columns, loops.pairs.MOST_COLUMNS)
    counters = np.zeros(_COUNTERS_OF_TILES + len(targets), np.int64)

    def work() -> None:
        loops.pairs.lay_in_turns(counters, source, pitch, columns, tokens, length, laid)
        for number, own in enumerate(targets, _COUNTERS_OF_TILES):
            loops.pairs.many_in_turns(
                counters, number, own.rows, tiles, tokens, length, *own.results
            )

    together(work, max(1, shares))


def _evenly(count: int, most: int) -> int:
    """As few parts as there can be, of whole vectors and about the same size."""
    return -(-count // (-(-count // most) * _TILE)) * _TILE


def pairs_are_faster(tokens: int) -> bool:
    """Whether so many tokens are multiplied faster by the loops than by torch."""
    loops = find_loops()
    if loops is None or loops.pairs is None or tokens > _MOST_TOKENS:
        return False
    return _are_faster(_PROBE_TOKENS[tokens > loops.pairs.FEW_TOKENS])


@cache
def _are_faster(tokens: int) -> bool:
    """Tried with rows that no cache holds."""
    matrices = cold_rows(_PROBE_ROWS, _PROBE_COLUMNS, torch.bfloat16)
    x = torch.ones(tokens, _PROBE_COLUMNS, dtype=torch.bfloat16)
    out = torch.empty(tokens, _PROBE_ROWS, dtype=torch.bfloat16)
    room = torch.empty((tokens + _TILE) * _PROBE_COLUMNS, dtype=torch.bfloat16)

    def by_loops(turn: int) -> None:
        product = Product(rows=matrices[turn % len(matrices)], out=out)
        multiply_pairs(x, [product], lambda count: room[:count])

    def by_torch(turn: int) -> None:
        torch.mm(x, matrices[turn % len(matrices)].t(), out=out)

    own, other = best_times((by_loops, by_torch), _TRIES)
    return own <= other
