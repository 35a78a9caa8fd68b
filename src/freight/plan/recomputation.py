"""Where keys and values can be computed again instead of being moved, and are worth it."""

from __future__ import annotations

from typing import Final

from freight.errors import InputError
from freight.model.programme import Programme
from freight.model.rope_config import depends_on_length
from freight.model.switches import ModelConfig

__all__ = ["SHARES", "check_recomputation", "why_not_recomputed"]

SHARES: Final = (1 / 3, 2 / 3, 1.0)
"""Of the layers: forecasts look at layers by threes."""


def why_not_recomputed(config: ModelConfig, programme: Programme) -> str | None:
    """What stands against it, as a sentence; None where nothing does."""
    width = config.kv_bytes_per_token_per_layer(1)
    if config.kv_format is not None:
        return "Keys and values are compressed: they are kept as they were first rounded."
    if config.recurrence is not None:
        return "Layers of this model keep a state, which is made of all tokens before."
    if config.sharing is not None:
        return "Several layers of this model attend the same keys, which stay where they are made."
    if config.hidden_size >= width:
        return (
            f"What comes into attention has {config.hidden_size} numbers a token, keys and values "
            f"have {width}: keeping it would save nothing."
        )
    if any(depends_on_length(rope) for rope in config.rotations):
        return "Its rotary angles change with the length of a row, and so would earlier keys."
    units = (unit for unit in programme.units if unit.kind == "attention")
    if any(unit.keys() is None for unit in units):
        return "Its keys are made of more than the residual stream."
    return None


def check_recomputation(config: ModelConfig, programme: Programme, share: float | None) -> None:
    """Raises InputError where a ``share`` of the layers cannot be recomputed."""
    reason = why_not_recomputed(config, programme) if share else None
    if share and reason is not None:
        raise InputError(
            f"Keys and values of {share:.0%} of the layers were to be recomputed.",
            reason,
            "Leave --recompute-kv out.",
        )
