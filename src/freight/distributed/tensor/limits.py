"""What of a model cannot be computed over ranks that share its layers yet.

Knows switches and nothing of layouts.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from freight.errors import InputError
from freight.model.switches import ModelConfig

__all__ = ["refuse_what_cannot_be_cut"]

_CUT: Final = frozenset(
    (
        "num_experts",
        "per_token",
        "intermediate_size",
        "normalised",
        "layers",
        "scores",
        "scale",
        "has_bias",
        "has_corrections",
        "by_logits",
        "num_groups",
        "groups_per_token",
        "best_of_group",
        "shared_size",
        "shared_gate",
        "shared_scale",
        "margin",
        "limits",
        "weighs_input",
    )
)
"""What may be said of experts."""


def refuse_what_cannot_be_cut(config: ModelConfig) -> None:
    """Raises InputError with all of it."""
    experts = config.experts
    others = [] if experts is None else [own for own in fields(experts) if own.name not in _CUT]
    is_plain = all(getattr(experts, own.name) == own.default for own in others)
    reasons = {
        f"an embedding of {config.embedding_size} columns": config.embedding_size
        != config.hidden_size,
        "compressed keys": config.kv_format is not None,
        "sparse attention": config.attended_share < 1,
        "experts beside an MLP, with latents or by token": not is_plain,
        "centred norms of queries and keys as a whole": config.qk_norm == "whole"
        and config.has_centred_norms,
        "keys and values as latents": config.latent is not None,
        "layers that keep a state": config.recurrence is not None,
        "layers of one part": config.parts is not None,
        "heads of several sizes": config.other_heads is not None,
        "norms of values or scales of layers": config.value_norm or config.layer_scales,
        "keys of other layers, or inputs of each layer": config.sharing is not None
        or config.layer_inputs is not None,
        "gates of what is attended": config.gates_attention,
        "queries that grow as was learnt": config.query_growth is not None
        and config.query_growth.rate is None,
        "values that are narrower than keys": config.value_width is not None,
        "several residual streams": config.streams is not None,
        "activations with weights": config.activation == "xielu",
        "projections stacked in blocks of heads": config.qkv_blocks is not None,
        "scores that sink with the distance": config.slope_span is not None,
        "a norm of embeddings": config.embedding_norm,
        "matrices with factors": bool(config.factors),
        "a readout in place of a head": config.readout is not None,
    }
    wrong = [name for name, is_so in reasons.items() if is_so]
    if wrong:
        raise InputError(
            f"A {config.family} model was to be computed over ranks.",
            f"It has {' and '.join(wrong)}, which cannot be cut yet.",
            "Run it on one rank.",
        )
