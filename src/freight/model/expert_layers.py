"""The steps of experts that follow from their switches alone."""

from __future__ import annotations

from freight.model.expert_steps import Route
from freight.model.switches import Experts
from freight.model.weight import Weight

__all__ = ["route"]


def route(
    experts: Experts, corrections: Weight | None, gains: Weight | None, sharpness: float
) -> Route:
    """How a token's experts are chosen by what its router says."""
    return Route(
        x="scores",
        num_chosen=experts.per_token,
        normalised=experts.normalised,
        scores=experts.scores,
        scale=experts.scale,
        corrections=corrections,
        sharpness=sharpness,
        gains=gains,
        num_groups=experts.num_groups,
        best_of_group=experts.best_of_group,
        groups_chosen=experts.groups_per_token,
        margin=experts.margin,
    )
