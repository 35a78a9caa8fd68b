"""Mellum 2: Qwen3 with experts, of whose layers some have windows and a rotation of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import name_experts
from freight.model.families.qwen import QWEN3_MOE
from freight.model.families.table import MOST_LAYERS, Family, Key, fixed, read

__all__ = ["MELLUM"]

_ROPES: Final = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """All layers see all, and have experts, unless it is said."""
    kinds, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    if kinds is None and isinstance(num_layers, int):
        kinds = ["full_attention"] * min(num_layers, MOST_LAYERS)
    rope = raw.get("rope_parameters") or _ROPES
    own = {"first_k_dense_replace": 0, "n_shared_experts": 0}
    return name_experts({**raw, **own, "layer_types": kinds, "rope_parameters": rope})


MELLUM: Final = Family(
    architectures=("MellumForCausalLM",),
    model_types=("mellum",),
    keys={
        **QWEN3_MOE.keys,
        "max_positions": read("max_position_embeddings", 131_072),
        "num_kv_heads": read("num_key_value_heads", 4),
        "head_dim": read("head_dim", 128),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=1024, null_is_value=True),
        "num_experts": Key(names=("num_experts", "num_local_experts"), default=64),
        "expert_size": read("moe_intermediate_size", 896),
        "normalised_routes": read("norm_topk_prob", True),
    },
    tensors=QWEN3_MOE.tensors,
    prepare=_name_layers,
)
