"""Products of tokens and rows, plain or compressed: by torch, or on a CPU by loops of our own where
these are faster.

Rows may be narrower than the tokens: bfloat16 or float16 rows meet float32 tokens as the numbers
that they are, which float32 has all of. So what a file keeps in 16 bits stays so in memory on a CPU
that is slow at products of such numbers, and is widened where it is used. Tokens in bfloat16 are
widened likewise where loops are faster than torch at them, and results rounded. Compressed rows are
made plain where the loops use them, or some rows at a time for torch. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.few_pairs import few_codes_are_for_pairs, multiply_few
from freight.kernels.grouped import CompressedRows, dequantise, small_product
from freight.kernels.pairs import (
    multiply_pairs,
    multiply_plain_pairs,
    pairs_are_better,
    plain_pairs_are_better,
)
from freight.kernels.plain_rows import eight_rows, level_rows, micro_rows
from freight.kernels.product import (
    LEAST_PRODUCTS,
    LEAST_SHARED,
    LEAST_SHARED_OF_FEW,
    TOKENS_WORTH_ROWS,
    Product,
    Target,
    share_targets,
)
from freight.kernels.row_kinds import CodeRows, ExponentRows, NumberRows, SummedCodeRows
from freight.kernels.sharing import share_alike
from freight.kernels.threads import (
    Loops,
    as_numbers,
    code_rows,
    exponent_rows,
    find_loops,
    has_words,
)
from freight.kernels.trial import best_times, cold_rows
from freight.model.number_format import (
    TILE_ROWS,
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    ShortExponents,
)
from freight.model.tiles import laid_tokens, tile_rows

__all__ = ["Product", "can_gate", "loops_are_faster", "multiply", "scratch_values"]

_MOST_TOKENS: Final = TILE_ROWS
"""Tokens that are laid in tiles at once: a cache holds what a panel of rows meets."""
_TILE: Final = 16
_FEW_TOKENS_OF_CODES: Final = 12
"""Up to which codes are not made plain for the loops' panels; for torch, which needs whole rows
made plain, some more."""
_FEW_TOKENS_FOR_TORCH: Final = 16
_LEAST_LAID: Final = 1 << 17
"""Numbers in a share of those that are laid in tiles, likewise."""

_TRIES: Final = 12
_PROBE_TOKENS: Final = 32
_PROBE_ROWS: Final = 2048
_PROBE_COLUMNS: Final = 2048
_TIMES_FASTER: Final = 1.1


def scratch_values(
    columns: int, dtype: torch.dtype, *, rows: int = 0, on_device: bool = False
) -> int:
    """How many numbers of its tokens' type ``multiply`` may want as scratch for rows of so many
    columns: as many rows, or tokens, as are widened at once; ``on_device`` also as many of ``rows``
    compressed ones as are made plain there."""
    wide = TILE_ROWS * columns * 4 // dtype.itemsize
    if dtype.itemsize == 2 and not on_device:
        wide = max(wide, laid_tokens(columns) * columns)
    return max(wide, tile_rows(rows, columns, on_device=on_device) * columns)


def multiply(
    x: torch.Tensor, products: Sequence[Product], scratch: Callable[[int], torch.Tensor]
) -> None:
    """Products of the same tokens x [T, columns], together: what is done once for x serves all.

    x and what comes out are of one type, rows of that or of a narrower one. Only where ``can_gate``
    says so may one gate. ``scratch`` is asked
    for some numbers of x's type, ``scratch_values`` at most at a time, which are free again after
    the call.
    """
    if plain_pairs_are_better(x, products):
        multiply_plain_pairs(x, products, scratch)
        return
    if few_codes_are_for_pairs(x, products):
        multiply_few(x, products)
        return
    products = [own for own in products if not _is_multiplied_alone(x, own)]
    if not products:
        return
    loops = find_loops() if _are_for_loops(x, products) else None
    if loops is not None:
        if pairs_are_better(x, products):
            multiply_pairs(x, products, scratch)
            return
        if not any(map(_is_for_pairs, products)) and (
            _are_few_codes(x, products) or loops_are_faster(_kept(products[0].rows), x.dtype)
        ):
            _by_loops(loops, x, products, scratch)
            return
    _by_torch(x, products, scratch)


def can_gate(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether some of the products may gate what others before them make."""
    if plain_pairs_are_better(x, products) or few_codes_are_for_pairs(x, products):
        return True
    loops, are_plain = find_loops(), all(isinstance(own.rows, torch.Tensor) for own in products)
    return (
        loops is not None
        and loops.pairs is not None
        and (x.shape[0] > loops.few_pairs.FEW_TOKENS or are_plain)
        and _are_for_loops(x, products)
        and pairs_are_better(x, products)
    )


def _is_multiplied_alone(x: torch.Tensor, own: Product) -> bool:
    """Multiply integers in groups by few tokens, where there is a kernel for it alone."""
    if isinstance(own.rows, torch.Tensor) or (found := small_product(x, own.rows)) is None:
        return False
    if own.bias is not None:
        found += own.bias
    own.out.copy_(found.add_(own.out) if own.adds else found)
    return True


def _by_torch(
    x: torch.Tensor, products: Sequence[Product], scratch: Callable[[int], torch.Tensor]
) -> None:
    tile = None
    for own in products:
        is_as_kept = isinstance(own.rows, torch.Tensor) and own.rows.dtype == x.dtype
        if tile is None and not is_as_kept:
            count = max(_tile_rows(x, other) for other in products)
            tile = scratch(count * x.shape[1]).view(count, -1)
        for first, some in _widened(own.rows, x.dtype, tile):
            last = first + some.shape[0]
            bias = None if own.bias is None else own.bias[first:last]
            _multiply_by_torch(x, some, bias, own.out[:, first:last], adds=own.adds)


def _tile_rows(x: torch.Tensor, own: Product) -> int:
    """How many rows are made plain, or wide, at once."""
    if isinstance(own.rows, torch.Tensor):
        return TILE_ROWS
    return tile_rows(*own.rows.shape, on_device=x.device.type != "cpu")


def _is_for_pairs(own: Product) -> bool:
    """Whether rows are floats of 4 or 8 bits, which only the loops over pairs take."""
    rows = own.rows
    kinds = MicroFloats | EightFloats | LevelFloats
    return isinstance(rows, CompressedRows) and isinstance(rows.number_format, kinds)


def _kept(rows: torch.Tensor | CompressedRows) -> torch.dtype:
    """How rows are kept: integers are as narrow as any, and short exponents those of bfloat16."""
    if isinstance(rows, torch.Tensor):
        return rows.dtype
    return torch.bfloat16 if isinstance(rows.number_format, ShortExponents) else torch.uint8


def _widened(
    rows: torch.Tensor | CompressedRows, dtype: torch.dtype, tile: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) in ``dtype``, of narrower ones a tile at a time."""
    if isinstance(rows, torch.Tensor) and rows.dtype == dtype:
        yield 0, rows
        return
    assert tile is not None
    for first in range(0, rows.shape[0], len(tile)):
        last = min(first + len(tile), rows.shape[0])
        if isinstance(rows, CompressedRows):
            dequantise(rows.rows(first, last), tile[: last - first])
        else:
            tile[: last - first].copy_(rows[first:last])
        yield first, tile[: last - first]


def _multiply_by_torch(
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


def _are_for_loops(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether the loops can take them, and it is worth it."""
    return (
        x.dtype in (torch.float32, torch.bfloat16)
        and _are_worth_it(x, products)
        and x.shape[1] % _TILE == 0
        and has_words(x)
        and all(has_words(own.out) and _fits_loops(x, own.rows) for own in products)
    )


def _are_worth_it(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether there is enough to do for threads. Compressed rows would have to be made plain for
    torch, which costs more than calling them."""
    count = x.shape[0] * sum(math.prod(own.rows.shape) for own in products)
    are_compressed = all(isinstance(own.rows, CompressedRows) for own in products)
    return count >= LEAST_PRODUCTS or (x.dtype is torch.bfloat16 and are_compressed)


def _fits_loops(x: torch.Tensor, rows: torch.Tensor | CompressedRows) -> bool:
    if isinstance(rows, torch.Tensor):
        return rows.is_contiguous()
    loops, kind = find_loops(), rows.number_format
    if isinstance(kind, ShortExponents):
        return exponent_rows(rows.raw, rows.columns) is not None
    if isinstance(kind, MicroFloats):
        return micro_rows(rows.raw, rows.columns) is not None
    if isinstance(kind, EightFloats):
        return eight_rows(rows.raw, rows.columns) is not None
    if isinstance(kind, LevelFloats):
        return level_rows(rows.raw, rows.columns, kind) is not None
    return (
        loops is not None
        and kind.group_size * kind.code_bits % (8 * _TILE) == 0
        and (
            x.shape[0] <= loops.products.FEW_TOKENS
            or loops.products.PANEL_COLUMNS % kind.group_size == 0
        )
        and code_rows(rows.raw, rows.columns, kind) is not None
    )


def _are_few_codes(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether all rows are integers in groups, and tokens so few that it is best to multiply codes
    as they are."""
    tokens = x.shape[0]
    if tokens > _FEW_TOKENS_FOR_TORCH:
        return False
    if not all(own.is_in_groups for own in products):
        return False
    return tokens <= _FEW_TOKENS_OF_CODES or not loops_are_faster(torch.uint8, x.dtype)


def _by_loops(
    loops: Loops,
    x: torch.Tensor,
    products: Sequence[Product],
    scratch: Callable[[int], torch.Tensor],
) -> None:
    if x.shape[0] <= loops.products.FEW_TOKENS or _are_few_codes(x, products):
        _few_by_loops(loops, x, products)
        return
    height, columns = loops.products.PANEL_ROWS, x.shape[1]
    targets = [Target(own, height, _description(own.rows)) for own in products]
    num_tiles = -(-min(x.shape[0], _MOST_TOKENS) // _TILE)
    room = scratch(num_tiles * _TILE * columns * 4 // x.itemsize)
    tiles: npt.NDArray[np.float32] = room.view(torch.float32).numpy()
    for begin in range(0, x.shape[0], _MOST_TOKENS):
        some = x[begin : begin + _MOST_TOKENS]
        _lay_in_tiles(loops, some, tiles)
        count = some.shape[0]

        def panels(own: Target, first: int, last: int, begin: int = begin, n: int = count) -> None:
            top, bottom = height * first, min(height * last, own.count)
            out = own.out[begin * own.pitch :]
            loops.products.many_tokens(
                own.rows, top, bottom, tiles, n, own.bias, own.adds, out, own.pitch
            )

        def in_team(
            own: Target,
            threads: int,
            counters: npt.NDArray[np.int64],
            borders: npt.NDArray[np.int64],
            begin: int = begin,
            n: int = count,
        ) -> None:
            out = own.out[begin * own.pitch :]
            tops = np.minimum(height * borders, own.count)
            loops.products.many_together(
                threads, counters, tops, own.rows, tiles, n, own.bias, own.adds, out, own.pitch
            )

        share_targets(targets, panels, -(-LEAST_SHARED // (height * columns * count)), in_team)


def _few_by_loops(loops: Loops, x: torch.Tensor, products: Sequence[Product]) -> None:
    flat = x.reshape(-1).float().numpy()

    def multiply_rows(own: Target, first: int, last: int) -> None:
        loops.products.few_tokens(own.rows, first, last, flat, *own.results)

    def in_team(
        own: Target,
        threads: int,
        counters: npt.NDArray[np.int64],
        borders: npt.NDArray[np.int64],
    ) -> None:
        loops.products.few_together(threads, counters, borders, own.rows, flat, *own.results)

    sums: dict[int, npt.NDArray[np.float32]] = {}
    targets = []
    for product in products:
        own: tuple[Any, ...] = _description(product.rows)
        if isinstance(own, CodeRows):
            if own.size not in sums:
                sums[own.size] = _group_sums(flat.reshape(x.shape), own.size)
            own = SummedCodeRows(*own, sums[own.size])
        targets.append(Target(product, 1, own))
    tokens, columns = x.shape
    least = -(-LEAST_SHARED_OF_FEW // (columns * max(tokens, TOKENS_WORTH_ROWS)))
    share_targets(targets, multiply_rows, least, in_team, is_short=True)


def _group_sums(x: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Of each group of a token's columns; flat, each token's followed by zeros to whole vectors."""
    tokens, groups = len(x), x.shape[1] // size
    sums = np.zeros((tokens, -(-groups // _TILE) * _TILE), np.float32)
    np.sum(x.reshape(tokens, groups, size), axis=2, out=sums[:, :groups])
    return sums.reshape(-1)


def _lay_in_tiles(loops: Loops, x: torch.Tensor, tiles: npt.NDArray[np.float32]) -> None:
    """Tokens sixteen side by side."""
    tokens, columns = x.shape
    source, pitch, length = as_numbers(x), x.stride(0), loops.products.PANEL_COLUMNS

    def lay(first: int, last: int) -> None:
        loops.products.lay_in_tiles(source, pitch, columns, tokens, length, first, last, tiles)

    share_alike(-(-tokens // _TILE), lay, -(-_LEAST_LAID // (_TILE * columns)))


def _description(
    rows: torch.Tensor | CompressedRows,
) -> NumberRows | ExponentRows | CodeRows:
    """Rows as the loops take them."""
    if isinstance(rows, torch.Tensor):
        return NumberRows(_numbers(rows).reshape(-1), rows.shape[1])
    own = rows.number_format
    if isinstance(own, Grouped):
        found: ExponentRows | CodeRows | None = code_rows(rows.raw, rows.columns, own)
    else:
        found = exponent_rows(rows.raw, rows.columns)
    assert found is not None
    return found


def _numbers(rows: torch.Tensor) -> np.ndarray:
    """As the loops tell types apart."""
    if rows.dtype is torch.bfloat16:
        return rows.view(torch.int16).numpy().view(np.uint16)
    return (rows.view(torch.int16) if rows.dtype is torch.float16 else rows).numpy()


@cache
def loops_are_faster(kept: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies tokens of a type by rows that are kept in another, or the same,
    faster by our loops than by torch: tried with rows that no cache holds."""
    loops = find_loops()
    if loops is None:
        return False
    if kept is torch.uint8:  # as of the numbers that integers are made for torch
        return loops_are_faster(dtype, dtype)
    tokens, columns = _PROBE_TOKENS, _PROBE_COLUMNS
    x = torch.ones(tokens, columns, dtype=dtype)
    scratch = torch.empty(scratch_values(columns, dtype), dtype=dtype)
    out = torch.empty(tokens, _PROBE_ROWS, dtype=dtype)

    matrices = cold_rows(_PROBE_ROWS, columns, kept)

    def by_loops(turn: int) -> None:
        own = Product(rows=matrices[turn % len(matrices)], out=out)
        _by_loops(loops, x, [own], lambda size: scratch[:size])

    def by_torch(turn: int) -> None:
        own = Product(rows=matrices[turn % len(matrices)], out=out)
        _by_torch(x, [own], lambda size: scratch[:size])

    own, other = best_times((by_loops, by_torch), _TRIES)
    return own * _TIMES_FASTER < other
