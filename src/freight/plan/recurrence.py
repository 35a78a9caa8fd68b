"""Models that keep a state for each row, or gate what they attend: sizes, and what is not done."""

from __future__ import annotations

from dataclasses import replace

from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.plan.forms import BLOCK
from freight.plan.wishes import Wishes
from freight.quantities import align_up

__all__ = ["settle_wishes", "state_size"]


def state_size(config: ModelConfig, element_bytes: int) -> int:
    """Bytes of what a row keeps in a layer without keys: whole blocks, for it may be on disk."""
    own = config.recurrence
    return 0 if own is None else align_up(own.state_bytes(element_bytes), BLOCK)


def settle_wishes(config: ModelConfig, wishes: Wishes) -> Wishes:
    """The same without what such a model rules out and nobody has asked for: a state cannot be
    shared, as keys are, nor taken back, and stays on the tier of its row. Raises InputError for
    what was asked for."""
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
    return replace(wishes, shares_prefixes=False, moves_rows=False)
