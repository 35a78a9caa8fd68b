"""Which experts tokens take, by the scores of a router.

Knows no weights of experts and no place where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from freight.model.programme import Route

__all__ = ["Routes", "choose_experts"]

_LEAST_SHARE: Final = 1e-20
"""So that weights can be divided by their sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Experts [T, n] of each token, int64, and what their updates are multiplied by."""

    experts: torch.Tensor
    weights: torch.Tensor


def choose_experts(
    step: Route,
    scores: torch.Tensor,
    corrections: torch.Tensor | None,
    out: Routes,
    gains: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
) -> None:
    """Fill the routes of tokens whose router says scores [T, X]; ``corrections`` and ``gains`` are
    [X]. Where experts are ``given`` [T, n] it does not choose them."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    scores = wide * step.sharpness
    if step.margin is not None:
        _choose_in_turn(step, step.margin, scores, out)
        return
    shares = _SHARES[step.scores](scores)
    wanted = scores if step.by_logits else shares
    wanted = wanted if corrections is None else wanted + corrections.float()
    if step.num_groups > 1:
        wanted = _in_best_groups(wanted, step)
    experts = torch.topk(wanted, step.num_chosen, dim=-1).indices if given is None else given
    weights = shares.gather(1, experts)
    if step.normalised:
        weights /= weights.sum(dim=-1, keepdim=True) + _LEAST_SHARE
    if gains is not None:
        weights *= gains.float()[experts]
    out.experts.copy_(experts)
    out.weights.copy_(weights * step.scale)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1)


def _root_of_softplus(scores: torch.Tensor) -> torch.Tensor:
    return F.softplus(scores).sqrt_()


_SHARES: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _root_of_softplus,
}


def _choose_in_turn(step: Route, margin: float, scores: torch.Tensor, out: Routes) -> None:
    """One expert after the other, of those with a score near the highest that is left."""
    left = scores.clone()
    for number in range(step.num_chosen):
        highest, expert = left.max(dim=-1, keepdim=True)
        sizes = torch.maximum(scores.abs(), highest)
        is_far = (highest - scores) / sizes > margin
        near = (left - highest).masked_fill(is_far, float("-inf"))
        out.experts[:, number : number + 1].copy_(expert)
        weights = near.exp().sum(dim=-1, keepdim=True).reciprocal_()
        out.weights[:, number : number + 1].copy_(weights * step.scale)
        left.scatter_(1, expert, float("-inf"))


def _in_best_groups(wanted: torch.Tensor, step: Route) -> torch.Tensor:
    """Of wanted [T, X] those in the best groups of neighbours; else -inf."""
    groups = wanted.view(len(wanted), step.num_groups, -1)
    best = torch.topk(groups, step.best_of_group, dim=-1).values.sum(dim=-1)
    left_out = torch.ones_like(best, dtype=torch.bool)
    left_out.scatter_(1, torch.topk(best, step.groups_chosen, dim=-1).indices, False)
    return groups.masked_fill(left_out[..., None], float("-inf")).view(wanted.shape)
