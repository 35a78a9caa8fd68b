"""Layers that no layout is known for. Knows switches, no mesh."""

from __future__ import annotations

from freight.errors import InputError
from freight.model.switches import ModelConfig

__all__ = ["refuse_unknown"]


def refuse_unknown(config: ModelConfig) -> None:
    """Raises InputError with the first thing that is not."""
    kinds = {
        "a state instead of keys": config.recurrence is not None,
        "one part alone": config.parts is not None,
        "gates of what they attend": config.gates_attention,
        "keys kept as latents": config.latent is not None,
        "heads of several sizes": config.other_heads is not None,
        "several residual streams": config.streams is not None,
        "values that are narrower than keys": config.value_width is not None,
        "scores that sink with the distance": config.slope_span is not None,
    }
    what = next((name for name, is_so in kinds.items() if is_so), None)
    if what is None:
        return
    raise InputError(
        f"The layers of a {config.family} model were to be cut over chips.",
        f"They have {what}, which no layout is known for yet.",
        "Ask freight plan what one machine does with it, or take another model.",
    )
