"""Hunyuan: Llama's shape, queries and keys normalised when they have been rotated, a base that is
stretched; also with experts, and one beside them for all, in every layer. Hunyuan 3: normalised
before, and experts by sigmoids with corrections behind the first layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import GLM4_MOE, name_experts
from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, is_number, read, required

__all__ = ["HUNYUAN", "HUNYUAN_3", "HUNYUAN_MOE"]

_MLP: Final = "model.layers.{i}.mlp"


def _stretch(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The longest wave becomes ``alpha`` times as long, whatever the length of a row."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not isinstance(rope, Mapping) or not rope.get("alpha"):
        return raw
    alpha, theta = rope["alpha"], rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    width = raw.get("head_dim") or raw.get("attention_head_dim")
    if width is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        width = hidden // heads
    if not (is_number(alpha) and alpha > 0 and is_number(theta) and isinstance(width, int)):
        return raw
    base = theta * float(alpha) ** (width / (width - 2)) if width > 2 else theta
    plain = {"rope_type": "default", "rope_theta": base}
    return {**raw, "rope_parameters": plain, "rope_scaling": None, "rope_theta": base}


def _name_experts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What may differ by layer is the same in all."""
    raw = _stretch(raw)
    chosen = raw.get("moe_topk", 1)
    if isinstance(chosen, list) and chosen and all(each == chosen[0] for each in chosen):
        chosen = chosen[0]
    return {**raw, "moe_topk": chosen}


HUNYUAN: Final = Family(
    architectures=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    keys={
        **BASE_KEYS,
        "head_dim": Key(names=("head_dim", "attention_head_dim")),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qk_norm": fixed("per_rotated_head"),
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.query_layernorm.weight",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.key_layernorm.weight",
    },
    prepare=_stretch,
)

HUNYUAN_MOE: Final = Family(
    architectures=("HunYuanMoEV1ForCausalLM",),
    model_types=("hunyuan_v1_moe",),
    keys={
        **HUNYUAN.keys,
        "num_experts": required("num_experts"),
        "experts_per_token": read("moe_topk", 1),
        "expert_size": required("intermediate_size"),
        "normalised_routes": fixed(True),
        "shared_size": required("intermediate_size"),
    },
    tensors={
        **HUNYUAN.tensors,
        "layers.{i}.router.weight": f"{_MLP}.gate.wg.weight",
        "layers.{i}.shared.gate": f"{_MLP}.shared_mlp.gate_proj.weight",
        "layers.{i}.shared.up": f"{_MLP}.shared_mlp.up_proj.weight",
        "layers.{i}.shared.down": f"{_MLP}.shared_mlp.down_proj.weight",
        "layers.{i}.experts.{e}.gate": f"{_MLP}.experts.{{e}}.gate_proj.weight",
        "layers.{i}.experts.{e}.up": f"{_MLP}.experts.{{e}}.up_proj.weight",
        "layers.{i}.experts.{e}.down": f"{_MLP}.experts.{{e}}.down_proj.weight",
    },
    prepare=_name_experts,
)


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The MLP for all is as wide as so many experts; plain layers may be listed."""
    own = {"moe_intermediate_size": 1536, **raw}
    return name_experts({**own, "n_shared_experts": raw.get("num_shared_experts", 1)})


HUNYUAN_3: Final = Family(
    architectures=("HYV3ForCausalLM",),
    model_types=("hy_v3",),
    keys={
        **GLM4_MOE.keys,
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 128),
        "qk_norm": fixed("per_head"),
        "out_bias": read("attention_bias", False),
        "rope_theta": read("rope_theta", 11_158_840.0),
        "rotary_share": fixed(1.0),
        "num_experts": Key(names=("num_experts", "num_local_experts"), default=192),
        "expert_size": read("moe_intermediate_size", 1536),
        "normalised_routes": fixed(True),
        "route_scale": read("router_scaling_factor", 2.826),
        "expert_groups": fixed(1),
        "groups_per_token": fixed(1),
    },
    tensors={
        **GLM4_MOE.tensors,
        "layers.{i}.router.weight": f"{_MLP}.router.gate.weight",
        "layers.{i}.router.corrections": f"{_MLP}.expert_bias",
        "layers.{i}.shared.gate": f"{_MLP}.shared_mlp.gate_proj.weight",
        "layers.{i}.shared.up": f"{_MLP}.shared_mlp.up_proj.weight",
        "layers.{i}.shared.down": f"{_MLP}.shared_mlp.down_proj.weight",
    },
    demands={"mlp_bias": False},
    prepare=_name_layers,
)
