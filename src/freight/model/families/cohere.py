"""Command R: attention and MLP side by side over one layer norm without bias, neighbours rotated
together, scaled logits. The second (R7B, A): windows, and layers that see all without positions.
A+: with experts, the mean of which and of an MLP beside them counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import GLM4_MOE, name_experts
from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read, window_kinds

__all__ = ["COHERE", "COHERE2", "COHERE2_MOE"]


def _name_norms(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The largest of the first ones have norms on queries and keys, of each head its own."""
    return {**raw, "qk_norm": "each_head" if raw.get("use_qk_norm") else "none"}


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer sees all, and does not rotate."""
    every = raw.get("sliding_window_pattern") or 4
    kinds = raw.get("layer_types") or window_kinds(raw.get("num_hidden_layers"), every)
    if not isinstance(kinds, list) or raw.get("sliding_window", 4096) is None:
        return {**raw, "layer_types": kinds}
    rotates = [kind == "sliding_attention" for kind in kinds]
    return {**raw, "layer_types": kinds, "rope_layers": rotates}


_KEYS: Final = {
    **BASE_KEYS,
    "max_positions": read("max_position_embeddings", 8192),
    "norm": fixed("layer"),
    "norm_eps": read("layer_norm_eps", 1e-5),
    "parallel": fixed(True),
    "shared_norm": fixed(True),
    "qkv_bias": read("attention_bias", False),
    "out_bias": read("attention_bias", False),
    "tied_embeddings": read("tie_word_embeddings", True),
    "logits_scale": read("logit_scale", 0.0625),
    "rotary_pairs": fixed(True),
}
_TENSORS: Final = {
    **LLAMA_TENSORS,
    "layers.{i}.mlp.norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}

COHERE: Final = Family(
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    keys={**_KEYS, "qk_norm": read("qk_norm", "none"), "rope_theta": read("rope_theta", 500_000.0)},
    tensors=_TENSORS,
    prepare=_name_norms,
)

COHERE2: Final = Family(
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    keys={
        **_KEYS,
        "head_dim": fixed(None),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
    },
    tensors=_TENSORS,
    prepare=_name_layers,
)


def _name_experts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first layers are plain, and may have a width and windows of their own."""
    stated = {name: value for name, value in raw.items() if value is not None}
    plain, width = stated.get("first_k_dense_replace", 0), stated.get("intermediate_size")
    own = {"moe_intermediate_size": width, "first_k_dense_replace": plain}
    raw = name_experts({**raw, **own, "n_shared_experts": stated.get("num_shared_experts", 0)})
    way = stated.get("shared_expert_combination_strategy", "average")
    share = {"average": 0.5, "sum": 1.0}.get(way, way) if isinstance(way, str) else 0.0
    by_softmax = stated.get("expert_selection_fn", "softmax") == "softmax"
    return {
        **raw,
        **_name_rotations(raw, stated, plain),
        "intermediate_size": stated.get("prefix_dense_intermediate_size", width),
        "normalised": by_softmax or stated.get("norm_topk_prob", True),
        "expert_share": share if raw.get("shared_size") else 1.0,
        "norm_kind": "rms" if "rms_norm_eps" in stated else "layer",
        "norm_eps": stated.get("rms_norm_eps", stated.get("layer_norm_eps", 1e-5)),
    }


def _name_rotations(
    raw: Mapping[str, Any], stated: Mapping[str, Any], plain: object
) -> Mapping[str, Any]:
    """Layers with windows rotate, and plain ones where all of these see all by their pattern."""
    kinds, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    every = stated.get("prefix_dense_sliding_window_pattern", 1)
    if kinds is None and isinstance(plain, int) and isinstance(num_layers, int):
        first = window_kinds(min(plain, num_layers), every) or []
        rest = window_kinds(num_layers - plain, stated.get("sliding_window_pattern", 4)) or []
        kinds = [*first, *rest]
    experts = raw.get("expert_layers")
    if not isinstance(kinds, list) or not isinstance(experts, list):
        return {"layer_types": kinds}
    turns = raw.get("sliding_window", 4096) is not None
    pairs = zip(kinds, experts, strict=False)
    rotates = [
        (turns and kind == "sliding_attention") or (not own and every == 1) for kind, own in pairs
    ]
    return {"layer_types": kinds, "rope_layers": rotates}


COHERE2_MOE: Final = Family(
    architectures=("Cohere2MoeForCausalLM",),
    model_types=("cohere2_moe",),
    keys={
        **COHERE2.keys,
        "head_dim": read("head_dim", 128),
        "norm": read("norm_kind", "layer"),
        "norm_eps": read("norm_eps", 1e-5),
        "num_experts": read("num_experts", 8),
        "experts_per_token": read("num_experts_per_tok", 2),
        "expert_size": read("moe_intermediate_size", None),
        "normalised_routes": read("normalised", True),
        "route_scores": read("expert_selection_fn", "softmax"),
        "route_scale": read("expert_share", 1.0),
        "shared_size": read("shared_size", 0),
        "shared_scale": read("expert_share", 1.0),
    },
    tensors={**GLM4_MOE.tensors, **_TENSORS},
    prepare=_name_experts,
)
