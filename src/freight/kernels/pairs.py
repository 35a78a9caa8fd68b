"""Products of bfloat16 tokens and rows by loops of our own, where the processor multiplies pairs of
such numbers at once, in vectors or in registers of sixteen by sixteen, and these are faster than
torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from freight.kernels.few_pairs import (
    SeveralRows,
    are_plain_pairs,
    gate_neighbours,
    lies_in_pairs,
    most_few_codes,
    multiply_few,
    product_table,
    wide_biases,
    worth_shares,
)
from freight.kernels.grouped import CompressedRows
from freight.kernels.plain_rows import eight_rows, level_rows, micro_rows
from freight.kernels.product import (
    LEAST_PRODUCTS,
    LEAST_SHARED,
    Product,
    Target,
)
from freight.kernels.row_kinds import PairRows
from freight.kernels.sharing import take_turns, team_threads, together
from freight.kernels.sums import GATES, PUTS
from freight.kernels.threads import Loops, as_words, exponent_rows, find_loops, has_words, pair_rows
from freight.kernels.trial import best_times, cold_rows
from freight.model.number_format import EightFloats, Grouped, LevelFloats, MicroFloats
from freight.model.tiles import laid_tokens
from freight.quantities import align_up

__all__ = [
    "most_of_each",
    "most_one_by_one",
    "multiply_pairs",
    "multiply_plain_pairs",
    "pairs_are_always_better",
    "pairs_are_better",
    "plain_pairs_are_better",
]

_TILE: Final = 16
_COUNTERS: Final = 3
"""Of tiles that are taken, tiles that are laid, and rows that are multiplied; those of rows that
are taken follow, one for each product."""
_ROWS_DONE: Final = 2

_TRIES: Final = 12
_PROBE_ROWS: Final = 2046
_PROBE_COLUMNS: Final = 2048
_FEWEST_TOKENS: Final = 4
_MANY_TOKENS: Final = 257
_PROBE_TOKENS: Final = (2, 8, 64, 512)
"""Of the fewest, of few, of more, and of many."""
_TIMES_SLOWER: Final = 1.2
"""That the loops may be: torch takes memory for a copy of the rows, and for each number of tokens
makes code, mostly in the time of several such products, and keeps the last few."""


def pairs_are_better(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether the loops take these, and multiply so many tokens about as fast as torch, or faster.
    Few tokens had better multiply codes as they are."""
    loops = find_loops()
    if loops is None or loops.pairs is None:
        return False
    tokens, own = x.shape[0], _loops_of_many(loops)
    fewest = own.FEW_TOKENS_OF_CODES + 1 if all(each.is_in_groups for each in products) else 1
    has_plain = any(map(_is_plain, products))
    return (
        (fewest <= tokens <= own.MOST_TOKENS or _are_for_blocks(loops, tokens, has_plain=has_plain))
        and _are_pairs(x, products)
        and _are_faster(tokens, has_plain=has_plain)
    )


def plain_pairs_are_better(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """The same of more than a few tokens and of rows that are all plain, in as few steps as there
    can be: all cores but one wait for them, each time. False where registers are of sixteen by
    sixteen, which have loops of their own."""
    if x.dtype is not torch.bfloat16 or x.device.type != "cpu" or not products:
        return False
    loops, (tokens, columns), (pitch, step) = find_loops(), x.shape, x.stride()
    if loops is None or loops.pairs is None or _loops_of_many(loops) is not loops.pairs:
        return False
    if tokens <= loops.few_pairs.FEW_TOKENS or step != 1 or columns % (2 * _TILE):
        return False
    if pitch % 2 or x.data_ptr() % 4:
        return False
    count = 0
    for own in products:
        rows = own.rows
        if not isinstance(rows, torch.Tensor) or rows.dtype is not torch.bfloat16:
            return False
        if not rows.is_contiguous() or rows.data_ptr() % 4 or own.out.stride(1) != 1:
            return False
        count += rows.shape[0]
    return tokens * columns * count >= LEAST_PRODUCTS and _are_faster(tokens, has_plain=True)


def pairs_are_always_better(columns: Collection[int]) -> bool:
    """Whether these loops multiply plain rows of so many columns by any number of tokens, so that
    torch keeps no code for each."""
    loops = find_loops()
    if loops is None or loops.pairs is None:
        return False
    return all(own % (2 * _TILE) == 0 for own in columns) and all(
        _are_faster(tokens, has_plain=True) for tokens in _PROBE_TOKENS
    )


def _are_for_blocks(loops: Loops, tokens: int, *, has_plain: bool) -> bool:
    """Whether there are loops that lay rows in blocks, and so many tokens are for them."""
    own = loops.tile_blocks
    if own is None:
        return False
    return bool(tokens >= (own.FEWEST_TOKENS if has_plain else own.FEWEST_TOKENS_OF_CODES))


def _is_plain(product: Product) -> bool:
    return isinstance(product.rows, torch.Tensor)


def _are_pairs(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Neighbours that are whole vectors of pairs, or what they are made of."""
    return (
        x.dtype is torch.bfloat16
        and x.shape[1] % (2 * _TILE) == 0
        and lies_in_pairs(x)
        and all(_takes(own) for own in products)
    )


def _takes(product: Product) -> bool:
    if not has_words(product.out):
        return False
    rows = product.rows
    if isinstance(rows, torch.Tensor):
        return are_plain_pairs(rows)
    return _compressed(rows) is not None


def _compressed(rows: CompressedRows) -> tuple[Any, ...] | None:
    """Such rows as the loops take them."""
    if isinstance(rows.number_format, Grouped):
        return pair_rows(rows.raw, rows.columns, rows.number_format)
    if isinstance(rows.number_format, MicroFloats):
        return micro_rows(rows.raw, rows.columns)
    if isinstance(rows.number_format, EightFloats):
        return eight_rows(rows.raw, rows.columns)
    if isinstance(rows.number_format, LevelFloats):
        return level_rows(rows.raw, rows.columns, rows.number_format)
    return exponent_rows(rows.raw, rows.columns)


def multiply_pairs(
    x: torch.Tensor, products: Sequence[Product], scratch: Callable[[int], torch.Tensor]
) -> None:
    """As ``multiply`` of those that are pairs."""
    loops = find_loops()
    assert loops is not None
    is_few = x.shape[0] <= loops.few_pairs.FEW_TOKENS and all(map(_is_plain, products))
    if is_few and gate_neighbours(products) and _one_by_one(x.shape[0]):
        multiply_few(x, products)
        return
    tokens, columns = x.shape
    in_blocks = _are_for_blocks(loops, tokens, has_plain=any(map(_is_plain, products)))
    own_loops = loops.tile_blocks if in_blocks else _loops_of_many(loops)
    most = laid_tokens(columns) if in_blocks else own_loops.MOST_TOGETHER

    def multiply_some(some: torch.Tensor, own: Sequence[Product], room: torch.Tensor) -> None:
        _multiply_many(loops, own_loops, some, own, room)

    _in_parts(most, x, products, scratch, multiply_some)


def multiply_plain_pairs(
    x: torch.Tensor, products: Sequence[Product], scratch: Callable[[int], torch.Tensor]
) -> None:
    """As ``multiply`` of more than a few tokens and plain rows that are pairs."""
    loops = find_loops()
    assert loops is not None
    _in_parts(loops.pairs.MOST_TOGETHER, x, products, scratch, _multiply_plain)


def _in_parts(
    most: int,
    x: torch.Tensor,
    products: Sequence[Product],
    scratch: Callable[[int], torch.Tensor],
    multiply: Callable[[torch.Tensor, Sequence[Product], torch.Tensor], None],
) -> None:
    """Multiply no more than so many tokens at once, all in the same room."""
    tokens, columns = x.shape
    if tokens <= most:
        multiply(x, products, scratch(_room(tokens, columns)))
        return
    # Whole pairs of tiles, but for the last ones.
    parts = -(-tokens // most)
    borders = [align_up(tokens * part // parts, 2 * _TILE) for part in range(parts)] + [tokens]
    largest = max(last - first for first, last in itertools.pairwise(borders))
    room = scratch(_room(largest, columns))
    for first, last in itertools.pairwise(borders):
        own = [replace(each, out=each.out[first:last]) for each in products]
        multiply(x[first:last], own, room)


def _room(tokens: int, columns: int) -> int:
    """Numbers of tokens in whole tiles."""
    return -(-tokens // _TILE) * _TILE * columns


def _targets(products: Sequence[Product]) -> list[Target]:
    found = []
    for own in products:
        if isinstance(own.rows, torch.Tensor):
            pairs = as_words(own.rows).view(np.uint32)
            found.append(Target(own, 1, PairRows(pairs, own.rows.shape[1] // 2)))
        else:
            rows = _compressed(own.rows)
            assert rows is not None
            found.append(Target(own, 1, rows))
    return found


def _multiply_plain(x: torch.Tensor, products: Sequence[Product], room: torch.Tensor) -> None:
    """Tokens are laid in the room first, by the same call of the loops that multiplies them."""
    loops = find_loops()
    assert loops is not None
    length, biases = (
        loops.pairs.columns_together(x.shape[1] // 2, x.shape[0]),
        wide_biases(products),
    )
    table = product_table(x, products, biases, length, room.data_ptr())
    counters = np.zeros(_COUNTERS + len(products), np.int64)
    own, shares = loops.pairs, worth_shares(x, products, LEAST_SHARED)
    take_turns(own.plain_in_turns, own.plain_together, shares, counters, table)


def _multiply_many(
    loops: Loops,
    own_loops: Any,
    x: torch.Tensor,
    products: Sequence[Product],
    room: torch.Tensor,
) -> None:
    """Tokens are laid sixteen side by side in the room first."""
    targets = _targets(products)
    tokens, columns, pitch = x.shape[0], x.shape[1] // 2, x.stride(0) // 2
    tiles = as_words(room[None, : _room(*x.shape)]).view(np.uint32)
    source = as_words(x).view(np.float32)
    laid, cores = tiles.view(np.float32), torch.get_num_threads()
    length = own_loops.columns_together(columns, tokens)
    counters = np.zeros(_COUNTERS + len(targets), np.int64)
    shares = worth_shares(x, products, LEAST_SHARED)
    threads = team_threads(shares)
    in_blocks = own_loops is loops.tile_blocks

    def multiply() -> None:
        made, number = 0, 0
        while number < len(targets):
            own, place, count = targets[number], _COUNTERS + number, targets[number].count
            gates: tuple[Any, ...] = (own.rows, own.bias, False) if in_blocks else ()
            following = targets[number + 1 : number + 2]
            if in_blocks and following and _is_gate(own, following[0]):
                gates, own = (own.rows, own.bias, True), following[0]
                count, number = count + own.count, number + 1
            elif own.adds == GATES and not threads:
                # What it gates must be there: products before this one make it.
                loops.pairs.wait_for(counters, _ROWS_DONE, made)
            given = own.rows, tiles, tokens, length, *own.results, *gates
            turn = own_loops.rows_of_a_turn(count, columns, length, cores)
            if threads:
                own_loops.many_together(threads, counters, place, turn, *given)
            else:
                own_loops.many_in_turns(counters, place, turn, *given)
            made, number = made + count, number + 1

    if threads:
        loops.pairs.lay_together(threads, counters, source, pitch, columns, tokens, length, laid)
        multiply()
        return

    def work() -> None:
        loops.pairs.lay_in_turns(counters, source, pitch, columns, tokens, length, laid)
        multiply()

    together(work, shares)


def _is_gate(own: Target, following: Target) -> bool:
    """Whether what the next one makes is kept as its share in just this one's results."""
    return (
        own.adds == PUTS
        and following.adds == GATES
        and own.count == following.count
        and own.out.ctypes.data == following.out.ctypes.data
    )


def _loops_of_many(loops: Loops) -> Any:
    """Those with the widest registers."""
    return loops.pairs if loops.tiles is None else loops.tiles


def _are_faster(tokens: int, *, has_plain: bool) -> bool:
    """Whether loops multiply plain rows and so many tokens about as fast as torch, or faster; where
    there are loops for any number of tokens, all numbers together: of one alone the trials of two
    processes are up to a third apart, and what is set aside for torch's code goes by all of them.
    Others would have to be made plain for torch first, which loops do for themselves."""
    if not has_plain:
        return True
    loops = find_loops()
    assert loops is not None
    tried = _PROBE_TOKENS if loops.tile_blocks is not None else (_probe_tokens(tokens),)
    return math.prod(map(_times_of_torch, tried)) <= _TIMES_SLOWER ** len(tried)


def _times_of_torch(tokens: int) -> float:
    """How many times as long the loops take."""
    by_torch, *by_loops = _times(tokens)
    return min(by_loops) / by_torch


def _one_by_one(tokens: int) -> bool:
    """Whether so few tokens had better meet rows one by one."""
    _, *by_loops = _times(_probe_tokens(tokens))
    return by_loops[0] == min(by_loops)


def most_one_by_one(rows: SeveralRows) -> int:
    """How many tokens of each set had better meet its rows one by one."""
    if not rows.are_plain:
        return most_few_codes()
    loops = find_loops()
    assert loops is not None
    counts = (loops.few_pairs.FEW_TOKENS, _FEWEST_TOKENS)
    return next((n for n in counts if _are_faster(n, has_plain=True) and _one_by_one(n)), 0)


def most_of_each(rows: SeveralRows) -> int:
    """How many tokens of each set more than a few had better be multiplied by one call for all sets
    as well; 0 where there is no loop."""
    loops = find_loops()
    if loops is None or not rows.are_plain or _loops_of_many(loops) is not loops.pairs:
        return 0
    own = int(loops.pairs.MOST_OF_EACH)
    return own if _are_faster(own, has_plain=True) else 0


def _probe_tokens(tokens: int) -> int:
    """How many are tried in the place of so many."""
    loops = find_loops()
    assert loops is not None
    is_more, is_many = tokens > loops.few_pairs.FEW_TOKENS, tokens >= _MANY_TOKENS
    return _PROBE_TOKENS[(tokens > _FEWEST_TOKENS) + is_more + is_many]


@cache
def _times(tokens: int) -> tuple[float, ...]:
    """Seconds by torch and by the loops, for few tokens by those for few and those for many; tried
    with rows that no cache holds."""
    loops = find_loops()
    assert loops is not None
    matrices = cold_rows(_PROBE_ROWS, _PROBE_COLUMNS, torch.bfloat16)
    x = torch.ones(tokens, _PROBE_COLUMNS, dtype=torch.bfloat16)
    out = torch.empty(tokens, _PROBE_ROWS, dtype=torch.bfloat16)
    room = torch.empty((tokens + _TILE) * _PROBE_COLUMNS, dtype=torch.bfloat16)

    def product(turn: int) -> list[Product]:
        return [Product(rows=matrices[turn % len(matrices)], out=out)]

    def by_torch(turn: int) -> None:
        torch.mm(x, matrices[turn % len(matrices)].t(), out=out)

    def one_by_one(turn: int) -> None:
        multiply_few(x, product(turn))

    in_blocks = _are_for_blocks(loops, tokens, has_plain=True)
    own_loops = loops.tile_blocks if in_blocks else _loops_of_many(loops)

    def in_tiles(turn: int) -> None:
        _multiply_many(loops, own_loops, x, product(turn), room)

    few = tokens <= loops.few_pairs.FEW_TOKENS
    ways = (by_torch, one_by_one, in_tiles) if few else (by_torch, in_tiles)
    return tuple(best_times(ways, _TRIES))
