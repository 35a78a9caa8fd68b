"""Kolibri 1: norms before the parts of a layer and of what they return, layers that see all without
positions, and in all of them experts that are chosen by what their router says, with corrections,
before it becomes sigmoids, and one beside them for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import GLM4_MOE
from freight.model.families.table import Family, Key, fixed, read, window_kinds

__all__ = ["KOLIBRI1"]


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fifth layer sees all; where none has a window, all rotate."""
    kinds = raw.get("layer_types") or window_kinds(raw.get("num_hidden_layers"), 5)
    if not isinstance(kinds, list) or raw.get("sliding_window", 513) is None:
        return {**raw, "layer_types": kinds}
    rotates = [kind == "sliding_attention" for kind in kinds]
    return {**raw, "layer_types": kinds, "rope_layers": rotates}


KOLIBRI1: Final = Family(
    architectures=("Kolibri1ForCausalLM",),
    model_types=("kolibri1",),
    keys={
        **GLM4_MOE.keys,
        "intermediate_size": read("moe_intermediate_size", 512),
        "max_positions": read("max_position_embeddings", 262_144),
        "num_kv_heads": read("num_key_value_heads", 4),
        "head_dim": read("head_dim", 128),
        "norm_eps": read("rms_norm_eps", 1e-6),
        "norm_place": fixed("both"),
        "qkv_bias": fixed(False),
        "qk_norm": fixed("per_head"),
        "rotary_share": fixed(1.0),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=513, null_is_value=True),
        "num_experts": Key(names=("num_experts", "num_local_experts"), default=384),
        "experts_per_token": read("num_experts_per_tok", 6),
        "expert_size": read("moe_intermediate_size", 512),
        "normalised_routes": read("norm_topk_prob", False),
        "route_by_logits": fixed(True),
        "route_scale": fixed(1.0),
        "expert_groups": fixed(1),
        "groups_per_token": fixed(1),
        "shared_size": read("shared_expert_intermediate_size", 512),
    },
    tensors={
        **GLM4_MOE.tensors,
        "layers.{i}.attention.post_norm": "model.layers.{i}.post_attn_norm.weight",
        "layers.{i}.mlp.post_norm": "model.layers.{i}.post_ffn_norm.weight",
        "layers.{i}.router.corrections": "model.layers.{i}.moe.router.expert_bias",
    },
    prepare=_name_layers,
)
