"""ERNIE 4.5 with experts: rotation of neighbours; in some layers experts by softmax, with
corrections, and one beside them for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import ERNIE45, LLAMA_TENSORS
from freight.model.families.table import MOST_LAYERS, Family, Key, fixed, read

__all__ = ["ERNIE45_MOE"]

_MLP: Final = "model.layers.{i}.mlp"


def _name_experts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    num_layers, every = raw.get("num_hidden_layers"), raw.get("moe_layer_interval", 1)
    first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    width, shared = raw.get("moe_intermediate_size", 1536), raw.get("moe_num_shared_experts", 2)
    counts = (num_layers, every, first, last, width, shared)
    if not all(isinstance(count, int) for count in counts) or every < 1:
        return raw
    layers = range(min(num_layers or 0, MOST_LAYERS))
    last = len(layers) - 1 if last == -1 else last
    return {
        **raw,
        "expert_layers": [(i + 1) % every == 0 and first <= i <= last for i in layers],
        "shared_size": width * shared,
    }


ERNIE45_MOE: Final = Family(
    architectures=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    keys={
        **ERNIE45.keys,
        "max_positions": read("max_position_embeddings", 131_072),
        "num_kv_heads": read("num_key_value_heads", 4),
        "head_dim": read("head_dim", None),
        "num_experts": Key(names=("moe_num_experts", "num_experts"), default=64),
        "experts_per_token": Key(names=("moe_k", "num_experts_per_tok"), default=6),
        "expert_size": read("moe_intermediate_size", 1536),
        "normalised_routes": fixed(True),
        "route_corrections": fixed(True),
        "shared_size": read("shared_size", 0),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.router.weight": f"{_MLP}.gate.weight",
        "layers.{i}.router.corrections": f"{_MLP}.moe_statics.e_score_correction_bias",
        "layers.{i}.shared.gate": f"{_MLP}.shared_experts.gate_proj.weight",
        "layers.{i}.shared.up": f"{_MLP}.shared_experts.up_proj.weight",
        "layers.{i}.shared.down": f"{_MLP}.shared_experts.down_proj.weight",
        "layers.{i}.experts.{e}.gate": f"{_MLP}.experts.{{e}}.gate_proj.weight",
        "layers.{i}.experts.{e}.up": f"{_MLP}.experts.{{e}}.up_proj.weight",
        "layers.{i}.experts.{e}.down": f"{_MLP}.experts.{{e}}.down_proj.weight",
    },
    demands={"use_bias": False},
    prepare=_name_experts,
)
