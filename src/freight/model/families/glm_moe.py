"""GLM-4.5 and 4.6, and what reads in those that see: half of each head rotated; behind the first
layers experts that are chosen by sigmoids, with corrections, and one beside them for all. Solar
Open and dots.llm1: all of it rotated, the second with norms of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, MOST_LAYERS, Family, Key, fixed, read

__all__ = ["DOTS1", "GLM4V_MOE", "GLM4_MOE", "SOLAR_OPEN", "name_experts"]

_EXPERT: Final = "model.layers.{i}.mlp.experts.{e}"
_SHARED: Final = "model.layers.{i}.mlp.shared_experts"


def name_experts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first layers are plain, or those that are listed as dense; the MLP for all is as wide as
    so many experts."""
    num_layers, plain = raw.get("num_hidden_layers"), raw.get("first_k_dense_replace", 1)
    width, shared = raw.get("moe_intermediate_size", 1408), raw.get("n_shared_experts", 1)
    if not all(isinstance(count, int) for count in (num_layers, plain, width, shared)):
        return raw
    kinds = raw.get("mlp_layer_types")
    if isinstance(kinds, list):
        layers = [kind == "sparse" for kind in kinds]
    else:
        layers = [i >= plain for i in range(min(num_layers or 0, MOST_LAYERS))]
    return {
        **raw,
        "expert_layers": layers,
        "shared_size": width * shared,
        "qk_norm": "per_head" if raw.get("use_qk_norm") else "none",
    }


GLM4_MOE: Final = Family(
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 131_072),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qkv_bias": read("attention_bias", False),
        "qk_norm": read("qk_norm", "none"),
        "rotary_share": read("partial_rotary_factor", 0.5),
        "num_experts": read("n_routed_experts", 128),
        "experts_per_token": read("num_experts_per_tok", 8),
        "expert_size": read("moe_intermediate_size", 1408),
        "normalised_routes": read("norm_topk_prob", True),
        "route_scores": fixed("sigmoid"),
        "route_scale": read("routed_scaling_factor", 1.0),
        "route_corrections": fixed(True),
        "expert_groups": read("n_group", 1),
        "groups_per_token": read("topk_group", 1),
        "shared_size": read("shared_size", 0),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "layers.{i}.router.weight": "model.layers.{i}.mlp.gate.weight",
        "layers.{i}.router.corrections": "model.layers.{i}.mlp.gate.e_score_correction_bias",
        "layers.{i}.shared.gate": f"{_SHARED}.gate_proj.weight",
        "layers.{i}.shared.up": f"{_SHARED}.up_proj.weight",
        "layers.{i}.shared.down": f"{_SHARED}.down_proj.weight",
        "layers.{i}.experts.{e}.gate": f"{_EXPERT}.gate_proj.weight",
        "layers.{i}.experts.{e}.up": f"{_EXPERT}.up_proj.weight",
        "layers.{i}.experts.{e}.down": f"{_EXPERT}.down_proj.weight",
    },
    prepare=name_experts,
)


GLM4V_MOE: Final = Family(
    architectures=(),
    model_types=("glm4v_moe_text",),
    keys={
        **GLM4_MOE.keys,
        "max_positions": read("max_position_embeddings", 65_536),
        "num_kv_heads": read("num_key_value_heads", 8),
        "qkv_bias": read("attention_bias", True),
    },
    tensors=GLM4_MOE.tensors,
    prepare=name_experts,
)


def _name_solar_s(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """No layer is plain."""
    return name_experts({"moe_intermediate_size": 1280, "first_k_dense_replace": 0, **raw})


def _name_dots_s(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = {name: value for name, value in raw.items() if value is not None}
    return {**raw, **name_experts({"first_k_dense_replace": 0, "n_shared_experts": 0, **stated})}


SOLAR_OPEN: Final = Family(
    architectures=("SolarOpenForCausalLM",),
    model_types=("solar_open",),
    keys={
        **GLM4_MOE.keys,
        "intermediate_size": read("moe_intermediate_size", 1280),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 128),
        "qk_norm": fixed("none"),
        "rope_theta": read("rope_theta", 1_000_000.0),
        "rotary_share": read("partial_rotary_factor", 1.0),
        "expert_size": read("moe_intermediate_size", 1280),
    },
    tensors=GLM4_MOE.tensors,
    prepare=_name_solar_s,
)

DOTS1: Final = Family(
    architectures=("Dots1ForCausalLM",),
    model_types=("dots1",),
    keys={
        **GLM4_MOE.keys,
        "max_positions": read("max_position_embeddings", 2048),
        "num_kv_heads": read("num_key_value_heads", 32),
        "norm_eps": read("rms_norm_eps", 1e-6),
        "qk_norm": fixed("per_head"),
        "out_bias": read("attention_bias", False),
        "rotary_share": read("partial_rotary_factor", 1.0),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
        "first_window_layer": read("max_window_layers", 62),
        "normalised_routes": read("norm_topk_prob", False),
    },
    tensors=GLM4_MOE.tensors,
    prepare=_name_dots_s,
)
