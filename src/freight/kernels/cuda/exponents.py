"""bfloat16 with short exponents made plain on a CUDA device; the reference is in
``kernels.exponents``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freight.model.number_format import (
    EXPONENT_BITS,
    EXPONENT_CODES,
    LINE_CODE_BYTES,
    LINE_COLUMNS,
    NOTED_COLUMNS,
    ShortExponents,
)

__all__ = ["make_exponents_plain"]


@triton.jit
def _make_exponents_plain(  # type: ignore[no-untyped-def]
    raw,
    out,
    columns,
    raw_stride,
    out_stride,
    notes_at,
    head,
    line: tl.constexpr,
    words: tl.constexpr,
    num_bits: tl.constexpr,
    block: tl.constexpr,
    unspared: tl.constexpr,
):
    """``block`` numbers of a row, before which it is noted how many exponents have no code. Each
    lane has a byte of them, in the order in which these lie."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    own = raw + row * raw_stride
    place = number * block + tl.arange(0, block)
    inside = place < columns
    low = tl.load(own + place, mask=inside, other=0).to(tl.int32)
    bit = place % line
    codes_at = own + columns + place // line * words + bit // 8
    code = tl.zeros([block], tl.int32)
    for plane in tl.static_range(num_bits):
        byte = tl.load(codes_at + plane * (line // 8), mask=inside, other=0).to(tl.int32)
        code += ((byte >> (bit % 8)) & 1) << plane
    is_spared = (code == unspared) & inside
    # In 16 bits that may lie on an odd byte.
    before = tl.load(own + notes_at + 2 * number).to(tl.int32)
    before += tl.load(own + notes_at + 2 * number + 1).to(tl.int32) << 8
    rank = before + tl.cumsum(is_spared.to(tl.int32), 0) - 1
    spared = tl.load(own + head + rank, mask=is_spared, other=0).to(tl.int32)
    top = tl.load(own + head - 1).to(tl.int32)
    exponent = tl.where(is_spared, spared, top - code)
    bits = ((low & 0x80) << 8) | (exponent << 7) | (low & 0x7F)
    if out.dtype.element_ty == tl.float32:
        values = (bits << 16).to(tl.float32, bitcast=True)
    else:
        values = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    column = place - bit + (bit // 8 % 2) * (line // 2) + bit // 16 * 8 + bit % 8
    target = out + row * out_stride + column
    tl.store(target, values.to(out.dtype.element_ty), mask=inside)


def make_exponents_plain(raw: torch.Tensor, own: ShortExponents, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], whose rows may lie apart."""
    rows, columns = out.shape
    head = own.head_bytes(columns)
    notes = triton.cdiv(columns, NOTED_COLUMNS)
    _make_exponents_plain[(rows, notes)](
        raw,
        out,
        columns,
        raw.stride(0),
        out.stride(0),
        head - 1 - 2 * notes,
        head,
        line=LINE_COLUMNS,
        words=LINE_CODE_BYTES,
        num_bits=EXPONENT_BITS,
        block=NOTED_COLUMNS,
        unspared=EXPONENT_CODES,
    )
