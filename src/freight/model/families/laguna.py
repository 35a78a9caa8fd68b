"""Laguna: so many query heads in each layer, two numbers of them at most, with a gate for each head
by softplus, or gates as wide as the heads; two rotations; behind the first layers experts by
sigmoids with corrections, and an MLP beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, MOST_LAYERS, Family, OneOf, fixed, read

__all__ = ["LAGUNA"]

_ATTENTION: Final = "model.layers.{i}.self_attn"
_MLP: Final = "model.layers.{i}.mlp"
_EXPERT: Final = f"{_MLP}.experts.{{e}}"
_ROPES: Final = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = {name: value for name, value in raw.items() if value is not None}
    num_layers = stated.get("num_hidden_layers", 40)
    layers = range(min(num_layers, MOST_LAYERS) if isinstance(num_layers, int) else 0)
    kinds = stated.get("mlp_layer_types") or ["sparse" if i else "dense" for i in layers]
    is_per_head = stated.get("gating", True) in (True, "per-head")
    return {
        **stated,
        **_heads(stated.get("num_attention_heads_per_layer"), len(layers)),
        "layer_types": stated.get("layer_types") or ["full_attention" for _ in layers],
        "expert_layers": [kind == "sparse" for kind in kinds] if isinstance(kinds, list) else [],
        "rope_parameters": stated.get("rope_parameters") or _ROPES,
        "gates": "heads" if is_per_head else "apart",
    }


def _heads(counts: object, num_layers: int) -> Mapping[str, Any]:
    """Of a list by layer its first number is the model's, and another one that of other layers;
    the list stays where it is no such one, to be refused."""
    if counts is None:
        return {}
    if not isinstance(counts, list) or not counts or len(counts) != num_layers:
        return {"num_attention_heads_per_layer": counts}
    first, *others = dict.fromkeys(map(str, counts))
    own = {str(count): count for count in counts}
    if len(others) > 1:
        return {"num_attention_heads_per_layer": counts}
    found = {"num_attention_heads_per_layer": None, "num_attention_heads": own[first]}
    if not others:
        return found
    of_layers = [str(count) != first for count in counts]
    return {**found, "other_num_heads": own[others[0]], "other_head_layers": of_layers}


LAGUNA: Final = Family(
    architectures=("LagunaForCausalLM",),
    model_types=("laguna",),
    keys={
        **BASE_KEYS,
        "num_layers": read("num_hidden_layers", 40),
        "hidden_size": read("hidden_size", 2048),
        "intermediate_size": read("intermediate_size", 8192),
        "num_heads": read("num_attention_heads", 48),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 128),
        "vocab_size": read("vocab_size", 100_352),
        "max_positions": read("max_position_embeddings", 131_072),
        "qk_norm": fixed("per_head"),
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
        "attention_gates": read("gates", "heads"),
        "gate_function": fixed("softplus"),
        "other_num_heads": read("other_num_heads", None),
        "uses_windows": fixed(True),
        "window": read("sliding_window", 512),
        "num_experts": read("num_experts", 256),
        "experts_per_token": read("num_experts_per_tok", 8),
        "expert_size": read("moe_intermediate_size", 512),
        "route_scores": fixed("sigmoid"),
        "route_scale": read("moe_routed_scaling_factor", 1.0),
        "route_corrections": fixed(True),
        "shared_size": read("shared_expert_intermediate_size", 512),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.attention.q_norm": f"{_ATTENTION}.q_norm.weight",
        "layers.{i}.attention.k_norm": f"{_ATTENTION}.k_norm.weight",
        "layers.{i}.attention.gates": f"{_ATTENTION}.g_proj.weight",
        "layers.{i}.router.weight": f"{_MLP}.gate.weight",
        "layers.{i}.router.corrections": OneOf(
            first=f"{_MLP}.experts.e_score_correction_bias",
            otherwise=f"{_MLP}.gate.e_score_correction_bias",
        ),
        **{
            f"layers.{{i}}.shared.{name}": OneOf(
                first=f"{_MLP}.shared_expert.{name}_proj.weight",
                otherwise=f"{_MLP}.shared_experts.{name}_proj.weight",
            )
            for name in ("gate", "up", "down")
        },
        "layers.{i}.experts.{e}.gate": f"{_EXPERT}.gate_proj.weight",
        "layers.{i}.experts.{e}.up": f"{_EXPERT}.up_proj.weight",
        "layers.{i}.experts.{e}.down": f"{_EXPERT}.down_proj.weight",
    },
    demands={
        "num_attention_heads_per_layer": None,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
    },
    prepare=_spell_out,
)
