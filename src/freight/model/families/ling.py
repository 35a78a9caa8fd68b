"""Ling 3.0: the layers of Kimi Linear, with rates that have a bound and no rank; those that attend,
the last of each group, rotate, and each of their heads has a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import DEEPSEEK_V3
from freight.model.families.kimi import KIMI_LINEAR
from freight.model.families.table import MOST_LAYERS, Either, Family, fixed, read

__all__ = ["LING_3"]

_OTHERS: Final = {
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_shared_experts": "n_shared_experts",
}
_LIMITS: Final = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last layer of each group attends; heads of layers that keep a state are those of others;
    limits of zero are none. The MLP beside the experts may have a width of its own."""
    given = {new: raw[old] for old, new in _OTHERS.items() if old in raw}
    usual = {"first_k_dense_replace": 2, "moe_intermediate_size": 768, "n_shared_experts": 1}
    raw = {**usual, "v_head_dim": 128, **raw, **given}
    num_layers, group = raw.get("num_hidden_layers", 42), raw.get("layer_group_size", 6)
    kinds = raw.get("layer_types")
    are_counts = isinstance(num_layers, int) and isinstance(group, int) and group > 0
    if kinds is None and are_counts and num_layers % group == 0:
        layers = range(min(num_layers, MOST_LAYERS))
        kinds = ["linear_attention" if (i + 1) % group else "full_attention" for i in layers]
    changes: dict[str, Any] = {
        "layer_types": kinds,
        "linear_num_heads": raw.get("linear_num_heads", raw.get("num_attention_heads")),
        "linear_head_dim": raw.get("linear_head_dim", raw.get("head_dim", 128)),
    }
    bound = raw.get("kda_lower_bound", -5.0)
    if raw.get("kda_safe_gate", True):
        changes["rate_bound"] = -bound if isinstance(bound, int | float) else bound
    for name in _LIMITS:
        if isinstance(raw.get(name), list) and not any(raw[name]):
            changes[name] = None
    raw = DEEPSEEK_V3.prepare({**raw, **changes})
    width, shared = raw.get("moe_shared_expert_intermediate_size"), raw["n_shared_experts"]
    if isinstance(width, int) and isinstance(shared, int):
        raw = {**raw, "shared_size": width * shared}
    return raw


_ATTENTION: Final = "model.layers.{i}.attention"

LING_3: Final = Family(
    architectures=("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
    model_types=("bailing_hybrid",),
    keys={
        **KIMI_LINEAR.keys,
        "max_positions": read("max_position_embeddings", 262_144),
        "norm_eps": read("rms_norm_eps", 1e-6),
        "rope_theta": read("rope_theta", 6_000_000.0),
        "rotary_pairs": fixed(True),
        "attention_gates": fixed("heads"),
        "num_experts": read("num_experts", 512),
        "experts_per_token": read("num_experts_per_tok", 8),
        "expert_size": read("moe_intermediate_size", 768),
        "normalised_routes": read("norm_topk_prob", True),
        "route_scale": read("routed_scaling_factor", 2.5),
        "expert_groups": read("n_group", 8),
        "groups_per_token": read("topk_group", 4),
        "recurrent_taps": read("short_conv_kernel_size", 4),
        "recurrent_rate_rank": fixed(None),
        "recurrent_rate_bound": read("rate_bound", None),
    },
    tensors={
        **{
            name: place.replace(".self_attn.", ".attention.").replace(".o_proj.", ".dense.")
            for name, place in {**KIMI_LINEAR.tensors, **DEEPSEEK_V3.tensors}.items()
            if isinstance(place, str)
        },
        "embedding": "model.word_embeddings.weight",
        "layers.{i}.attention.q": Either(
            switch="has_query_rank",
            then=f"{_ATTENTION}.q_b_proj.weight",
            otherwise=f"{_ATTENTION}.q_proj.weight",
        ),
        "layers.{i}.attention.gates": f"{_ATTENTION}.g_proj.weight",
        "layers.{i}.recurrence.a": f"{_ATTENTION}.f_proj.weight",
        "layers.{i}.recurrence.gate": f"{_ATTENTION}.g_proj.weight",
        "layers.{i}.router.corrections": "model.layers.{i}.mlp.gate.expert_bias",
    },
    demands={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "gated_attention_proj_granularity_type": "head_wise",
        "no_kda_lora": True,
        "use_kda_lora": False,
        "use_mla_nope": False,
        "rope_interleave": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_nGPT": False,
        "scale_router_input": False,
        "up_proj_norm": False,
        "value_norm": False,
        **dict.fromkeys(_LIMITS),
    },
    prepare=_spell_out,
)
