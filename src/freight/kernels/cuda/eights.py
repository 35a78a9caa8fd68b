"""Floats of 8 bits made plain on a CUDA device; the reference is in ``kernels.eights``."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from freight.model.number_format import EIGHT_COLUMNS, EightFloats

__all__ = ["make_eights_plain"]

_GROUPS: Final = 16
"""Of a program: sixteen bytes of codes for each thread of 4 warps."""


@triton.jit
def _make_eights_plain(  # type: ignore[no-untyped-def]
    raw,
    out,
    count,
    groups,
    columns,
    raw_stride,
    out_stride,
    size: tl.constexpr,
    block: tl.constexpr,
):
    """``block`` groups, of ``size`` columns each, of the ``count`` of all rows, numbered row by
    row; the last of a row may be shorter."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    there = number < count
    row, group = (number // groups).to(tl.int64), number % groups
    own = raw + row * raw_stride
    column = (group * size)[:, None] + tl.arange(0, size)[None, :]
    inside = there[:, None] & (column < columns)
    codes = tl.load(own[:, None] + column, mask=inside, other=0).to(tl.int32)
    scales = tl.load((own + columns).to(tl.pointer_type(tl.float32)) + group, mask=there, other=0.0)
    # As a float of 16 bits, which has one more for the exponent, each is a 256th. Older devices
    # have no floats of 8 bits.
    halves = ((codes & 128) << 8 | (codes & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    values = halves.to(tl.float32) * 256.0 * scales[:, None]
    target = out + (row * out_stride)[:, None] + column
    tl.store(target, values.to(out.dtype.element_ty), mask=inside)


def make_eights_plain(raw: torch.Tensor, own: EightFloats, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], whose rows may lie apart."""
    rows, columns = out.shape
    groups = -(-columns // EIGHT_COLUMNS)
    count = rows * groups
    _make_eights_plain[(triton.cdiv(count, _GROUPS),)](
        raw,
        out,
        count,
        groups,
        columns,
        raw.stride(0),
        out.stride(0),
        size=EIGHT_COLUMNS,
        block=_GROUPS,
    )
