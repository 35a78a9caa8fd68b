"""Rows that are not integers in groups made plain by loops on the CPU, shared out over threads."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from freight.kernels.levels import levels_of
from freight.kernels.row_kinds import EightRows, LevelRows, MicroRows
from freight.kernels.sharing import share_alike
from freight.kernels.threads import (
    LEAST_PAIRS,
    as_numbers,
    exponent_rows,
    find_loops,
    has_words,
    lay_pairs,
)
from freight.model.float_formats import LevelFloats

__all__ = [
    "EIGHTS",
    "eight_rows",
    "eights_on_cpu",
    "exponents_on_cpu",
    "level_rows",
    "levels_on_cpu",
    "micro_on_cpu",
    "micro_rows",
]

_VECTOR: Final = 16
_LINE: Final = 32
EIGHTS: Final = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""What floats of 8 bits are."""


def micro_rows(raw: torch.Tensor, columns: int) -> MicroRows | None:
    """As loops take rows of MXFP4; None where they do not lie as loops want."""
    if not raw.is_contiguous():
        return None
    return MicroRows(raw.numpy().reshape(-1), columns, raw.shape[1])


def micro_on_cpu(raw: torch.Tensor, columns: int, out: torch.Tensor) -> bool:
    """Rows of MXFP4, raw uint8 [rows, row bytes], to out [rows, columns]; False where there is no
    such loop."""
    loops, rows = find_loops(), micro_rows(raw, columns)
    if loops is None or rows is None or not out.is_contiguous() or not has_words(out):
        return False
    if loops.code_lines is not None and out.dtype is torch.bfloat16:
        lay_pairs(loops, loops.code_lines.lay_fours, rows, out)
        return True
    target = as_numbers(out)

    def work(first: int, last: int) -> None:
        loops.micro.make_plain(rows.raw, columns, first, last, target)

    share_alike(out.shape[0], work, -(-LEAST_PAIRS // columns))
    return True


def exponents_on_cpu(raw: torch.Tensor, columns: int, out: torch.Tensor) -> bool:
    """Rows with short exponents, raw uint8 [rows, row bytes], to out [rows, columns]; False where
    there is no such loop."""
    loops, rows = find_loops(), exponent_rows(raw, columns)
    if loops is None or rows is None or not out.is_contiguous() or not has_words(out):
        return False
    target, lines = as_numbers(out), loops.exponent_lines

    def work(first: int, last: int) -> None:
        own = rows, first, last - first, 0, columns, target, first * columns, columns
        if out.dtype is torch.bfloat16:
            lines.lay_exponents(*own, lines.LINE_COLUMNS // 2, lines.ROWS_AHEAD)
        else:
            lines.lay_wide(*own)

    share_alike(out.shape[0], work, -(-LEAST_PAIRS // columns))
    return True


def level_rows(raw: torch.Tensor, columns: int, own: LevelFloats) -> LevelRows | None:
    """As loops take rows of levels; None where they do not lie as loops want."""
    if not raw.is_contiguous() or raw.data_ptr() % 4 or not own.fits(columns):
        return None
    flat, levels = raw.numpy().reshape(-1), levels_of(own.levels).numpy()
    eights = EIGHTS if own.in_bytes else EIGHTS[:0]
    factors = flat.view(np.float32)
    bits = own.group_size.bit_length() - 1
    return LevelRows(flat, factors, eights, levels, columns, raw.shape[1], bits)


def levels_on_cpu(raw: torch.Tensor, own: LevelFloats, out: torch.Tensor) -> bool:
    """Rows of levels, raw uint8 [rows, row bytes], to out [rows, columns]; False where there is no
    such loop."""
    columns = out.shape[1]
    loops, rows = find_loops(), level_rows(raw, columns, own)
    if loops is None or rows is None or not out.is_contiguous() or not has_words(out):
        return False
    if loops.code_lines is not None and out.dtype is torch.bfloat16:
        lay_pairs(loops, loops.code_lines.lay_levels, rows, out)
        return True
    target = as_numbers(out)

    def work(first: int, last: int) -> None:
        loops.levels.make_plain(rows, first, last, target)

    share_alike(out.shape[0], work, -(-LEAST_PAIRS // columns))
    return True


def eight_rows(raw: torch.Tensor, columns: int) -> EightRows | None:
    """As loops take rows of floats of 8 bits; None where they do not lie as loops want."""
    if not raw.is_contiguous() or columns % _VECTOR or raw.data_ptr() % 4:
        return None
    flat = raw.numpy().reshape(-1)
    return EightRows(flat, flat.view(np.float32), columns, raw.shape[1])


def eights_on_cpu(raw: torch.Tensor, columns: int, out: torch.Tensor) -> bool:
    """Rows of floats of 8 bits, raw uint8 [rows, row bytes], to out [rows, columns]; False where
    there is no such loop."""
    loops, rows = find_loops(), eight_rows(raw, columns)
    if loops is None or rows is None or not out.is_contiguous() or not has_words(out):
        return False
    if loops.code_lines is not None and out.dtype is torch.bfloat16 and columns % _LINE == 0:
        lay_pairs(loops, loops.code_lines.lay_eights, rows, out)
        return True
    target = as_numbers(out)

    def work(first: int, last: int) -> None:
        loops.eights.make_plain(rows, first, last, target)

    share_alike(out.shape[0], work, -(-LEAST_PAIRS // columns))
    return True
