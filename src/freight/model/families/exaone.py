"""EXAONE 4: norms of what the parts of a layer return, norms on queries and keys; of models with
windows, layers that see all do not rotate; of 4.5, which also sees, the part that reads. K-EXAONE:
with norms before the parts, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import GLM4_MOE, name_experts
from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import (
    BASE_KEYS,
    Family,
    Key,
    fixed,
    read,
    text_part,
    window_kinds,
)

__all__ = ["EXAONE4", "EXAONE_MOE"]


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pattern is a number, or letters of which one is a layer; the last layer sees all then."""
    raw = text_part(raw)
    if raw.get("sliding_window", 4096) is None:
        return raw
    every = raw.get("sliding_window_pattern", 4)
    num_layers = raw.get("num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None and isinstance(every, str):
        kinds = window_kinds(num_layers, len(every))
        if kinds:
            kinds[-1] = "full_attention"
    kinds = kinds or window_kinds(num_layers, every)
    if not isinstance(kinds, list):
        return raw
    rotates = [kind == "sliding_attention" for kind in kinds]
    return {**raw, "layer_types": kinds, "rope_layers": rotates}


EXAONE4: Final = Family(
    architectures=("Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration"),
    model_types=("exaone4", "exaone4_5"),
    keys={
        **BASE_KEYS,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "norm_place": fixed("update"),
        "qk_norm": fixed("per_head"),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.attention.norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "layers.{i}.mlp.norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    },
    prepare=_name_layers,
)


def _name_experts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {"n_shared_experts": raw.get("num_shared_experts", 1)}
    return name_experts({"moe_intermediate_size": 1024, **_name_layers(raw), **own})


EXAONE_MOE: Final = Family(
    architectures=("ExaoneMoeForCausalLM",),
    model_types=("exaone_moe",),
    keys={
        **EXAONE4.keys,
        "norm_place": fixed("before"),
        "num_experts": read("num_experts", 64),
        "experts_per_token": read("num_experts_per_tok", 8),
        "expert_size": read("moe_intermediate_size", 1024),
        "normalised_routes": read("norm_topk_prob", True),
        "route_scores": fixed("sigmoid"),
        "route_scale": read("routed_scaling_factor", 2.5),
        "route_corrections": fixed(True),
        "expert_groups": read("n_group", 1),
        "groups_per_token": read("topk_group", 1),
        "shared_size": read("shared_size", 0),
    },
    tensors={
        **GLM4_MOE.tensors,
        "layers.{i}.router.corrections": "model.layers.{i}.mlp.e_score_correction_bias",
    },
    prepare=_name_experts,
)
