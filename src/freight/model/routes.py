"""Which experts tokens take, by the scores of a router.

Knows no weights of experts and no place where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

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
    step: Route, scores: torch.Tensor, corrections: torch.Tensor | None, out: Routes
) -> None:
    """Fill the routes of tokens whose router says scores [T, X]; ``corrections`` are [X]."""
    scores = scores.float()
    shares = scores.sigmoid() if step.scores == "sigmoid" else torch.softmax(scores, dim=-1)
    wanted = scores if step.by_logits else shares
    wanted = wanted if corrections is None else wanted + corrections.float()
    if step.num_groups > 1:
        wanted = _in_best_groups(wanted, step)
    experts = torch.topk(wanted, step.num_chosen, dim=-1).indices
    weights = shares.gather(1, experts)
    if step.normalised:
        weights /= weights.sum(dim=-1, keepdim=True) + _LEAST_SHARE
    out.experts.copy_(experts)
    out.weights.copy_(weights * step.scale)


def _in_best_groups(wanted: torch.Tensor, step: Route) -> torch.Tensor:
    """Of wanted [T, X] those in the best groups of neighbours; else -inf."""
    groups = wanted.view(len(wanted), step.num_groups, -1)
    best = torch.topk(groups, step.best_of_group, dim=-1).values.sum(dim=-1)
    left_out = torch.ones_like(best, dtype=torch.bool)
    left_out.scatter_(1, torch.topk(best, step.groups_chosen, dim=-1).indices, False)
    return groups.masked_fill(left_out[..., None], float("-inf")).view(wanted.shape)
