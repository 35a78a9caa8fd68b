"""OLMo: Llama's shape with layer norms that have no weights. OLMo 2 and 3: no norms before the
parts of a layer, but one of what each returns, and one over all queries and all keys; the third has
windows, whose layers are rotated without scaling. OLMoE: norms before, and experts. FlexOlmo:
experts with a norm of what they make together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA, LLAMA_TENSORS
from freight.model.families.qwen import QWEN3_MOE
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read, rope_by_kind

__all__ = ["FLEX_OLMO", "OLMO", "OLMO2", "OLMO3", "OLMOE"]

_THETA: Final = 500_000.0
_KEYS: Final = {
    **BASE_KEYS,
    "norm_eps": read("rms_norm_eps", 1e-5),
    "norm_place": fixed("update"),
    "qk_norm": fixed("whole"),
    "qkv_bias": read("attention_bias", False),
    "out_bias": read("attention_bias", False),
}
_TENSORS: Final = {
    **LLAMA_TENSORS,
    "layers.{i}.attention.norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.mlp.norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer sees all; the others are not scaled."""
    return rope_by_kind(raw, every=4, windows={})


OLMO: Final = Family(
    architectures=("OlmoForCausalLM",),
    model_types=("olmo",),
    keys={
        **LLAMA.keys,
        "norm": fixed("layer_bare"),
        "norm_eps": fixed(1e-5),
        "mlp_bias": fixed(False),
        "qkv_limit": read("clip_qkv", None),
    },
    tensors=LLAMA_TENSORS,
)

OLMO2: Final = Family(
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    keys=_KEYS,
    tensors=_TENSORS,
)

OLMOE: Final = Family(
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 4096),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qk_norm": fixed("whole"),
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
        "num_experts": read("num_experts", 64),
        "experts_per_token": read("num_experts_per_tok", 8),
        "expert_size": read("intermediate_size", None),
        "normalised_routes": read("norm_topk_prob", False),
    },
    tensors={**QWEN3_MOE.tensors},
    demands={"clip_qkv": None},
)

FLEX_OLMO: Final = Family(
    architectures=("FlexOlmoForCausalLM",),
    model_types=("flex_olmo",),
    keys={
        **OLMOE.keys,
        "norm_eps": read("rms_norm_eps", 1e-6),
        "norm_place": fixed("update"),
        "rope_theta": read("rope_theta", _THETA),
        "num_experts": read("num_experts", 7),
        "experts_per_token": read("num_experts_per_tok", 5),
    },
    tensors={**OLMOE.tensors, **_TENSORS},
)

OLMO3: Final = Family(
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    keys={
        **_KEYS,
        "rope_theta": read("rope_theta", _THETA),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
    },
    tensors=_TENSORS,
    prepare=_spell_out,
)
