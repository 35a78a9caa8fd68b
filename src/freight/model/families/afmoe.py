"""Trinity (AFMoE): norms before the parts of a layer and of what they return, gates of what is
attended, experts by sigmoids with corrections behind the first layers, and one beside them for all;
layers that see all do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import GLM4_MOE, name_experts
from freight.model.families.table import Family, Key, fixed, read, window_kinds

__all__ = ["AFMOE"]

_ATTENTION: Final = "model.layers.{i}.self_attn"
_MLP: Final = "model.layers.{i}.mlp"


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Embeddings may be scaled by the root of their width."""
    stated = {name: value for name, value in raw.items() if value is not None}
    every, width = stated.get("global_attn_every_n_layers", 4), stated.get("hidden_size")
    kinds = stated.get("layer_types") or window_kinds(stated.get("num_hidden_layers"), every)
    found = {
        **name_experts({"moe_intermediate_size": 1408, **stated, **_counts(stated)}),
        "layer_types": kinds,
        "sliding_window": raw.get("sliding_window", 1024),
    }
    if isinstance(kinds, list):
        found["rope_layers"] = [kind == "sliding_attention" for kind in kinds]
    if stated.get("mup_enabled") and isinstance(width, int) and 0 < width < 1 << 63:
        found["embedding_scale"] = width**0.5
    return found


def _counts(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "first_k_dense_replace": stated.get("num_dense_layers", 1),
        "n_shared_experts": stated.get("num_shared_experts", 2),
    }


AFMOE: Final = Family(
    architectures=("AfmoeForCausalLM",),
    model_types=("afmoe",),
    keys={
        **GLM4_MOE.keys,
        "max_positions": read("max_position_embeddings", 16_384),
        "head_dim": read("head_dim", 128),
        "embedding_scale": read("embedding_scale", None),
        "norm_place": fixed("both"),
        "qk_norm": fixed("per_head"),
        "out_bias": read("attention_bias", False),
        "attention_gates": fixed("apart"),
        "rotary_share": fixed(1.0),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=1024, null_is_value=True),
        "num_experts": read("num_experts", 64),
        "experts_per_token": read("num_experts_per_tok", 6),
        "normalised_routes": fixed(True),
        "route_scale": read("route_scale", 1.0),
        "expert_groups": fixed(1),
        "groups_per_token": fixed(1),
    },
    tensors={
        **GLM4_MOE.tensors,
        "layers.{i}.attention.post_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.attention.gates": f"{_ATTENTION}.gate_proj.weight",
        "layers.{i}.mlp.norm": "model.layers.{i}.pre_mlp_layernorm.weight",
        "layers.{i}.mlp.post_norm": "model.layers.{i}.post_mlp_layernorm.weight",
        "layers.{i}.router.weight": f"{_MLP}.router.gate.weight",
        "layers.{i}.router.corrections": f"{_MLP}.expert_bias",
    },
    demands={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "num_expert_groups": 1},
    prepare=_spell_out,
)
