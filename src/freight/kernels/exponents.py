"""bfloat16 with short exponents as tensors: made, and made plain. The reference of all faster
versions; a row is as ``model.number_format`` has it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from freight.kernels.threads import find_tops, put_short_rows
from freight.model.number_format import (
    EXPONENT_BITS,
    EXPONENT_CODES,
    LINE_CODE_BYTES,
    LINE_COLUMNS,
    NOTED_COLUMNS,
    ShortExponents,
)

__all__ = ["make_plain_reference", "most_spared", "shorten", "shorten_reference"]

_NUM_EXPONENTS: Final = 256
_BYTE: Final = 8
_ROWS_TOGETHER: Final = 32
_PARTS: Final = (2, LINE_COLUMNS // (2 * _BYTE), _BYTE)
"""Halves of a line, eights of a half, numbers of an eight."""


def most_spared(x: torch.Tensor) -> int:
    """How many exponents of a row of x [rows, columns], bfloat16 on the CPU, have no code, at
    most."""
    if (found := find_tops(_bits(x))) is None:
        _, counts = _windows(_exponents(x))
        return x.shape[1] - int(counts.min()) if len(x) else 0
    return int(found[1].max(initial=0))


def shorten(x: torch.Tensor, own: ShortExponents) -> torch.Tensor:
    """x [rows, columns], bfloat16 on the CPU, as uint8 [rows, row bytes], which has room for all
    that must be spared."""
    bits = _bits(x)
    if (found := find_tops(bits)) is None:
        return shorten_reference(x, own)
    tops, spared = found
    assert int(spared.max(initial=0)) <= own.spare, "there is room for all"
    raw = np.zeros((len(bits), own.row_bytes(x.shape[1])), np.uint8)
    put_short_rows(bits, tops, own.head_bytes(x.shape[1]), raw)
    return torch.from_numpy(raw)


def shorten_reference(x: torch.Tensor, own: ShortExponents) -> torch.Tensor:
    """The same by numpy."""
    rows, columns = x.shape
    x = x.view(rows, -1, *_PARTS).transpose(2, 3).reshape(rows, columns)
    lines, exponents = columns // LINE_COLUMNS, _exponents(x)
    tops, _ = _windows(exponents)
    codes = tops[:, None] - exponents
    is_spared = (codes < 0) | (codes >= EXPONENT_CODES)
    codes = np.where(is_spared, EXPONENT_CODES, codes).astype(np.uint8)
    raw = np.zeros((rows, own.row_bytes(columns)), np.uint8)

    bits = _bits(x)
    raw[:, :columns] = (bits >> 8 & 0x80) | (bits & 0x7F)
    by_lines = codes.reshape(rows, lines, 1, LINE_COLUMNS)
    planes = by_lines >> np.arange(EXPONENT_BITS, dtype=np.uint8)[:, None] & 1
    packed = np.packbits(planes, axis=-1, bitorder="little").reshape(rows, -1)
    raw[:, columns : columns + packed.shape[1]] = packed

    head = own.head_bytes(columns)
    before = is_spared.cumsum(axis=1, dtype=np.int64) - is_spared
    notes = before[:, ::NOTED_COLUMNS].astype("<u2")
    raw[:, head - 1 - 2 * notes.shape[1] : head - 1] = notes.view(np.uint8)
    raw[:, head - 1] = tops
    row, column = np.nonzero(is_spared)
    places = before[row, column]
    assert not len(places) or int(places.max()) < own.spare, "there is room for all"
    raw[row, head + places] = exponents[row, column]
    return torch.from_numpy(raw)


def make_plain_reference(raw: torch.Tensor, own: ShortExponents, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], of any type that has room for them. Some
    rows at a time: as codes they take many times as much."""
    for first in range(0, len(raw), _ROWS_TOGETHER):
        last = first + _ROWS_TOGETHER
        _make_plain(raw[first:last], own, out[first:last])


def _make_plain(raw: torch.Tensor, own: ShortExponents, out: torch.Tensor) -> None:
    rows, columns = out.shape
    lines, head = columns // LINE_COLUMNS, own.head_bytes(columns)
    planes = raw[:, columns : columns + lines * LINE_CODE_BYTES]
    planes = planes.reshape(rows, lines, EXPONENT_BITS, _BYTE, 1)
    places = torch.arange(_BYTE, dtype=torch.uint8, device=raw.device)
    bits = (planes >> places & 1).int().reshape(rows, lines, EXPONENT_BITS, LINE_COLUMNS)
    weights = 2 ** torch.arange(EXPONENT_BITS, dtype=torch.int32, device=raw.device)
    codes = (bits * weights[:, None]).sum(dim=2, dtype=torch.int32).view(rows, columns)
    exponents = raw[:, head - 1 : head].int() - codes
    is_spared = codes == EXPONENT_CODES
    if own.spare:
        places = (is_spared.cumsum(dim=1) - 1).clamp_(0, own.spare - 1)
        spared = raw[:, head : head + own.spare].gather(1, places).int()
        exponents = torch.where(is_spared, spared, exponents)
    low = raw[:, :columns].int()
    # As bits: a number that is none would lose some of its own where it is rounded.
    words = (low & 0x80) << 8 | exponents << 7 | low & 0x7F
    eights = words.to(torch.int16).view(rows, lines, _PARTS[1], _PARTS[0], _BYTE)
    values = eights.transpose(2, 3).reshape(rows, columns).view(torch.bfloat16)
    out.copy_(values)


def _bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def _exponents(x: torch.Tensor) -> np.ndarray:
    """Of [rows, columns]."""
    return (_bits(x) >> 7 & 0xFF).astype(np.int64)


def _windows(exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the neighbours that most of its exponents are among: (the largest of them, how
    many)."""
    rows = len(exponents)
    shifted = exponents + np.arange(rows)[:, None] * _NUM_EXPONENTS
    counts = np.bincount(shifted.reshape(-1), minlength=rows * _NUM_EXPONENTS)
    grown = np.zeros((rows, _NUM_EXPONENTS + 1), np.int64)
    np.cumsum(counts.reshape(rows, -1), axis=1, out=grown[:, 1:])
    among = grown[:, EXPONENT_CODES:] - grown[:, :-EXPONENT_CODES]
    first = among.argmax(axis=1)
    return first + EXPONENT_CODES - 1, np.take_along_axis(among, first[:, None], axis=1)[:, 0]
