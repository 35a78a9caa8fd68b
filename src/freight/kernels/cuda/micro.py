"""MXFP4 made plain on a CUDA device; the reference is in ``kernels.micro``."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from freight.model.number_format import MICRO_COLUMNS, MicroFloats

__all__ = ["make_micro_plain"]

_GROUPS: Final = 32
"""Of a program: four bytes of codes for each thread of 4 warps."""


@triton.jit
def _number(four):  # type: ignore[no-untyped-def]
    """A float of 4 bits: of float32 its exponent is one more than two bits say and 126, and where
    these are 0 it is half of its mantissa."""
    exponent, mantissa = (four >> 1) & 3, four & 1
    normal = ((exponent + 126) << 23 | mantissa << 22).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    return tl.where(four >= 8, -size, size)


@triton.jit
def _make_micro_plain(  # type: ignore[no-untyped-def]
    raw, out, count, groups, raw_stride, out_stride, step: tl.constexpr, block: tl.constexpr
):
    """``block`` groups, of ``step`` bytes each, of the ``count`` of all rows, numbered row by
    row."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    there = number < count
    row, group = (number // groups).to(tl.int64), number % groups
    byte = tl.arange(0, step)[None, :]
    inside = there[:, None] & (byte < step)
    own = raw + row * raw_stride
    codes = tl.load((own + group * step)[:, None] + byte, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(own + groups * step + group, mask=there, other=127).to(tl.int32)
    scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)[:, None]
    target = out + (row * out_stride + group * (2 * step))[:, None] + byte
    low, high = _number(codes & 15) * scale, _number(codes >> 4) * scale
    tl.store(target, low.to(out.dtype.element_ty), mask=inside)
    tl.store(target + step, high.to(out.dtype.element_ty), mask=inside)


def make_micro_plain(raw: torch.Tensor, own: MicroFloats, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], whose rows may lie apart."""
    rows, columns = out.shape
    groups = columns // MICRO_COLUMNS
    count = rows * groups
    _make_micro_plain[(triton.cdiv(count, _GROUPS),)](
        raw,
        out,
        count,
        groups,
        raw.stride(0),
        out.stride(0),
        step=MICRO_COLUMNS // 2,
        block=_GROUPS,
    )
