"""New keys and values put into their pages on a CUDA device, compressed on the way or as they are.

The same bits as the reference in ``kernels.grouped`` makes: divisions are rounded to the nearest,
ties of codes go to the even one.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from freight.kernels.cuda.launch import power_of_two
from freight.kernels.pages import Pages

__all__ = ["append", "append_plain"]

_MOST = tl.constexpr(65504.0)
_WHOLE = tl.constexpr(8388608.0)
"""2^23: a float32 that has this added has no places left behind the point."""
_BYTES: Final = 1024
"""Codes that a program makes: 8 for each thread of 4 warps."""
_MOST_TOKENS: Final = 32
_HEADS: Final = 8
_COLUMNS: Final = 128


@triton.jit
def _numbers(at, inside):  # type: ignore[no-untyped-def]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -_MOST), _MOST)


@triton.jit
def _half(x):  # type: ignore[no-untyped-def]
    """The nearest float16; zero has no sign."""
    half = x.to(tl.float16)
    return tl.where(half == 0.0, 0.0, half).to(tl.float16)


@triton.jit
def _codes(x, lowest, step, levels):  # type: ignore[no-untyped-def]
    divisor = tl.where(step > 0.0, step, 1.0)[:, :, None] + tl.zeros_like(x)
    code = tl.div_rn(x - lowest[:, :, None], divisor)
    code = tl.minimum(tl.maximum(code, 0.0), levels)
    code = (code + _WHOLE) - _WHOLE
    return tl.where(step[:, :, None] > 0.0, code, 0.0).to(tl.uint8)


@triton.jit(do_not_specialize=["num_tokens"])
def _append(  # type: ignore[no-untyped-def]
    x,
    token_pages,
    token_places,
    raw,
    halves,
    num_tokens,
    token_stride,
    head_stride,
    number_stride,
    page_bytes,
    head_bytes,
    token_bytes,
    first_byte,
    code_bytes,
    levels,
    bits: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    groups: tl.constexpr,
    padded_step: tl.constexpr,
    padded_groups: tl.constexpr,
    block: tl.constexpr,
):
    """``block`` tokens of a head: blocks are [tokens, groups, numbers], of 4 bits in halves."""
    token, head = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1)
    group, place = tl.arange(0, padded_groups), tl.arange(0, padded_step)
    is_token = token < num_tokens
    is_group = is_token[:, None] & (group < groups)[None, :]
    inside = is_group[:, :, None] & (place < step)[None, None, :]
    token = token.to(tl.int64)
    column = group[None, :, None] * size + place[None, None, :]
    at = x + (token * token_stride)[:, None, None] + head * head_stride + column * number_stride
    low = _numbers(at, inside)
    least = tl.min(tl.where(inside, low, _MOST), 2)
    largest = tl.max(tl.where(inside, low, -_MOST), 2)
    if bits == 4:
        high = _numbers(at + step * number_stride, inside)
        least = tl.minimum(least, tl.min(tl.where(inside, high, _MOST), 2))
        largest = tl.maximum(largest, tl.max(tl.where(inside, high, -_MOST), 2))
    lowest16 = _half(least)
    lowest = lowest16.to(tl.float32)
    span = tl.maximum(largest - lowest, 0.0)
    scale16 = _half(tl.div_rn(span, tl.zeros_like(span) + levels))
    scale = scale16.to(tl.float32)
    codes = _codes(low, lowest, scale, levels)
    if bits == 4:
        codes = codes | (_codes(high, lowest, scale, levels) << 4).to(tl.uint8)
    page = tl.load(token_pages + token, mask=is_token, other=0)
    own = tl.load(token_places + token, mask=is_token, other=0)
    target = page * page_bytes + own * token_bytes + first_byte + head * head_bytes
    byte = group[None, :, None] * step + place[None, None, :]
    tl.store(raw + target[:, None, None] + byte, codes, mask=inside)
    factors = halves + ((target + code_bytes) // 2)[:, None] + group[None, :]
    tl.store(factors, scale16, mask=is_group)
    tl.store(factors + groups, lowest16, mask=is_group)


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
    padded_step, padded_groups = power_of_two(step), power_of_two(groups)
    block = max(1, min(_MOST_TOKENS, _BYTES // (padded_step * padded_groups)))
    for first_byte, x in ((0, k), (pages.num_heads * head_bytes, v))[: pages.num_parts]:
        _append[(triton.cdiv(len(token_pages), block), pages.num_heads)](
            x,
            token_pages,
            token_places,
            pages.raw,
            pages.raw.view(torch.float16),
            len(token_pages),
            *x.stride(),
            pages.raw.stride(0),
            head_bytes,
            pages.token_bytes,
            first_byte,
            own.code_bytes(pages.width),
            float(own.levels),
            bits=own.code_bits,
            size=own.group_size,
            step=step,
            groups=groups,
            padded_step=padded_step,
            padded_groups=padded_groups,
            block=block,
            enable_fp_fusion=False,  # to the bit
        )


@triton.jit
def _append_plain(  # type: ignore[no-untyped-def]
    k,
    v,
    token_pages,
    token_places,
    raw,
    heads,
    width,
    k_stride,
    k_head,
    v_stride,
    v_head,
    page_stride,
    head_stride,
    values_at,
    block_heads: tl.constexpr,
    block: tl.constexpr,
):
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    place = tl.load(token_places + token) * width
    own = raw + tl.load(token_pages + token) * page_stride + place + head * head_stride
    for first in range(0, width, block):
        column = (first + tl.arange(0, block))[None, :]
        inside = (head < heads) & (column < width)
        keys = tl.load(k + token * k_stride + head * k_head + column, mask=inside)
        tl.store(own + column, keys, mask=inside)
        values = tl.load(v + token * v_stride + head * v_head + column, mask=inside)
        tl.store(own + values_at + column, values, mask=inside)


def append_plain(
    pages: Pages,
    token_pages: torch.Tensor,
    token_places: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> bool:
    """Keys and values k, v [T, K, H] into plain pages, each token into its page and place; False
    where a head's numbers do not lie side by side, or are of another type."""
    if k.stride(2) != 1 or v.stride(2) != 1 or not k.dtype == v.dtype == pages.dtype:
        return False
    raw = pages.raw.view(pages.dtype)
    head_stride = pages.page_tokens * pages.width
    _append_plain[(len(token_pages), triton.cdiv(pages.num_heads, _HEADS))](
        k,
        v,
        token_pages,
        token_places,
        raw,
        pages.num_heads,
        pages.width,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        raw.stride(0),
        head_stride,
        pages.heads_to_values * head_stride,
        block_heads=_HEADS,
        block=_COLUMNS,
    )
    return True
