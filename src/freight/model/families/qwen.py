"""Qwen2: biases on query, key and value. Qwen3: norms on query and key instead, and experts. Of
models that also see, the part that reads: to text their positions in three directions are one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import (
    BASE_KEYS,
    MOST_LAYERS,
    Family,
    Key,
    Stacked,
    fixed,
    read,
    text_part,
)

__all__ = ["QWEN2", "QWEN2_MOE", "QWEN3", "QWEN3_MOE", "QWEN3_VL_MOE", "name_expert_layers"]

_KEYS: Final = {
    **BASE_KEYS,
    "max_positions": read("max_position_embeddings", 32_768),
    "uses_windows": read("use_sliding_window", False),
    "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
    "first_window_layer": read("max_window_layers", 28),
}
_QWEN3_KEYS: Final = {
    **_KEYS,
    "qk_norm": fixed("per_head"),
    "qkv_bias": read("attention_bias", False),
    "out_bias": read("attention_bias", False),
}
_QWEN3_TENSORS: Final = {
    **LLAMA_TENSORS,
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}
_EXPERT: Final = "model.layers.{i}.mlp.experts.{e}"
_EXPERT_KEYS: Final = {
    "num_experts": Key(names=("num_experts", "num_local_experts"), default=128),
    "experts_per_token": read("num_experts_per_tok", 8),
    "expert_size": read("moe_intermediate_size", 768),
    "normalised_routes": read("norm_topk_prob", False),
}
_EXPERT_TENSORS: Final = {
    "layers.{i}.router.weight": "model.layers.{i}.mlp.gate.weight",
    "layers.{i}.experts.{e}.gate": f"{_EXPERT}.gate_proj.weight",
    "layers.{i}.experts.{e}.up": f"{_EXPERT}.up_proj.weight",
    "layers.{i}.experts.{e}.down": f"{_EXPERT}.down_proj.weight",
}
_SHARED: Final = "model.layers.{i}.mlp.shared_expert"


def name_expert_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every ``decoder_sparse_step``-th layer has experts, unless it is listed as plain."""
    raw = text_part(raw)
    step, plain = raw.get("decoder_sparse_step") or 1, raw.get("mlp_only_layers") or []
    layers = range(0)
    if _are_counts(raw, step, plain):
        layers = range(min(raw["num_hidden_layers"], MOST_LAYERS))
    return {**raw, "expert_layers": [(i + 1) % step == 0 and i not in plain for i in layers]}


def _are_counts(raw: Mapping[str, Any], step: object, plain: object) -> bool:
    num_layers = raw.get("num_hidden_layers")
    return (
        isinstance(num_layers, int)
        and isinstance(step, int)
        and step > 0
        and isinstance(plain, list)
    )


QWEN2: Final = Family(
    architectures=(
        "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    model_types=(
        "qwen2",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen2_5_omni_text",
    ),
    keys={**_KEYS, "qkv_bias": fixed(True)},
    tensors=LLAMA_TENSORS,
    prepare=text_part,
)

QWEN3: Final = Family(
    architectures=("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
    model_types=("qwen3", "qwen3_vl", "qwen3_vl_text"),
    keys={**_QWEN3_KEYS, "head_dim": read("head_dim", 128)},
    tensors=_QWEN3_TENSORS,
    prepare=text_part,
)

QWEN3_MOE: Final = Family(
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe", "qwen3_omni_moe_text"),
    keys={
        **_QWEN3_KEYS,
        **_EXPERT_KEYS,
    },
    tensors={**_QWEN3_TENSORS, **_EXPERT_TENSORS},
    prepare=name_expert_layers,
)

_STACKED: Final = "model.layers.{i}.mlp.experts"
_GATE_UP: Final = f"{_STACKED}.gate_up_proj"

QWEN3_VL_MOE: Final = Family(
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    keys={**QWEN3_MOE.keys, "normalised_routes": fixed(True)},
    tensors={
        **QWEN3_MOE.tensors,
        "layers.{i}.experts.{e}.gate": Stacked(tensor=_GATE_UP, parts=2, part=0, turned=True),
        "layers.{i}.experts.{e}.up": Stacked(tensor=_GATE_UP, parts=2, part=1, turned=True),
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_STACKED}.down_proj", turned=True),
    },
    prepare=name_expert_layers,
)

QWEN2_MOE: Final = Family(
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    keys={
        **_KEYS,
        **_EXPERT_KEYS,
        "qkv_bias": read("qkv_bias", True),
        "num_experts": read("num_experts", 60),
        "experts_per_token": read("num_experts_per_tok", 4),
        "expert_size": read("moe_intermediate_size", 1408),
        "shared_size": read("shared_expert_intermediate_size", 5632),
        "shared_gate": fixed(True),
    },
    tensors={
        **LLAMA_TENSORS,
        **_EXPERT_TENSORS,
        "layers.{i}.shared.gate": f"{_SHARED}.gate_proj.weight",
        "layers.{i}.shared.up": f"{_SHARED}.up_proj.weight",
        "layers.{i}.shared.down": f"{_SHARED}.down_proj.weight",
        "layers.{i}.shared.share": f"{_SHARED}_gate.weight",
    },
    prepare=name_expert_layers,
)
