"""Phi-1.5 and Phi-2: attention and a plain MLP side by side over one layer norm, a part of each
head rotated, biases everywhere, also of the output head. Persimmon: one after the other, norms on
queries and keys, which are stacked head by head, and no bias of the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import DECODER_TENSORS, PROJECTION_BIASES
from freight.model.families.table import BASE_KEYS, Family, fixed, read

__all__ = ["PERSIMMON", "PHI"]

_LAYER: Final = "model.layers.{i}"
_QK_NORMS: Final = {
    f"layers.{{i}}.attention.{own}_norm{suffix}": f"{_LAYER}.self_attn.{own}_layernorm.{part}"
    for own in "qk"
    for suffix, part in (("", "weight"), ("_bias", "bias"))
}


def _name_norms(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**raw, "qk_norm": "per_head" if raw.get("qk_layernorm") else "none"}


def _name_norms_unless_told(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """There are such norms where config.json does not say otherwise."""
    return _name_norms({"qk_layernorm": True, **raw})


PHI: Final = Family(
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    keys={
        **BASE_KEYS,
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_eps", 1e-5),
        "parallel": fixed(True),
        "shared_norm": fixed(True),
        "gated_mlp": fixed(False),
        "activation": read("hidden_act", "gelu_new"),
        **{f"{name}_bias": fixed(True) for name in ("norm", "qkv", "out", "mlp", "head")},
        "qk_norm": read("qk_norm", "none"),
        "qk_norm_bias": read("qk_layernorm", False),
        "rotary_share": read("partial_rotary_factor", 0.5),
    },
    tensors={
        **DECODER_TENSORS,
        **PROJECTION_BIASES,
        **_QK_NORMS,
        "layers.{i}.attention.norm_bias": f"{_LAYER}.input_layernorm.bias",
        "layers.{i}.attention.out": f"{_LAYER}.self_attn.dense.weight",
        "layers.{i}.attention.out_bias": f"{_LAYER}.self_attn.dense.bias",
        "layers.{i}.mlp.norm": f"{_LAYER}.input_layernorm.weight",
        "layers.{i}.mlp.norm_bias": f"{_LAYER}.input_layernorm.bias",
        "layers.{i}.mlp.up": f"{_LAYER}.mlp.fc1.weight",
        "layers.{i}.mlp.up_bias": f"{_LAYER}.mlp.fc1.bias",
        "layers.{i}.mlp.down": f"{_LAYER}.mlp.fc2.weight",
        "layers.{i}.mlp.down_bias": f"{_LAYER}.mlp.fc2.bias",
        "head.norm": "model.final_layernorm.weight",
        "head.norm_bias": "model.final_layernorm.bias",
        "head.bias": "lm_head.bias",
    },
    prepare=_name_norms,
)

_NAMES: Final = {
    "attention.norm": "input_layernorm",
    "attention.qkv": "self_attn.query_key_value",
    "attention.out": "self_attn.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

PERSIMMON: Final = Family(
    architectures=("PersimmonForCausalLM",),
    model_types=("persimmon",),
    keys={
        **PHI.keys,
        "num_kv_heads": fixed(None),
        "head_dim": fixed(None),
        "max_positions": read("max_position_embeddings", 16_384),
        "parallel": fixed(False),
        "shared_norm": fixed(False),
        "activation": read("hidden_act", "relu2"),
        "fused_qkv": fixed(True),
        "head_bias": fixed(False),
        "qk_norm_bias": read("qk_layernorm", True),
    },
    tensors={
        **DECODER_TENSORS,
        **_QK_NORMS,
        **{f"layers.{{i}}.{key}": f"{_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_LAYER}.{name}.bias" for key, name in _NAMES.items()},
        "head.norm": "model.final_layernorm.weight",
        "head.norm_bias": "model.final_layernorm.bias",
    },
    prepare=_name_norms_unless_told,
)
