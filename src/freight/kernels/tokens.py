"""Norms, rotations and activations of tokens: by loops of our own on a CPU, each number once from
memory and back, on a device by kernels where they work; by torch elsewhere, step by step.

Few tokens gain most: a step of torch's takes as long to call as their numbers do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from freight.kernels.cuda.choice import kernels_of
from freight.kernels.sharing import share_alike
from freight.kernels.threads import Loops, as_numbers, find_loops, has_words
from freight.model.workspace import Workspace

__all__ = ["activate", "normalise", "rotate"]

_LEAST_SHARED: Final = 1 << 17
"""Numbers that are worth another thread."""
_LEAST_ACTIVATED: Final = 1 << 15
"""Likewise of those that an exponential is made for."""
_NOTHING: Final = np.empty(0, np.float32)


def normalise(
    x: torch.Tensor,
    out: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_heads: int,
    eps: float,
    centred: bool,
    adds_one: bool = False,
    workspace: Workspace,
) -> None:
    """out [T, D] = each head of x [T, D] divided by the root of its mean square, ``centred`` first
    where asked for, times the gain [D / heads], or [D] where each has its own, with one added if it
    ``adds_one``, plus the bias, each of any float type. ``out`` may be x; torch's steps need the
    workspace."""
    if (kernel := kernels_of(x.device).normalise) is not None and kernel(
        x,
        out,
        gain,
        bias,
        num_heads=num_heads,
        eps=eps,
        centred=centred,
        adds_one=adds_one,
    ):
        return
    gain = gain.float() + 1.0 if adds_one else gain.float()
    bias = None if bias is None else bias.float()
    loops = find_loops() if has_words(x) and has_words(out) and x.dtype == out.dtype else None
    if loops is None:
        _normalise_by_torch(x, out, gain, bias, num_heads, eps, workspace, centred=centred)
        return
    width = x.shape[1] // num_heads
    source, target = as_numbers(x), as_numbers(out)
    pitch, out_pitch = x.stride(0), out.stride(0)
    factors = gain.numpy()
    added = _NOTHING if bias is None else bias.numpy()

    def work(first: int, last: int) -> None:
        loops.tokens.normalise(
            first,
            last,
            num_heads,
            width,
            source,
            pitch,
            factors,
            added,
            eps,
            centred,
            target,
            out_pitch,
        )

    share_alike(x.shape[0], work, -(-_LEAST_SHARED // x.shape[1]))


def _normalise_by_torch(
    x: torch.Tensor,
    out: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    eps: float,
    workspace: Workspace,
    *,
    centred: bool,
) -> None:
    if num_heads > 1:
        width = x.shape[1] // num_heads
        x, out = x.view(-1, width), out.view(-1, width)
    with workspace.frame():
        wide = workspace.take(*x.shape, dtype=torch.float32)
        wide.copy_(x)
        if centred:
            wide.sub_(wide.mean(dim=-1, keepdim=True))
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        wide.mul_(length.square_().div_(x.shape[1]).add_(eps).rsqrt_())
        if len(gain) > x.shape[1]:
            wide.view(-1, num_heads, x.shape[1]).mul_(gain.view(num_heads, -1))
        else:
            wide.mul_(gain)
        if bias is not None:
            wide.add_(bias)
        out.copy_(wide)


def rotate(
    x: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    workspace: Workspace,
    *,
    pairs: bool = False,
    first: int = 0,
) -> None:
    """Turn numbers of each head of x [T, D], in place, from its ``first`` on: as many as cos and
    sin [T, r] have with as many that follow, or as many ``pairs`` of neighbours."""
    kernel = None if first else kernels_of(x.device).rotate
    if kernel is not None and kernel(x, num_heads, cos, sin, pairs=pairs):
        return
    loops = find_loops() if has_words(x) and has_words(cos) and has_words(sin) else None
    if loops is None or not x.dtype == cos.dtype == sin.dtype:
        _rotate_by_torch(x, num_heads, cos, sin, workspace, pairs=pairs, first=first)
        return
    _rotate_by_loops(loops, x, num_heads, cos, sin, pairs=pairs, first=first)


def _rotate_by_loops(
    loops: Loops,
    x: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairs: bool,
    first: int,
) -> None:
    assert cos.stride(0) == sin.stride(0)
    numbers, pitch, width = as_numbers(x)[first:], x.stride(0), x.shape[1] // num_heads
    cosines, sines, angle_pitch = as_numbers(cos), as_numbers(sin), cos.stride(0)
    half = cos.shape[1]
    loop = loops.tokens.rotate_pairs if pairs else loops.tokens.rotate

    def work(begin: int, end: int) -> None:
        loop(begin, end, num_heads, width, numbers, pitch, cosines, sines, half, angle_pitch)

    share_alike(x.shape[0], work, -(-_LEAST_SHARED // x.shape[1]))


def _rotate_by_torch(
    x: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    workspace: Workspace,
    *,
    pairs: bool,
    first: int,
) -> None:
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    heads = x.view(x.shape[0], num_heads, -1)[..., first:]
    if pairs:
        low, high = heads[..., : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        low, high = heads[..., :half], heads[..., half : 2 * half]
    with workspace.frame():
        turned = workspace.take(*low.shape, dtype=x.dtype)
        torch.mul(high, cos, out=turned)
        turned.addcmul_(low, sin)
        low.mul_(cos).addcmul_(high, sin, value=-1)
        high.copy_(turned)


def activate(x: torch.Tensor, function: str, other: torch.Tensor | None = None) -> None:
    """x = f(x) in place, times ``other`` of the same shape if there is one; [T, D] both. There are
    loops for what torch takes long for, and for silu with what it gates."""
    loop = _find_loop(x, function, other)
    if loop is None:
        _FUNCTIONS[function](x)
        if other is not None:
            x.mul_(other)
        return
    numbers, pitch, width = as_numbers(x), x.stride(0), x.shape[1]
    others = numbers[:0] if other is None else as_numbers(other)
    other_pitch = 0 if other is None else other.stride(0)

    def work(first: int, last: int) -> None:
        loop(first, last, width, numbers, pitch, others, other_pitch)

    share_alike(x.shape[0], work, -(-_LEAST_ACTIVATED // width))


def _find_loop(
    x: torch.Tensor, function: str, other: torch.Tensor | None
) -> Callable[..., None] | None:
    has_loop = function == "gelu_tanh" or (function == "silu" and other is not None)
    has_loop &= has_words(x) and (other is None or (has_words(other) and other.dtype == x.dtype))
    loops = find_loops() if has_loop else None
    if loops is None:
        return None
    found: Callable[..., None] = (
        loops.tokens.gated_silu if function == "silu" else loops.tokens.gelu_tanh
    )
    return found


def _silu(x: torch.Tensor) -> None:
    F.silu(x, inplace=True)


def _relu(x: torch.Tensor) -> None:
    x.relu_()


def _relu2(x: torch.Tensor) -> None:
    x.relu_().square_()


def _gelu(x: torch.Tensor) -> None:
    torch.ops.aten.gelu_(x)


def _gelu_tanh(x: torch.Tensor) -> None:
    torch.ops.aten.gelu_(x, approximate="tanh")


_FUNCTIONS: Final[Mapping[str, Callable[[torch.Tensor], None]]] = {
    "silu": _silu,
    "relu": _relu,
    "relu2": _relu2,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
