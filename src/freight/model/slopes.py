"""The steps of scores that sink with the distance as functions of tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from freight.model.frame import Frame
from freight.model.slope_steps import Narrow, Widen, slopes_of

__all__ = ["narrow", "widen"]

_WHOLE: Final = 256
_LOWEST: Final = -60_000.0
"""All scores of a query have it, and float16 holds it."""


def widen(step: Widen, frame: Frame) -> None:
    x = frame.values[step.x]
    count, width = len(x), x.shape[1] // step.num_heads
    out = frame.new(step.out, x, x.shape[1] + step.num_heads * step.columns)
    heads = out.view(count, step.num_heads, -1)
    heads[..., :width].copy_(x.view(count, step.num_heads, width))
    more = heads[..., width:].zero_()
    if step.role == "v":
        return
    assert frame.positions is not None
    positions = frame.positions[:, None]
    if step.role == "k":
        more[..., :2].copy_((positions // _WHOLE)[..., None])
        more[..., 2:4].copy_((positions % _WHOLE)[..., None])
        more[..., 4].fill_(1.0)
        return
    slopes = _slopes(step.num_heads, step.span, step.scale, x.device)
    kept = slopes.to(x.dtype).float()
    for place, own in enumerate((kept, slopes - kept)):
        more[..., place].copy_(own * _WHOLE)
        more[..., 2 + place].copy_(own)
    with frame.workspace.frame():
        own_place = frame.workspace.take(count, step.num_heads, dtype=torch.float32)
        torch.mul(positions, -slopes, out=own_place).clamp_(min=_LOWEST)
        more[..., 4].copy_(own_place)


@lru_cache(maxsize=8)
def _slopes(num_heads: int, span: float, scale: float, device: torch.device) -> torch.Tensor:
    """Those of heads over the scale [N], kept: sending them to a device each time would wait."""
    return torch.tensor(slopes_of(num_heads, span), device=device) / scale


def narrow(step: Narrow, frame: Frame) -> None:
    x = frame.values[step.x]
    heads = x.view(len(x), step.num_heads, -1)[..., : -step.columns]
    out = frame.new(step.out, x, step.num_heads * heads.shape[-1])
    out.view(heads.shape).copy_(heads)
