"""Rows made plain on a device, as kernels are tried: a few, of numbers that the reference and a
kernel find alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch

from freight.kernels.eights import join_eight_rows
from freight.kernels.exponents import most_spared, shorten
from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.levels import join_level_rows
from freight.model.number_format import (
    EIGHT_COLUMNS,
    Compressed,
    EightFloats,
    LevelFloats,
    MicroFloats,
    RowFormat,
    ShortExponents,
)
from freight.runtime.trial_numbers import Trial, trial_numbers

__all__ = ["float_rows", "plain_trial"]

_COLUMNS: Final = 320
_MICRO_COLUMNS: Final = 96


def plain_trial(
    rows_of: Callable[[int], CompressedRows], counts: Iterable[int], dtype: torch.dtype
) -> Trial:
    """What becomes of so many rows."""

    def trial() -> Iterator[torch.Tensor]:
        for count in counts:
            rows = rows_of(count)
            out = torch.empty(rows.shape, dtype=dtype, device=rows.raw.device)
            dequantise(rows, out)
            yield out

    return trial


def float_rows(own: Compressed, num_rows: int, device: torch.device) -> CompressedRows:
    """Rows of such a format, with numbers that all types have."""
    dice = torch.Generator().manual_seed(0)
    columns, kept = _COLUMNS, own
    if isinstance(own, ShortExponents):
        numbers = trial_numbers(num_rows, columns, device=device, dtype=torch.bfloat16).cpu()
        kept = ShortExponents(spare=most_spared(numbers))
        raw = shorten(numbers, kept)
    elif isinstance(own, EightFloats):
        codes = torch.randn(num_rows, columns, generator=dice).to(torch.float8_e4m3fn)
        scales = torch.rand(num_rows, -(-columns // EIGHT_COLUMNS), generator=dice)
        raw = join_eight_rows(codes.view(torch.uint8), scales)
    elif isinstance(own, LevelFloats):
        columns = 10 * max(own.group_size, EIGHT_COLUMNS // 4)
        codes = torch.randint(0, 16, (num_rows, columns), dtype=torch.uint8, generator=dice)
        scales = torch.rand(num_rows, columns // own.group_size, generator=dice)
        if own.in_bytes:
            bytes_ = scales.to(torch.float8_e4m3fn).view(torch.uint8)
            raw = join_level_rows(codes, bytes_, torch.rand(num_rows, generator=dice))
        else:
            raw = join_level_rows(codes, scales)
    else:
        assert isinstance(own, MicroFloats)
        columns = _MICRO_COLUMNS
        # All codes; exponents near one, for float16 has no others.
        shape = num_rows, own.row_bytes(columns)
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=dice)
        raw[:, own.code_bytes(columns) :] %= 8
        raw[:, own.code_bytes(columns) :] += 120
    assert isinstance(kept, RowFormat)
    return CompressedRows(raw=raw.to(device), columns=columns, number_format=kept)
