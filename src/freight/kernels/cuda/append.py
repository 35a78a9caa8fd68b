"""New keys and values compressed straight into their pages, on a CUDA device.

The same bits as the reference in ``kernels.grouped`` makes: divisions are rounded to the nearest,
ties of codes go to the even one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freight.kernels.cuda.launch import power_of_two
from freight.kernels.pages import Pages

__all__ = ["append"]

_MOST = tl.constexpr(65504.0)
_WHOLE = tl.constexpr(8388608.0)
"""2^23: a float32 that has this added has no places left behind the point."""


@triton.jit
def _numbers(at, inside):  # type: ignore[no-untyped-def]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -_MOST), _MOST)


@triton.jit
def _least(x, inside):  # type: ignore[no-untyped-def]
    return tl.min(tl.where(inside, x, _MOST), 1)


@triton.jit
def _largest(x, inside):  # type: ignore[no-untyped-def]
    return tl.max(tl.where(inside, x, -_MOST), 1)


@triton.jit
def _half(x):  # type: ignore[no-untyped-def]
    """The nearest float16; zero has no sign."""
    half = x.to(tl.float16)
    return tl.where(half == 0.0, 0.0, half).to(tl.float16)


@triton.jit
def _codes(x, lowest, step, levels):  # type: ignore[no-untyped-def]
    divisor = tl.where(step > 0.0, step, 1.0)[:, None] + tl.zeros_like(x)
    code = tl.div_rn(x - lowest[:, None], divisor)
    code = tl.minimum(tl.maximum(code, 0.0), levels)
    code = (code + _WHOLE) - _WHOLE
    return tl.where(step[:, None] > 0.0, code, 0.0).to(tl.uint8)


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    raw,
    halves,
    levels,
    bits: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    groups: tl.constexpr,
    padded_step: tl.constexpr,
    padded_groups: tl.constexpr,
):
    """A head's numbers to its bytes; ``halves`` are where its scales begin."""
    group, place = tl.arange(0, padded_groups), tl.arange(0, padded_step)
    is_group = group < groups
    inside = is_group[:, None] & (place < step)[None, :]
    at = x + (group[:, None] * size + place[None, :]) * x_stride
    low = _numbers(at, inside)
    least, largest = _least(low, inside), _largest(low, inside)
    if bits == 4:
        high = _numbers(at + step * x_stride, inside)
        least = tl.minimum(least, _least(high, inside))
        largest = tl.maximum(largest, _largest(high, inside))
    lowest16 = _half(least)
    lowest = lowest16.to(tl.float32)
    span = tl.maximum(largest - lowest, 0.0)
    scale16 = _half(tl.div_rn(span, tl.zeros_like(span) + levels))
    scale = scale16.to(tl.float32)
    codes = _codes(low, lowest, scale, levels)
    if bits == 4:
        codes = codes | (_codes(high, lowest, scale, levels) << 4).to(tl.uint8)
    tl.store(raw + group[:, None] * step + place[None, :], codes, mask=inside)
    tl.store(halves + group, scale16, mask=is_group)
    tl.store(halves + groups + group, lowest16, mask=is_group)


@triton.jit
def _append(  # type: ignore[no-untyped-def]
    k,
    v,
    token_pages,
    token_places,
    raw,
    halves,
    k_token,
    k_head,
    k_number,
    v_token,
    v_head,
    v_number,
    page_stride,
    head_stride,
    token_stride,
    first_value,
    code_bytes,
    levels,
    bits: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    groups: tl.constexpr,
    padded_step: tl.constexpr,
    padded_groups: tl.constexpr,
):
    """Keys and values of one token and head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, place = tl.load(token_pages + token), tl.load(token_places + token)
    at = page * page_stride + head * head_stride + place * token_stride
    _quantise(
        k + token * k_token + head * k_head,
        k_number,
        raw + at,
        halves + (at + code_bytes) // 2,
        levels,
        bits,
        size,
        step,
        groups,
        padded_step,
        padded_groups,
    )
    at += first_value
    _quantise(
        v + token * v_token + head * v_head,
        v_number,
        raw + at,
        halves + (at + code_bytes) // 2,
        levels,
        bits,
        size,
        step,
        groups,
        padded_step,
        padded_groups,
    )


def append(
    pages: Pages,
    token_pages: torch.Tensor,
    token_places: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Keys and values k, v [T, K, H] into compressed pages, each token into its page and place."""
    own = pages.number_format
    assert own is not None
    head_bytes = pages.page_tokens * pages.token_bytes
    step, groups = own.code_bytes(own.group_size), pages.width // own.group_size
    _append[(len(token_pages), pages.num_heads)](
        k,
        v,
        token_pages,
        token_places,
        pages.raw,
        pages.raw.view(torch.float16),
        *k.stride(),
        *v.stride(),
        pages.raw.stride(0),
        head_bytes,
        pages.token_bytes,
        pages.num_heads * head_bytes,
        own.code_bytes(pages.width),
        float(own.levels),
        bits=own.code_bits,
        size=own.group_size,
        step=step,
        groups=groups,
        padded_step=power_of_two(step),
        padded_groups=power_of_two(groups),
        num_warps=1,  # a head's numbers, of which a warp's threads have a few each
    )
