"""Flint: Qwen3's heads with a sink in each, layers that see all without positions, experts chosen
by sigmoids and one beside them for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.qwen import QWEN3_MOE, name_expert_layers
from freight.model.families.table import MOST_LAYERS, Family, Key, fixed, read

__all__ = ["FLINT"]

_SHARED: Final = "model.layers.{i}.mlp.shared_expert"


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first two layers, every fourth from there and the last one see all; the first two have no
    experts."""
    kinds, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    plain = raw.get("mlp_only_layers")
    raw = name_expert_layers({**raw, "mlp_only_layers": [0, 1] if plain is None else plain})
    if kinds is None and isinstance(num_layers, int):
        kinds = [
            "full_attention" if i < 2 or i % 4 == 1 or i == num_layers - 1 else "sliding_attention"
            for i in range(min(num_layers, MOST_LAYERS))
        ]
    if not isinstance(kinds, list):
        return raw
    rotates = [kind == "sliding_attention" for kind in kinds]
    return {**raw, "layer_types": kinds, "rope_layers": rotates}


FLINT: Final = Family(
    architectures=("FlintForCausalLM",),
    model_types=("flint",),
    keys={
        **QWEN3_MOE.keys,
        "max_positions": read("max_position_embeddings", 262_144),
        "num_kv_heads": read("num_key_value_heads", 4),
        "head_dim": read("head_dim", 128),
        "attention_sinks": fixed(True),
        "uses_windows": fixed(True),
        "window": read("sliding_window", 513),
        "num_experts": Key(names=("num_experts", "num_local_experts"), default=256),
        "experts_per_token": read("num_experts_per_tok", 6),
        "expert_size": read("moe_intermediate_size", 512),
        "normalised_routes": read("norm_topk_prob", True),
        "route_scores": fixed("sigmoid"),
        "shared_size": read("shared_expert_intermediate_size", 1024),
    },
    tensors={
        **QWEN3_MOE.tensors,
        "layers.{i}.attention.sinks": "model.layers.{i}.self_attn.softmax_offset",
        "layers.{i}.shared.gate": f"{_SHARED}.gate_proj.weight",
        "layers.{i}.shared.up": f"{_SHARED}.up_proj.weight",
        "layers.{i}.shared.down": f"{_SHARED}.down_proj.weight",
    },
    prepare=_name_layers,
)
