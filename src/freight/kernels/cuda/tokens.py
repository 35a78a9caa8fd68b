"""Norms and rotations of tokens on a CUDA device, one launch each; the references are torch's steps
in ``kernels.tokens``.

A step of torch's takes as long to issue as a small one runs, and a norm is nine. Numbers are
float32 between reading and writing. Sizes of a model are no constants of the kernels: what was
tried is what runs.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

__all__ = ["normalise", "rotate"]

_COLUMNS: Final = 1024
_FEW_COLUMNS: Final = 128
"""Of a head, or less: a program takes no more."""
_PAIRS: Final = 64
_HEADS: Final = 16


@triton.jit
def _numbers(at, column, width):  # type: ignore[no-untyped-def]
    return tl.load(at + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    out,
    gain,
    bias,
    eps,
    heads,
    width,
    x_stride,
    out_stride,
    gain_stride,
    centred: tl.constexpr,
    adds_one: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    """One head of one token, ``block`` columns at a time."""
    token, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    own = x + token * x_stride + head * width
    target = out + token * out_stride + head * width
    column = tl.arange(0, block)
    mean = 0.0
    if centred:
        sums = tl.zeros([block], tl.float32)
        for first in range(0, width, block):
            sums += _numbers(own, first + column, width)
        mean = tl.sum(sums, 0) / width
    squares = tl.zeros([block], tl.float32)
    for first in range(0, width, block):
        value = _numbers(own, first + column, width) - mean
        squares += tl.where(first + column < width, value * value, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    for first in range(0, width, block):
        value = (_numbers(own, first + column, width) - mean) * factor
        gains = _numbers(gain + head * gain_stride, first + column, width)
        if adds_one:
            gains += 1.0
        value *= gains
        if has_bias:
            value += _numbers(bias, first + column, width)
        inside = first + column < width
        tl.store(target + first + column, value.to(out.dtype.element_ty), mask=inside)


def normalise(
    x: torch.Tensor,
    out: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_heads: int,
    eps: float,
    centred: bool,
    adds_one: bool,
) -> bool:
    """As ``kernels.tokens.normalise``; False where columns do not lie side by side."""
    if x.stride(1) != 1 or out.stride(1) != 1 or x.numel() == 0:
        return False
    width = x.shape[1] // num_heads
    _normalise[(x.shape[0] * num_heads,)](
        x,
        out,
        gain,
        gain if bias is None else bias,
        eps,
        num_heads,
        width,
        x.stride(0),
        out.stride(0),
        width if gain.numel() > width else 0,
        centred=centred,
        adds_one=adds_one,
        has_bias=bias is not None,
        block=_FEW_COLUMNS if width <= _FEW_COLUMNS else _COLUMNS,
    )
    return True


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    heads,
    width,
    half,
    x_stride,
    cos_stride,
    sin_stride,
    step,
    apart,
    block_heads: tl.constexpr,
    block: tl.constexpr,
):
    """Some heads of one token: numbers ``step`` apart, each with the one ``apart`` from it."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    for first in range(0, half, block):
        place = (first + tl.arange(0, block))[None, :]
        inside = (head < heads) & (place < half)
        c = tl.load(cos + token * cos_stride + place, mask=place < half, other=0.0).to(tl.float32)
        s = tl.load(sin + token * sin_stride + place, mask=place < half, other=0.0).to(tl.float32)
        at = x + token * x_stride + head * width + place * step
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + apart, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (low * c - high * s).to(x.dtype.element_ty), mask=inside)
        tl.store(at + apart, (high * c + low * s).to(x.dtype.element_ty), mask=inside)


def rotate(
    x: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor, *, pairs: bool
) -> bool:
    """As ``kernels.tokens.rotate``; False where columns do not lie side by side."""
    if x.stride(1) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1 or x.numel() == 0:
        return False
    half = cos.shape[1]
    _rotate[(x.shape[0], triton.cdiv(num_heads, _HEADS))](
        x,
        cos,
        sin,
        num_heads,
        x.shape[1] // num_heads,
        half,
        x.stride(0),
        cos.stride(0),
        sin.stride(0),
        2 if pairs else 1,
        1 if pairs else half,
        block_heads=_HEADS,
        block=_PAIRS,
    )
    return True
