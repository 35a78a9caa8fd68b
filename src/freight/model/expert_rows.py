"""Rows of tokens to experts and back, as functions of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from freight.model.expert_steps import Combine, Dispatch
from freight.model.frame import Frame

__all__ = ["combine", "dispatch"]

_ADDED_TOGETHER: Final = 256


def dispatch(step: Dispatch, frame: Frame) -> None:
    x = frame.values[step.x]
    assert frame.chosen is not None
    chosen = frame.workspace.take(frame.chosen.shape[0], x.shape[1], dtype=x.dtype)
    frame.values[step.out] = torch.index_select(x, 0, frame.chosen, out=chosen)
    if step.weighs:
        assert frame.shares is not None
        chosen.mul_(frame.shares[:, None])


def combine(step: Combine, frame: Frame) -> None:
    assert frame.chosen is not None and frame.shares is not None
    update = frame.values[step.y]
    if step.weighs:
        update.mul_(frame.shares[:, None])
    if frame.together is None:
        _add_rows(frame.values[step.x], frame.chosen, update)
        return
    for places, tokens in frame.together.rounds:
        for some in _pieces(len(tokens)):
            _add_rows(frame.values[step.x], tokens[some], update[places[some]])


def _add_rows(x: torch.Tensor, ids: torch.Tensor, update: torch.Tensor) -> None:
    """Rows of ``update`` onto the rows ``ids`` of x. To rows of no even pitch torch adds one by
    one, thirty times as slowly; where none is named twice they are taken out and put back."""
    rows, numbers = _side_by_side(x, ids)
    is_odd = not rows.is_contiguous() and rows.device.type == "cpu"
    if is_odd and bool((numbers[1:] > numbers[:-1]).all()):
        for some in _pieces(len(numbers)):
            own = numbers[some]
            rows[own] = rows.index_select(0, own).add_(update[some])
    else:
        rows.index_add_(0, numbers, update)


def _pieces(count: int) -> Iterator[slice]:
    """Rows, so many at a time that what is made of them takes a few megabytes at most."""
    return (slice(first, first + _ADDED_TOGETHER) for first in range(0, count, _ADDED_TOGETHER))


def _side_by_side(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that lie one after the other, and which of them the rows ``ids`` of x are: where x is
    part of wider rows, torch adds to these some four times as fast."""
    width, (pitch, step) = x.shape[1], x.stride()
    if step != 1 or pitch == width or pitch % width:
        return x, ids
    times = pitch // width
    return x.as_strided(((len(x) - 1) * times + 1, width), (width, 1)), ids * times
