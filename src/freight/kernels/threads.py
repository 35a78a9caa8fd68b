"""Compiled loops of the CPU on threads of our own, where numba can be had.

Rows are shared out over the threads; the loops hold no lock of the interpreter. Numba's own threads
would not do: lanes call in side by side. It takes a second to load and is loaded when it is first
wanted; where it is not installed, or fails, the caller uses the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.row_kinds import CodeRows, ExponentRows
from freight.kernels.sharing import share_alike
from freight.model.number_format import PAIR_COLUMNS, Grouped

__all__ = [
    "LEAST_PAIRS",
    "Loops",
    "as_numbers",
    "as_words",
    "code_rows",
    "dequantise_on_cpu",
    "exponent_rows",
    "find_loops",
    "find_tops",
    "group_lines",
    "has_words",
    "lay_pairs",
    "pair_rows",
    "product_on_cpu",
    "put_short_rows",
    "quantise_on_cpu",
    "scale_on_cpu",
]

_LEAST_ROWS = 16
_LEAST_BYTES = 8
"""Of groups across rows: those of as many rows, in 4 bits."""
_ROWS_AHEAD = 4
"""Of rows that are made plain one after the other."""
_WIDTH = 16
"""Codes that a loop takes at once."""
LEAST_PAIRS = 1 << 20
"""A share of those: made in less time than a thread is woken in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loops:
    """The modules that numba compiles; None where the processor has no instruction for it."""

    groups: Any
    group_products: Any
    code_lines: Any
    exponent_lines: Any
    exponents: Any
    eights: Any
    levels: Any
    micro: Any
    integers: Any
    attention: Any
    append: Any
    products: Any
    pairs: Any
    few_pairs: Any
    tiles: Any
    tile_blocks: Any
    query_blocks: Any
    pair_attention: Any
    pair_queries: Any
    code_queries: Any
    tokens: Any
    recurrence: Any
    streams: Any


@cache
def find_loops() -> Loops | None:
    """The compiled loops, None where numba is not installed."""
    try:
        from freight.kernels import (
            append_loops,
            attention_loops,
            eight_loops,
            exponent_lines,
            exponent_loops,
            group_loops,
            group_product_loops,
            integer_loops,
            level_loops,
            micro_loops,
            product_loops,
            query_block_loops,
            recurrence_loops,
            stream_loops,
            token_loops,
        )
    except ImportError:
        return None
    return Loops(
        groups=group_loops,
        group_products=group_product_loops,
        code_lines=_pair_loops("code_lines"),
        exponent_lines=exponent_lines,
        exponents=exponent_loops,
        levels=level_loops,
        micro=micro_loops,
        eights=eight_loops,
        integers=integer_loops,
        attention=attention_loops,
        append=append_loops,
        products=product_loops,
        pairs=_pair_loops("pair_loops"),
        few_pairs=_pair_loops("pair_few_loops"),
        tiles=_tile_loops("tile_loops"),
        tile_blocks=_tile_loops("tile_block_loops"),
        pair_attention=_pair_loops("pair_attention_loops"),
        pair_queries=_pair_loops("pair_query_loops"),
        code_queries=_pair_loops("code_query_loops"),
        query_blocks=query_block_loops,
        tokens=token_loops,
        recurrence=recurrence_loops,
        streams=stream_loops,
    )


def _pair_loops(name: str) -> Any:
    from freight.kernels.features import HAS_PAIR_PRODUCTS

    return import_module(f"freight.kernels.{name}") if HAS_PAIR_PRODUCTS else None


def _tile_loops(name: str) -> Any:
    from freight.kernels.features import may_use_tiles

    return import_module(f"freight.kernels.{name}") if may_use_tiles() else None


def product_on_cpu(
    raw: torch.Tensor, number_format: Grouped, x: torch.Tensor
) -> torch.Tensor | None:
    """x [tokens, columns] times the rows of raw, whose groups run across rows, in float32 [tokens,
    rows]; None where there is no such loop."""
    loops, columns = find_loops(), x.shape[1]
    found = None if loops is None else group_lines(raw, columns, number_format)
    if loops is None or found is None:
        return None
    source, numbers = found
    wide = x.float().contiguous().view(-1).numpy()
    out = torch.empty(raw.shape[0], x.shape[0])
    target = out.numpy()
    size, bits = number_format.group_size, number_format.code_bits

    def work(first: int, last: int) -> None:
        loops.group_products.product_across(
            source, numbers, size, bits, first, last, wide, columns, target
        )

    _share_rows(raw.shape[0], number_format, work)
    return out.t()


def _share_rows(count: int, number_format: Grouped, work: Callable[[int, int], None]) -> None:
    """Share out so many rows, or the bytes of their groups where these run across rows."""
    if number_format.across:
        share_alike(number_format.code_bytes(count), work, _LEAST_BYTES)
    else:
        share_alike(count, work, _LEAST_ROWS, in_turns=True)


def group_lines(
    raw: torch.Tensor, columns: int, number_format: Grouped
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """As loops take rows in groups: the rows, or those that lie together as one, as bytes and as
    whole numbers as wide as a scale; None where they do not lie as loops want, or groups, or rows,
    are no whole vectors."""
    source, size = raw.numpy(), number_format.factor_bytes
    if number_format.across:
        if columns % _WIDTH:
            return None
    elif number_format.group_size * number_format.code_bits < 8 * _WIDTH:
        return None
    if not source.flags.c_contiguous or source.ctypes.data % size:
        return None
    together = number_format.rows_together
    lines = source.reshape(len(source) // together, together * source.shape[1])
    if lines.shape[1] % size:
        return None
    return lines, lines.view(np.uint32 if number_format.wide else np.uint16)


def code_rows(raw: torch.Tensor, columns: int, number_format: Grouped) -> CodeRows | None:
    """As loops of products take rows in groups; None where ``group_lines`` is, or groups run across
    rows."""
    found = None if number_format.across else group_lines(raw, columns, number_format)
    if found is None:
        return None
    lines, numbers = (own.reshape(-1) for own in found)
    size, bits = number_format.group_size, number_format.code_bits
    return CodeRows(lines, numbers, size, bits, columns, raw.shape[1])


def pair_rows(raw: torch.Tensor, columns: int, number_format: Grouped) -> CodeRows | None:
    """The same for loops that make pairs of bfloat16 of them; None where these do not."""
    if PAIR_COLUMNS % number_format.group_size:
        return None
    return code_rows(raw, columns, number_format)


def exponent_rows(raw: torch.Tensor, columns: int) -> ExponentRows | None:
    """As loops take rows with short exponents; None where they do not lie as loops want."""
    if not raw.is_contiguous():
        return None
    return ExponentRows(raw.numpy().reshape(-1), columns, raw.shape[1])


def dequantise_on_cpu(
    raw: torch.Tensor, columns: int, number_format: Grouped, out: torch.Tensor
) -> bool:
    """raw uint8 [rows, row bytes] to out [rows, columns]; False where there is no such loop."""
    loops = find_loops()
    if loops is None or not out.is_contiguous():
        return False
    if loops.code_lines is not None and out.dtype is torch.bfloat16:
        rows = pair_rows(raw, columns, number_format)
        if rows is not None:
            lay_pairs(loops, loops.code_lines.lay_codes, rows, out)
            return True
    found = group_lines(raw, columns, number_format)
    if found is None:
        return False
    if out.dtype is torch.bfloat16:
        target = out.view(torch.int16).numpy().view(np.uint16)
    elif out.dtype is torch.float32:
        target = out.numpy()
    else:
        return False
    source, numbers = found
    size, bits = number_format.group_size, number_format.code_bits

    def work(first: int, last: int) -> None:
        own = slice(first, last)
        loops.groups.make_plain(source[own], numbers[own], size, bits, target[own])

    def work_across(first: int, last: int) -> None:
        loops.groups.make_plain_across(source, numbers, size, bits, first, last, target)

    _share_rows(raw.shape[0], number_format, work_across if number_format.across else work)
    return True


def lay_pairs(loops: Loops, lay: Any, rows: tuple[Any, ...], out: torch.Tensor) -> None:
    columns, target, width = out.shape[1], as_words(out), loops.code_lines.LINE

    def work(first: int, last: int) -> None:
        place = first * columns
        lay(rows, first, last - first, 0, columns, target, place, columns, width, _ROWS_AHEAD)

    share_alike(out.shape[0], work, -(-LEAST_PAIRS // columns))


def find_tops(bits: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Of each row of bfloat16 by its bits the largest exponent that has a code, and how many have
    none; None where there is no such loop."""
    loops = find_loops()
    if loops is None:
        return None
    tops, spared = (np.empty(len(bits), np.int64) for _ in range(2))

    def work(first: int, last: int) -> None:
        loops.exponents.find_tops(bits, first, last, tops, spared)

    share_alike(len(bits), work, _LEAST_ROWS)
    return tops, spared


def put_short_rows(
    bits: npt.NDArray[np.uint16],
    tops: npt.NDArray[Any],
    head: int,
    raw: npt.NDArray[np.uint8],
) -> None:
    """Those rows to raw [rows, row bytes], with ``head`` bytes before exponents without a code."""
    loops = find_loops()
    assert loops is not None

    def work(first: int, last: int) -> None:
        loops.exponents.put_rows(bits, tops, first, last, head, raw)

    share_alike(len(bits), work, _LEAST_ROWS)


def quantise_on_cpu(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, least: float
) -> bool:
    """x [T, columns] to codes int8 [T, columns] and scales float32 [T]; a token without a magnitude
    of ``least`` is 0. False where there is no such loop."""
    loops = find_loops()
    if loops is None or not has_words(x):
        return False
    words, pitch = as_words(x), x.stride(0)
    shift = np.uint32(16 if x.dtype is torch.bfloat16 else 0)
    border = np.float32(least).view(np.uint32)
    targets, factors = codes.view(torch.uint8).numpy(), scales.numpy()

    def work(first: int, last: int) -> None:
        own = slice(first, last)
        loops.integers.to_int8(
            words[first * pitch :], shift, pitch, border, targets[own], factors[own]
        )

    share_alike(x.shape[0], work, _LEAST_ROWS)
    return True


def scale_on_cpu(
    sums: torch.Tensor,
    token_scales: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool,
) -> bool:
    """out [T, rows] = sums int32 * scale of the token * scale of the row (+ bias) (+ out), rounded
    once; all but sums and out are float32. False where there is no such loop."""
    loops = find_loops()
    if loops is None or not has_words(out):
        return False
    is_wide = out.dtype is torch.float32
    loop = loops.integers.scale_to_float32 if is_wide else loops.integers.scale_to_bfloat16
    words, pitch = as_words(out), out.stride(0)
    target = words.view(np.float32) if is_wide else words
    source, factors, own_factors = sums.numpy(), token_scales.numpy(), row_scales.numpy()
    added = np.empty(0, np.float32) if bias is None else bias.numpy()

    def work(first: int, last: int) -> None:
        own = slice(first, last)
        loop(source[own], factors[own], own_factors, added, adds, target[first * pitch :], pitch)

    share_alike(out.shape[0], work, _LEAST_ROWS)
    return True


def has_words(x: torch.Tensor) -> bool:
    """Whether the loops can take it: rows of neighbours, in a type that they know."""
    is_known = x.dtype in (torch.bfloat16, torch.float32) and x.device.type == "cpu"
    return is_known and x.numel() > 0 and (x.stride(1) == 1 or x.shape[1] == 1)


def as_numbers(x: torch.Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """Those words as loops tell types apart: float32, or uint16 that are bfloat16."""
    words = as_words(x)
    return words.view(np.float32) if x.dtype is torch.float32 else words


def as_words(x: torch.Tensor) -> np.ndarray:
    """All words from the first to the last of x, those between its rows included."""
    flat = x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,))
    if x.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy().view(np.uint32)
