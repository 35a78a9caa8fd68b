"""Codes of 4 bits that stand for levels made plain on a CUDA device; the reference is in
``kernels.levels``."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from freight.kernels.levels import levels_of
from freight.model.float_formats import LEVEL_COLUMNS, LevelFloats

__all__ = ["make_levels_plain"]

_STRETCHES: Final = 32
"""Of a program: four bytes of codes for each thread of 4 warps."""


@triton.jit
def _scale(own, group, groups, codes, there, in_bytes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a group of the row at ``own``, which begins with so many bytes of ``codes``."""
    if in_bytes:
        bits = tl.load(own + codes + group, mask=there, other=0).to(tl.int32)
        # As a float of 16 bits, which has one more for the exponent, each is a 256th.
        half = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        place = (own + codes + groups).to(tl.pointer_type(tl.float32))
        return half.to(tl.float32) * 256.0 * tl.load(place, mask=there, other=0.0)
    else:
        place = (own + codes).to(tl.pointer_type(tl.float32))
        return tl.load(place + group, mask=there, other=0.0)


@triton.jit
def _make_levels_plain(  # type: ignore[no-untyped-def]
    raw,
    levels,
    out,
    count,
    stretches,
    groups,
    raw_stride,
    out_stride,
    size,
    in_bytes: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
):
    """``block`` stretches, of ``step`` bytes of codes each, of the ``count`` of all rows, numbered
    row by row; groups have ``size`` columns."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    there = number < count
    row, stretch = (number // stretches).to(tl.int64), number % stretches
    byte = tl.arange(0, step)[None, :]
    inside = there[:, None] & (byte < step)
    own, column = raw + row * raw_stride, stretch * (2 * step)
    codes = tl.load((own + stretch * step)[:, None] + byte, mask=inside, other=0).to(tl.int32)
    border = stretches * step
    low = _scale(own, column // size, groups, border, there, in_bytes)[:, None]
    high = _scale(own, (column + step) // size, groups, border, there, in_bytes)[:, None]
    target = out + (row * out_stride + column)[:, None] + byte
    kind = out.dtype.element_ty
    tl.store(target, (tl.load(levels + (codes & 15)) * low).to(kind), mask=inside)
    tl.store(target + step, (tl.load(levels + (codes >> 4)) * high).to(kind), mask=inside)


@cache
def _on(device: torch.device, name: str) -> torch.Tensor:
    return levels_of(name).to(device)


def make_levels_plain(raw: torch.Tensor, own: LevelFloats, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], whose rows may lie apart."""
    rows, columns = out.shape
    stretches = columns // LEVEL_COLUMNS
    count = rows * stretches
    _make_levels_plain[(triton.cdiv(count, _STRETCHES),)](
        raw,
        _on(raw.device, own.levels),
        out,
        count,
        stretches,
        columns // own.group_size,
        raw.stride(0),
        out.stride(0),
        own.group_size,
        in_bytes=own.in_bytes,
        step=LEVEL_COLUMNS // 2,
        block=_STRETCHES,
    )
