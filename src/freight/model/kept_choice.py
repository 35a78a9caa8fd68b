"""What attention over kept keys shares, whichever they are: how many are looked at at once, which
of them an indexer chooses, and what each counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from freight.model.frame import LayerStates
from freight.model.tiles import KEPT_BYTES

__all__ = ["NONE", "best_keys", "blocks", "clear_new", "shares_of", "together"]

NONE: Final = float("-inf")


def clear_new(states: LayerStates) -> None:
    """What new rows find where they will keep keys may be no numbers, which even a share of 0 would
    pass on."""
    for seat in states.rows.seats[states.rows.is_new > 0].tolist():
        states.columns[seat].zero_()


def together(count: int, numbers: int) -> Iterator[slice]:
    """Rows, so many at a time that what is gathered of them, so many ``numbers`` each, is no more
    than some megabytes; or one."""
    most = max(1, KEPT_BYTES // (4 * numbers))
    return (slice(first, min(first + most, count)) for first in range(0, count, most))


def blocks(count: int, most: int, numbers: int) -> Iterator[tuple[int, int]]:
    """Queries likewise, ``most`` of them at once at most."""
    step = min(most, max(1, KEPT_BYTES // (4 * numbers)))
    return ((first, min(first + step, count)) for first in range(0, count, step))


def best_keys(
    likeness: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor, most: int
) -> torch.Tensor:
    """Places [T, most] of the keys whose likeness [T, heads, keys], what is above zero weighed by
    head [T, heads], is highest, of those that are ``seen`` [T, keys] first. What all of it is
    multiplied by does not matter."""
    scores = torch.bmm(weights.float()[:, None], likeness.relu_())[:, 0]
    return scores.masked_fill_(~seen, NONE).topk(most, dim=-1).indices


def shares_of(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dim of scores [T, N, keys], in place, beside a sink [1, N, 1] of each
    head if there are any."""
    highest = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    shares = scores.sub_(highest).exp_()
    sums = shares.sum(dim=-1, keepdim=True)
    return shares.div_(sums if sinks is None else sums + (sinks - highest).exp())
