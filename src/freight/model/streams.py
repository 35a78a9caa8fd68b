"""The steps of a residual stream that is several, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from freight.kernels.streams import collapse_streams, expand_streams, share_streams
from freight.model.frame import Frame
from freight.model.stream_steps import Average, Collapse, Expand, Spread
from freight.model.tiles import STREAM_TOKENS

__all__ = ["STREAM_STEPS"]


def _spread(step: Spread, frame: Frame) -> None:
    x = frame.values[step.x]
    out = frame.new(step.out, x, x.shape[1] * step.num_streams)
    _apart(out, step.num_streams).copy_(x[:, None])


def _average(step: Average, frame: Frame) -> None:
    x = frame.values[step.x]
    out = frame.new(step.out, x, x.shape[1] // step.num_streams)
    for some in _tiles(len(x)):
        with frame.workspace.frame():
            wide = _widened(x[some], frame)
            mean = frame.workspace.take(len(wide), out.shape[1], dtype=torch.float32)
            torch.mean(_apart(wide, step.num_streams), dim=1, out=mean)
            out[some].copy_(mean)


def _collapse(step: Collapse, frame: Frame) -> None:
    x, count = frame.values[step.x], step.num_streams
    out = frame.new(step.out, x, x.shape[1] // count)
    weight = frame.vector(step.weight).view(step.num_mappings, -1)
    shares = None if step.shares is None else frame.new(step.shares, x, step.share_columns)
    with frame.workspace.frame():
        mapped = frame.workspace.take(len(x), step.num_mappings, dtype=torch.float32)
        base, factors = frame.vector(step.base), _factors(step, frame)
        is_done = collapse_streams(
            x, weight, factors, base, out, mapped, eps=step.eps, floor=step.floor
        )
        for some in () if is_done else _tiles(len(x)):
            with frame.workspace.frame():
                wide = _widened(x[some], frame)
                own = torch.mm(wide, weight.t(), out=mapped[some])
                length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
                own.mul_(length.square_().div_(x.shape[1]).add_(step.eps).rsqrt_())
                own.mul_(factors).add_(base)
                weights = own[:, None, :count].sigmoid().add_(step.floor)
                total = frame.workspace.take(len(wide), 1, out.shape[1], dtype=torch.float32)
                torch.bmm(weights, _apart(wide, count), out=total)
                out[some].copy_(total[:, 0])
        if shares is not None:
            _share(step, mapped, shares)


def _factors(step: Collapse, frame: Frame) -> torch.Tensor:
    """What mappings [M] are multiplied by, each part by its own."""
    own, count = frame.vector(step.scale), step.num_streams
    parts = [count, count, step.num_mappings - 2 * count][: len(own)]
    return torch.cat([factor.expand(size) for factor, size in zip(own, parts, strict=True)])


def _share(step: Collapse, mapped: torch.Tensor, shares: torch.Tensor) -> None:
    count = step.num_streams
    if share_streams(
        mapped,
        shares,
        count,
        magnitude=step.magnitude,
        least_share=step.least_share,
        rounds=step.rounds,
        floor=step.floor,
    ):
        return
    own = mapped[:, count : 2 * count].sigmoid().mul_(step.magnitude).add_(step.least_share)
    shares[:, :count].copy_(own)
    if not step.rounds:
        return
    mixes = mapped[:, 2 * count :].reshape(-1, count, count).softmax(-1).add_(step.floor)
    mixes.div_(mixes.sum(-2, keepdim=True).add_(step.floor))
    for _ in range(step.rounds - 1):
        mixes.div_(mixes.sum(-1, keepdim=True).add_(step.floor))
        mixes.div_(mixes.sum(-2, keepdim=True).add_(step.floor))
    shares[:, count:].copy_(mixes.view(len(mapped), -1))


def _expand(step: Expand, frame: Frame) -> None:
    x, y, count = frame.values[step.x], frame.values[step.y], step.num_streams
    shares = frame.values[step.shares]
    if expand_streams(x, y, shares, count, mixed=step.mixed):
        return
    for some in _tiles(len(x)):
        with frame.workspace.frame():
            streams = _apart(_widened(x[some], frame), count)
            own = _widened(shares[some], frame)
            made = frame.workspace.take(*streams.shape, dtype=torch.float32)
            torch.mul(own[:, :count, None], _widened(y[some], frame)[:, None], out=made)
            if step.mixed:
                mixes = own[:, count:].reshape(-1, count, count)
                made.baddbmm_(mixes.transpose(1, 2), streams)
            else:
                made.add_(streams)
            _apart(x[some], count).copy_(made)


def _tiles(num_tokens: int) -> Iterator[slice]:
    return (slice(first, first + STREAM_TOKENS) for first in range(0, num_tokens, STREAM_TOKENS))


def _widened(x: torch.Tensor, frame: Frame) -> torch.Tensor:
    """In float32, one row after the other."""
    return frame.workspace.take(*x.shape, dtype=torch.float32).copy_(x)


def _apart(x: torch.Tensor, num_streams: int) -> torch.Tensor:
    """[T, S D] as [T, S, D]"""
    return x.view(len(x), num_streams, -1)


STREAM_STEPS: Final[Mapping[type, Callable[[Any, Frame], None]]] = {
    Average: _average,
    Collapse: _collapse,
    Expand: _expand,
    Spread: _spread,
}
