"""Convolutions, and the gated delta rule or scans, on a CUDA device, one launch over rows of any
lengths; the references are torch's steps in ``kernels.recurrence``.

A program has some columns of one row's state in registers and takes the row's tokens one by one: a
state is read and written once, however many there are. Numbers are float32 between reading and
writing.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from freight.kernels.cuda.launch import power_of_two
from freight.kernels.row_states import RowStates
from freight.kernels.state_heads import StateHeads

__all__ = ["convolve", "recur"]

_COLUMNS: Final = 128
_MOST_TAPS: Final = 4
_STATE_COLUMNS: Final = 32
_MOST_KEY_WIDTH: Final = 256


@triton.jit
def _tap(weight, column, inside, taps, number):  # type: ignore[no-untyped-def]
    """Of four taps, of which the first may be missing."""
    place = number - (4 - taps)
    return tl.load(weight + column * taps + place, mask=inside & (place >= 0), other=0.0).to(
        tl.float32
    )


@triton.jit
def _kept(columns, column, inside, taps, width, number, is_new):  # type: ignore[no-untyped-def]
    """Of the three tokens before, of which the first may not be kept."""
    place = number - (4 - taps)
    there = inside & (place >= 0) & (is_new == 0)
    return tl.load(columns + place * width + column, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    columns,
    table,
    num_rows,
    width,
    taps,
    x_stride,
    seat_stride,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    """``block`` columns of one row."""
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    start, count = tl.load(table + row), tl.load(table + num_rows + row)
    seat, is_new = tl.load(table + 2 * num_rows + row), tl.load(table + 3 * num_rows + row)
    own = columns + seat * seat_stride
    first = _tap(weight, column, inside, taps, 0)
    second = _tap(weight, column, inside, taps, 1)
    third = _tap(weight, column, inside, taps, 2)
    last = _tap(weight, column, inside, taps, 3)
    added = tl.zeros([block], tl.float32)
    if has_bias:
        added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    before3 = _kept(own, column, inside, taps, width, 0, is_new)
    before2 = _kept(own, column, inside, taps, width, 1, is_new)
    before1 = _kept(own, column, inside, taps, width, 2, is_new)
    for token in range(count):
        place = x + (start + token) * x_stride + column
        here = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        found = before3 * first + before2 * second + before1 * third + here * last + added
        tl.store(place, found.to(x.dtype.element_ty), mask=inside)
        before3 = before2
        before2 = before1
        before1 = here
    for number in tl.static_range(3):
        place = number - (4 - taps)
        value = before3 if number == 0 else (before2 if number == 1 else before1)
        there = inside & (place >= 0)
        tl.store(own + place * width + column, value.to(columns.dtype.element_ty), mask=there)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    rows: RowStates,
) -> bool:
    """As ``kernels.recurrence.convolve``; False where there are too many taps."""
    taps, width = weight.shape[1], x.shape[1]
    if taps > _MOST_TAPS or x.stride(1) != 1 or not weight.is_contiguous():
        return False
    table = rows.table(x.device)
    _convolve[(table.shape[1], triton.cdiv(width, _COLUMNS))](
        x,
        weight,
        weight if bias is None else bias,
        columns,
        table,
        table.shape[1],
        width,
        taps,
        x.stride(0),
        columns.stride(0),
        has_bias=bias is not None,
        block=_COLUMNS,
    )
    return True


@triton.jit
def _recur(  # type: ignore[no-untyped-def]
    x,
    a,
    b,
    decay,
    bias,
    skip,
    memory,
    out,
    table,
    num_rows,
    heads,
    key_heads,
    key_width,
    value_width,
    scale,
    query_place,
    key_place,
    value_place,
    x_stride,
    a_stride,
    b_stride,
    out_stride,
    seat_stride,
    most,
    bound,
    is_delta: tl.constexpr,
    by_row: tl.constexpr,
    is_bounded: tl.constexpr,
    key_block: tl.constexpr,
    block: tl.constexpr,
):
    """``block`` columns of one head's matrix."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    key_head = head // (heads // key_heads)
    w = tl.arange(0, key_block)
    u = tl.program_id(1) * block + tl.arange(0, block)
    is_key, is_value = w < key_width, u < value_width
    start, count = tl.load(table + row), tl.load(table + num_rows + row)
    seat, is_new = tl.load(table + 2 * num_rows + row), tl.load(table + 3 * num_rows + row)
    own = memory + seat * seat_stride + head * key_width * value_width
    place = own + w[:, None] * value_width + u[None, :]
    inside = is_key[:, None] & is_value[None, :]
    state = tl.load(place, mask=inside & (is_new == 0), other=0.0)
    speed = -tl.exp(tl.load(decay + head))
    # A rate for the head, or one for each row of its matrix.
    own_rates = head * key_width + w if by_row else head + tl.zeros([1], tl.int32)
    is_rate = is_key if by_row else own_rates >= 0
    shift = tl.load(bias + own_rates, mask=is_rate, other=0.0)
    for token in range(start, start + count):
        keys = x + token * x_stride + key_head * key_width
        q = tl.load(keys + query_place + w, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(keys + key_place + w, mask=is_key, other=0.0).to(tl.float32)
        values = x + token * x_stride + value_place + head * value_width
        v = tl.load(values + u, mask=is_value, other=0.0).to(tl.float32)
        rate = tl.load(a + token * a_stride + own_rates, mask=is_rate, other=0.0).to(tl.float32)
        rate += shift
        if is_bounded:
            state *= tl.exp(-bound * tl.sigmoid(-speed * rate))[:, None]
        else:
            rate = tl.where(rate > 20.0, rate, tl.log(1.0 + tl.exp(tl.minimum(rate, 20.0))))
            state *= tl.exp(speed * rate)[:, None]
        if is_delta:
            q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
            k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            strength = most * tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
            change = (v - tl.sum(state * k[:, None], 0)) * strength
        else:
            change = v * rate
        state += k[:, None] * change[None, :]
        read = tl.sum(state * q[:, None], 0)
        if not is_delta:
            read += v * tl.load(skip + head)
        target = out + token * out_stride + head * value_width + u
        tl.store(target, read.to(out.dtype.element_ty), mask=is_value)
    tl.store(place, state, mask=inside)


def recur(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    decay: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor | None,
    memory: torch.Tensor,
    out: torch.Tensor,
    *,
    heads: StateHeads,
    rows: RowStates,
) -> bool:
    """As ``kernels.recurrence.recur``; False where a state is too wide for it."""
    strengths = a if b is None else b
    if heads.key_width > _MOST_KEY_WIDTH or x.stride(1) != 1 or out.stride(1) != 1:
        return False
    if any(own.shape[1] > 1 and own.stride(1) != 1 for own in (a, strengths)):
        return False
    table = rows.table(x.device)
    width = heads.value_width
    _recur[(table.shape[1] * heads.num_heads, triton.cdiv(width, _STATE_COLUMNS))](
        x,
        a,
        strengths,
        decay,
        bias,
        decay if skip is None else skip,
        memory,
        out,
        table,
        table.shape[1],
        heads.num_heads,
        heads.num_key_heads,
        heads.key_width,
        width,
        heads.key_width**-0.5,
        *heads.places(is_delta=b is not None),
        x.stride(0),
        a.stride(0),
        strengths.stride(0),
        out.stride(0),
        memory.stride(0),
        heads.strength,
        heads.bound or 0.0,
        is_delta=b is not None,
        by_row=heads.by_row,
        is_bounded=heads.bound is not None,
        key_block=power_of_two(heads.key_width),
        block=_STATE_COLUMNS,
    )
    return True
