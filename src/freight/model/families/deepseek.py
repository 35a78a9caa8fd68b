"""DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7 Flash: keys and values as latents, experts by groups,
and one beside them for all. V2 scores by softmax, the others by sigmoids with corrections. A.X K1:
what these make has a norm, and nothing is corrected. Youtu: latents without experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import GLM4_MOE, name_experts
from freight.model.families.table import Either, Family, OneOf, fixed, is_number, read, text_part

__all__ = ["AXK1", "DEEPSEEK_V2", "DEEPSEEK_V3", "GLM4_MOE_LITE", "YOUTU", "spell_out_latents"]

_MOST_STRETCH: Final = 1e9


def _scalar(raw: Mapping[str, Any], width: int) -> float:
    """Scores are divided by its root: that of a query's width, less what longer contexts add."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return float(width)
    kind = rope.get("rope_type", rope.get("type", "default"))
    share, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if kind == "default" or not share or not is_number(share) or not is_number(factor):
        return float(width)
    stretch = 0.1 * share * math.log(max(factor, 1.0)) + 1.0
    # What no model was trained with, the rotary embedding refuses by its name.
    return float(width / stretch**4) if 1 <= stretch < _MOST_STRETCH else float(width)


def spell_out_latents(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """One key of a latent and what is rotated."""
    raw = name_experts({"moe_intermediate_size": 2048, **raw})
    rank, turned = raw.get("kv_lora_rank", 512), raw.get("qk_rope_head_dim", 64)
    keys = raw.get("qk_nope_head_dim", 128)
    are_widths = all(isinstance(width, int) and width >= 0 for width in (rank, turned, keys))
    if not are_widths or not rank or not keys:
        return {**raw, "latent_rank": rank, "latent_head": None}
    widths = {"latent_rank": rank, "latent_head": rank + turned, "rotary_width": turned}
    return {**raw, **widths, "score_scalar": _scalar(raw, keys + turned)}


def _spell_out_older(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """All layers have experts unless it is said, and groups count only where these are chosen by
    them."""
    raw = spell_out_latents({"first_k_dense_replace": 0, **raw})
    if raw.get("topk_method", "greedy") == "greedy":
        return {**raw, "n_group": 1, "topk_group": 1}
    return raw


_KEYS: Final = {
    **GLM4_MOE.keys,
    "num_kv_heads": fixed(1),
    "head_dim": read("latent_head", None),
    "norm_eps": read("rms_norm_eps", 1e-6),
    "out_bias": read("attention_bias", False),
    "qk_norm": fixed("none"),
    "attention_scalar": read("score_scalar", None),
    "rotary_share": fixed(1.0),
    "rotary_width": read("rotary_width", None),
    "rotary_pairs": read("rope_interleave", True),
    "latent_rank": read("latent_rank", None),
    "query_rank": read("q_lora_rank", None),
    "latent_key_width": read("qk_nope_head_dim", 128),
    "latent_value_width": read("v_head_dim", 128),
}
_ATTENTION: Final = "model.layers.{i}.self_attn"
_FROM_RANK: Final = Either(
    switch="has_query_rank",
    then=f"{_ATTENTION}.q_b_proj.weight",
    otherwise=f"{_ATTENTION}.q_proj.weight",
)
_TENSORS: Final = {
    **GLM4_MOE.tensors,
    "layers.{i}.attention.q": _FROM_RANK,
    "layers.{i}.attention.q_down": f"{_ATTENTION}.q_a_proj.weight",
    "layers.{i}.attention.q_down_bias": f"{_ATTENTION}.q_a_proj.bias",
    "layers.{i}.attention.q_down_norm": f"{_ATTENTION}.q_a_layernorm.weight",
    "layers.{i}.attention.kv_down": f"{_ATTENTION}.kv_a_proj_with_mqa.weight",
    "layers.{i}.attention.kv_down_bias": f"{_ATTENTION}.kv_a_proj_with_mqa.bias",
    "layers.{i}.attention.kv_norm": f"{_ATTENTION}.kv_a_layernorm.weight",
    "layers.{i}.attention.kv_up": f"{_ATTENTION}.kv_b_proj.weight",
    "layers.{i}.attention.out_bias": f"{_ATTENTION}.o_proj.bias",
}


def _spell_out_plain(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return spell_out_latents({"q_lora_rank": 1536, **raw})


def _spell_out_newer(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Three layers have none. Of Kimi K2.5, which also sees, the part that reads."""
    return spell_out_latents({"first_k_dense_replace": 3, **text_part(raw)})


DEEPSEEK_V3: Final = Family(
    architectures=("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
    model_types=("deepseek_v3", "kimi_k2", "kimi_k25"),
    keys={
        **_KEYS,
        "num_experts": read("n_routed_experts", 256),
        "expert_size": read("moe_intermediate_size", 2048),
        "route_scale": read("routed_scaling_factor", 2.5),
        "expert_groups": read("n_group", 8),
        "groups_per_token": read("topk_group", 4),
    },
    tensors=_TENSORS,
    prepare=_spell_out_newer,
)

AXK1: Final = Family(
    architectures=("AXK1ForCausalLM",),
    model_types=("axk1", "AXK1"),
    keys={
        **DEEPSEEK_V3.keys,
        "max_positions": read("max_position_embeddings", 32_768),
        "norm_place": fixed("experts"),
        "num_experts": read("n_routed_experts", 192),
        "route_corrections": fixed(False),
    },
    tensors={
        **_TENSORS,
        "layers.{i}.mlp.post_norm": OneOf(
            first="model.layers.{i}.post_mlp_layernorm.weight",
            otherwise="model.layers.{i}.mlp.post_mlp_layernorm.weight",
        ),
    },
    prepare=_spell_out_plain,
)

GLM4_MOE_LITE: Final = Family(
    architectures=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    keys={
        **_KEYS,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "route_scale": read("routed_scaling_factor", 1.8),
    },
    tensors=_TENSORS,
    prepare=spell_out_latents,
)

DEEPSEEK_V2: Final = Family(
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    keys={
        **_KEYS,
        "num_experts": read("n_routed_experts", 64),
        "experts_per_token": read("num_experts_per_tok", 6),
        "normalised_routes": fixed(False),
        "route_scores": fixed("softmax"),
        "route_corrections": fixed(False),
        "best_of_group": fixed(1),
    },
    tensors=_TENSORS,
    prepare=_spell_out_older,
)


YOUTU: Final = Family(
    architectures=("YoutuForCausalLM",),
    model_types=("youtu",),
    keys={
        **_KEYS,
        "num_experts": fixed(None),
        "tied_embeddings": read("tie_word_embeddings", True),
    },
    tensors=_TENSORS,
    prepare=_spell_out_plain,
)
