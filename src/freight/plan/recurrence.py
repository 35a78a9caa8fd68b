"""What is not done with models that keep a state for each row, or gate what they attend."""

from __future__ import annotations

from dataclasses import replace

from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.plan.wishes import Wishes

__all__ = ["settle_wishes"]


def settle_wishes(config: ModelConfig, wishes: Wishes) -> Wishes:
    """The same without what such a model rules out and nobody has asked for: a state cannot be
    taken back, and stays on the tier of its row. Raises InputError for what was asked for."""
    if config.gated_attention:
        if wishes.cpu_attention:
            raise InputError(
                f"{wishes.cpu_attention:.0%} of the rows were to be attended on the CPU.",
                "This model multiplies what it attends by gates, which stay where it is computed.",
                "Leave --cpu-attention out.",
            )
        wishes = replace(wishes, cpu_attention=0.0)
    if config.recurrence is None:
        return wishes
    if wishes.draft_tokens:
        raise InputError(
            f"--draft-tokens {wishes.draft_tokens} was given.",
            "Layers of this model keep a state, which a guess that fails would have changed.",
            "Leave --draft-tokens out.",
        )
    return replace(wishes, moves_rows=False)
