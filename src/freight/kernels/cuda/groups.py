"""Integers in groups on a CUDA device: made plain, and multiplied by few tokens as they are.

The references are in ``kernels.grouped``. Plain values are the reference's bit for bit; products
are those of the same values, in another order of sums.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from freight.kernels.cuda.launch import dot_type, power_of_two
from freight.model.number_format import Grouped

__all__ = ["make_plain", "multiply"]

_BYTES: Final = 1024
"""Codes that a program makes plain: 8 for each thread of 4 warps, a vector load of each."""
_COLUMNS: Final = 64
"""Of groups across rows: a row of them is 128 bytes in 16 bits."""
_TOKENS: Final = 16
"""The fewest rows of a tensor core's operand: fewer tokens cost the same."""
_ROWS: Final = 32
"""Rows of a program: a matrix of 4096 then has a program for each of about 128 multiprocessors, and
each warp of 4 owns 8 columns of the product."""
_STAGES: Final = 4
"""Groups under way: a program loads little at once, and must hide the memory's latency itself."""
_LEAST_STEP: Final = 16
"""The shortest sum of a tensor core: groups with fewer bytes of codes are made plain instead."""


@triton.jit
def _value(codes, scale, lowest, out):  # type: ignore[no-untyped-def]
    return (codes.to(tl.float32) * scale + lowest).to(out.dtype.element_ty)


@triton.jit
def _store_values(  # type: ignore[no-untyped-def]
    codes, scale, lowest, out, target, half, inside, bits: tl.constexpr
):
    """The values of bytes of codes to ``target``; of 4 bits the upper ones ``half`` further."""
    if bits == 4:
        tl.store(target, _value(codes & 15, scale, lowest, out), mask=inside)
        tl.store(target + half, _value(codes >> 4, scale, lowest, out), mask=inside)
    else:
        tl.store(target, _value(codes, scale, lowest, out), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _make_plain(  # type: ignore[no-untyped-def]
    raw,
    factors,
    out,
    count,
    groups,
    raw_stride,
    factor_stride,
    first_factor,
    out_stride,
    bits: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    padded_step: tl.constexpr,
    block: tl.constexpr,
):
    """``block`` groups of the ``count`` of all rows, numbered row by row."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    there = number < count
    row, group = (number // groups).to(tl.int64), number % groups
    byte = tl.arange(0, padded_step)[None, :]
    inside = there[:, None] & (byte < step)
    codes = tl.load(raw + (row * raw_stride + group * step)[:, None] + byte, mask=inside, other=0)
    own = factors + row * factor_stride + first_factor + group
    scale = tl.load(own, mask=there, other=0.0).to(tl.float32)[:, None]
    lowest = tl.load(own + groups, mask=there, other=0.0).to(tl.float32)[:, None]
    target = out + (row * out_stride + group * size)[:, None] + byte
    _store_values(codes, scale, lowest, out, target, step, inside, bits)


@triton.jit
def _make_plain_across(  # type: ignore[no-untyped-def]
    raw,
    factors,
    out,
    columns,
    raw_stride,
    factor_stride,
    first_factor,
    out_stride,
    bits: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
):
    """``block`` columns of as many rows as a group has."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    byte = tl.arange(0, step)[:, None]
    there = column < columns
    inside = (byte < step) & there[None, :]
    at = raw + line * raw_stride + byte * columns + column[None, :]
    codes = tl.load(at, mask=inside, other=0)
    own = factors + line * factor_stride + first_factor + column
    scale = tl.load(own, mask=there, other=0.0).to(tl.float32)[None, :]
    lowest = tl.load(own + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + (line * size + byte) * out_stride + column[None, :]
    _store_values(codes, scale, lowest, out, target, step * out_stride, inside, bits)


def make_plain(raw: torch.Tensor, number_format: Grouped, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], of any float type."""
    if number_format.across:
        _start_across(raw, number_format, out)
        return
    rows, columns = out.shape
    size = number_format.group_size
    groups, step = columns // size, number_format.code_bytes(size)
    factors, first = _factors(raw, number_format, columns)
    padded = power_of_two(step)
    block = max(1, _BYTES // padded)
    _make_plain[(triton.cdiv(rows * groups, block),)](
        raw,
        factors,
        out,
        rows * groups,
        groups,
        raw.stride(0),
        factors.stride(0),
        first,
        out.stride(0),
        bits=number_format.code_bits,
        size=size,
        step=step,
        padded_step=padded,
        block=block,
        # A product and a sum, each rounded, as the reference has it: wide factors show it.
        enable_fp_fusion=False,
    )


def _start_across(raw: torch.Tensor, own: Grouped, out: torch.Tensor) -> None:
    """Likewise where rows lie together."""
    lines, columns = len(raw) // own.rows_together, out.shape[1]
    raw, step = raw.view(lines, -1), own.code_bytes(own.group_size)
    factors, first = _factors(raw, own, columns * own.rows_together)
    _make_plain_across[(lines, triton.cdiv(columns, _COLUMNS))](
        raw,
        factors,
        out,
        columns,
        raw.stride(0),
        factors.stride(0),
        first,
        out.stride(0),
        bits=own.code_bits,
        size=own.group_size,
        step=step,
        block=_COLUMNS,
        enable_fp_fusion=False,
    )


def _factors(raw: torch.Tensor, own: Grouped, columns: int) -> tuple[Any, int]:
    """The rows as numbers of a factor's type, and the place of a row's first one."""
    kind = torch.float32 if own.wide else torch.float16
    return raw.view(kind), own.code_bytes(columns) // own.factor_bytes


@triton.jit(do_not_specialize=["tokens"])
def _multiply(  # type: ignore[no-untyped-def]
    x,
    raw,
    factors,
    out,
    tokens,
    rows,
    groups,
    x_stride,
    raw_stride,
    factor_stride,
    first_factor,
    out_stride,
    bits: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    dot: tl.constexpr,
):
    """``block_rows`` rows by all tokens. Codes are multiplied as they are, a group at a time, which
    is exact; what is left of a group are its scale, by the product, and its minimum, by the sum of
    the tokens' numbers."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    wide_row = row.to(tl.int64)
    token = tl.arange(0, block_tokens)
    byte = tl.arange(0, step)
    is_row, is_token = row < rows, (token < tokens)[:, None]
    codes_at = raw + (wide_row * raw_stride)[None, :] + byte[:, None]
    factors_at = factors + wide_row * factor_stride + first_factor
    x_at = x + token[:, None] * x_stride + byte[None, :]
    sums = tl.zeros([block_tokens, block_rows], tl.float32)
    for group in range(groups):
        codes = tl.load(codes_at + group * step, mask=is_row[None, :], other=0)
        scale = tl.load(factors_at + group, mask=is_row, other=0.0).to(tl.float32)
        lowest = tl.load(factors_at + groups + group, mask=is_row, other=0.0).to(tl.float32)
        some = tl.load(x_at + group * size, mask=is_token, other=0.0)
        total = tl.sum(some.to(tl.float32), 1)
        if bits == 4:
            found = tl.dot(some.to(dot), (codes & 15).to(dot), input_precision="ieee")
            others = tl.load(x_at + group * size + step, mask=is_token, other=0.0)
            found = tl.dot(others.to(dot), (codes >> 4).to(dot), found, input_precision="ieee")
            total += tl.sum(others.to(tl.float32), 1)
        else:
            found = tl.dot(some.to(dot), codes.to(dot), input_precision="ieee")
        sums += found * scale[None, :] + total[:, None] * lowest[None, :]
    target = out + token[:, None] * out_stride + row[None, :]
    tl.store(target, sums, mask=is_token & is_row[None, :])


def multiply(x: torch.Tensor, raw: torch.Tensor, number_format: Grouped) -> torch.Tensor | None:
    """x [tokens, columns] times the rows of raw uint8 [rows, row bytes], in float32 [tokens, rows];
    None where there are more tokens, or smaller groups, than this pays for, or rows lie together.

    The compressed rows are read once, a quarter of what plain ones take in bfloat16; these would
    besides be written first.
    """
    (tokens, columns), rows = x.shape, raw.shape[0]
    size, bits = number_format.group_size, number_format.code_bits
    step = number_format.code_bytes(size)
    if number_format.across or tokens > _TOKENS or x.stride(1) != 1:
        return None
    if step < _LEAST_STEP or step != power_of_two(step):
        return None
    factors, first = _factors(raw, number_format, columns)
    out = torch.empty(tokens, rows, dtype=torch.float32, device=x.device)
    _multiply[(triton.cdiv(rows, _ROWS),)](
        x,
        raw,
        factors,
        out,
        tokens,
        rows,
        columns // size,
        x.stride(0),
        raw.stride(0),
        factors.stride(0),
        first,
        out.stride(0),
        bits=bits,
        size=size,
        step=step,
        block_tokens=_TOKENS,
        block_rows=_ROWS,
        dot=dot_type(x),
        num_stages=_STAGES,
        enable_fp_fusion=True,
    )
    return out
