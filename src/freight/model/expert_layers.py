"""The steps of experts, and of the MLP beside them, that follow from their switches alone."""

from __future__ import annotations

from dataclasses import replace

from freight.model.expert_steps import Route, Weigh
from freight.model.layer_kinds import Experts
from freight.model.programme import Add, Project, Scale, Step
from freight.model.weight import Weight

__all__ = ["join_experts", "route"]


def route(
    experts: Experts,
    corrections: Weight | None,
    gains: Weight | None,
    sharpness: float,
    table: Weight | None,
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
        by_logits=experts.by_logits,
        table=table,
    )


def join_experts(last: Project, gate: Project, experts: Experts, *, sums: bool) -> list[Step]:
    """How what the MLP beside them makes goes where theirs does: by a share, by a factor, or where
    they sum it up; none if it is like any other MLP's."""
    added = Add(x="x", y=last.out)
    if experts.shared_gate:
        return [last, gate, Weigh(x=last.out, y=gate.out), added]
    if sums:
        return [replace(last, out="sum")]
    if experts.shared_scale != 1:
        return [last, Scale(x=last.out, factor=experts.shared_scale), added]
    return []
