"""What of a model cannot be computed over ranks that share its layers yet.

Knows switches and nothing of layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from freight.errors import InputError
from freight.model.switches import ModelConfig

__all__ = ["refuse_what_cannot_be_cut"]

_PLAIN: Final[dict[str, Any]] = {
    "scores": "softmax",
    "scale": 1.0,
    "has_bias": False,
    "has_corrections": False,
    "by_logits": False,
    "num_groups": 1,
    "shared_size": 0,
    "margin": None,
    "beside_mlp": False,
    "has_gains": False,
}


def refuse_what_cannot_be_cut(config: ModelConfig) -> None:
    """Raises InputError with all of it."""
    normed_by_head = config.qk_norm == "none" or (config.qk_norm, config.norm) == (
        "per_head",
        "rms",
    )
    experts = config.experts
    reasons = {
        f"an embedding of {config.embedding_size} columns": config.embedding_size
        != config.hidden_size,
        "compressed keys": config.kv_format is not None,
        "sparse attention": config.attended_share < 1,
        "experts with biases": config.mlp_bias and config.experts is not None,
        "routers with biases, corrections, groups or margins, or an MLP beside experts": experts
        is not None
        and replace(experts, **_PLAIN) != experts,
        "layers that rotate queries and keys in different ways": len(set(config.ropes)) > 1,
        "experts whose inputs are weighed": experts is not None and experts.weighs_input,
        "rotation of neighbours": any(rope.pairs for rope in config.rotations),
        "norms of queries and keys that are not root mean squares by head": not normed_by_head,
        "keys and values as latents": config.latent is not None,
        "layers that keep a state": config.recurrence is not None,
        "layers of one part": config.parts is not None,
        "heads of several sizes": config.other_heads is not None,
        "norms of values or scales of layers": config.value_norm or config.layer_scales,
        "keys of other layers, or inputs of each layer": config.sharing is not None
        or config.layer_inputs is not None,
        "gates of what is attended": config.gates_attention,
        "attention sinks": config.attention_sinks,
        "queries that grow with their position": config.query_growth is not None,
        "values that are narrower than keys": config.value_width is not None,
        "gates with a limit": config.gate_limit is not None
        or bool(config.mlp_limits)
        or (experts is not None and bool(experts.limits)),
        "several residual streams": config.streams is not None,
        "norms of updates alone": config.norm_place == "update",
        "norms without gains": config.norm == "layer_bare",
        "queries, keys and values with a limit": config.qkv_limit is not None,
        "activations with weights": config.activation == "xielu",
        "projections stacked in blocks of heads": config.qkv_blocks is not None,
        "scores that sink with the distance": config.slope_span is not None,
        "a norm of embeddings": config.embedding_norm,
        "a head with a bias": config.head_bias,
        "norms of what experts make together": config.norms_sum,
        "experts in parallel blocks": config.parallel and experts is not None,
        "a readout in place of a head": config.readout is not None,
        "scaled updates or logits": config.residual_scale is not None
        or config.logits_scale is not None,
    }
    wrong = [name for name, is_so in reasons.items() if is_so]
    if wrong:
        raise InputError(
            f"A {config.family} model was to be computed over ranks.",
            f"It has {' and '.join(wrong)}, which cannot be cut yet.",
            "Run it on one rank.",
        )
