"""Gemma 4: like Gemma 3, with a number that scales the stream behind each layer and values that are
normed. Layers that see all have heads of another size, whose keys are made values too, and turn
the fastest quarter of each. Some have experts beside their MLP. Of small ones (E2B, E4B) the later
layers attend the keys of earlier ones, and all have inputs of their own. Of models that also see or
hear, the part that reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.gemma3 import GEMMA3
from freight.model.families.table import (
    Family,
    Key,
    Stacked,
    fixed,
    read,
    text_part,
    window_kinds,
)

__all__ = ["GEMMA4"]

_LAST: Final = "full_attention"
_ROPES: Final = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    _LAST: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_VOCABULARY: Final = 262_144
_UNSTATED: Final = {
    "hidden_size": 2304,
    "hidden_size_per_layer_input": 256,
    "global_head_dim": 512,
    "rope_parameters": _ROPES,
}
_UNSTATED_IF_UNIFIED: Final = {
    **_UNSTATED,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last layer sees all, whatever is listed; of text each token sees those before it, also
    where pictures see all of themselves."""
    stated = {name: value for name, value in text_part(raw).items() if value is not None}
    is_unified = "unified" in str(stated.get("model_type"))
    raw = {**(_UNSTATED_IF_UNIFIED if is_unified else _UNSTATED), **stated}
    kinds = raw.get("layer_types") or window_kinds(raw.get("num_hidden_layers"), 6)
    if isinstance(kinds, list) and kinds:
        kinds = [*kinds[:-1], _LAST]
    width, shares = raw["hidden_size"], raw.get("attention_k_eq_v", False)
    is_wide = isinstance(width, int) and not isinstance(width, bool) and width > 0
    raw = {
        **_with_other_heads(raw, kinds),
        "layer_types": kinds,
        "keys_are_values": shares,
        "rope_parameters": _without_shares(raw["rope_parameters"]),
        "embedding_scale": width**0.5 if is_wide else width,
        "num_experts": raw.get("num_experts") if raw.get("enable_moe_block") else None,
    }
    rows = raw.pop("vocab_size_per_layer_input", None) or _VOCABULARY
    if raw["hidden_size_per_layer_input"] and rows != raw.get("vocab_size", _VOCABULARY):
        raw["vocab_size_per_layer_input"] = rows  # refused: each token has inputs
    if raw.get("use_bidirectional_attention") == "vision":
        del raw["use_bidirectional_attention"]
    return raw


def _without_shares(ropes: object) -> object:
    """The rotations, of which only a proportional one leaves some of a head as it is."""
    if not isinstance(ropes, Mapping):
        return ropes
    return {
        kind: {name: value for name, value in own.items() if name != "partial_rotary_factor"}
        if isinstance(own, Mapping) and own.get("rope_type", "default") == "default"
        else own
        for kind, own in ropes.items()
    }


def _with_other_heads(raw: Mapping[str, Any], kinds: object) -> dict[str, Any]:
    """Newer files list the layers whose heads differ; those that see all are to be the same."""
    listed = raw.get("per_layer_config")
    if listed is None:
        count = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
        return {**raw, "num_global_key_value_heads": count}
    numbers = (
        [i for i, kind in enumerate(kinds) if kind == _LAST] if isinstance(kinds, list) else []
    )
    by_layer = listed if isinstance(listed, dict) and all(map(str.isdecimal, listed)) else {}
    found = {int(number): own for number, own in by_layer.items()}
    first = next(iter(found.values()), None)
    known = {"head_dim", "num_key_value_heads"}
    if (
        not isinstance(first, dict)
        or first.keys() - known
        or found != dict.fromkeys(numbers, first)
    ):
        return dict(raw)  # refused for what it lists
    return {
        **{name: value for name, value in raw.items() if name != "per_layer_config"},
        "global_head_dim": first.get("head_dim"),
        "num_global_key_value_heads": first.get("num_key_value_heads"),
    }


_LAYER: Final = "model.layers.{i}"
_NORM: Final = f"{_LAYER}.post_feedforward_layernorm"

GEMMA4: Final = Family(
    architectures=(
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    ),
    model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
    keys={
        **GEMMA3.keys,
        "norm": fixed("rms"),
        "vocab_size": read("vocab_size", _VOCABULARY),
        "attention_scalar": fixed(1.0),
        "window": read("sliding_window", 512),
        "other_num_kv_heads": read("num_global_key_value_heads", None),
        "other_head_dim": read("global_head_dim", None),
        "keys_are_values": read("keys_are_values", False),
        "value_norm": fixed(True),
        "layer_scales": fixed(True),
        "layer_inputs": read("hidden_size_per_layer_input", None),
        "sharing_layers": read("num_kv_shared_layers", 0),
        "sharing_doubles_mlp": read("use_double_wide_mlp", False),
        "num_experts": read("num_experts", None),
        "experts_per_token": Key(names=("top_k_experts",)),
        "expert_size": Key(names=("moe_intermediate_size",)),
        "route_gains": fixed(True),
        "beside_mlp": fixed(True),
    },
    tensors={
        **GEMMA3.tensors,
        "embedding.inputs": "model.embed_tokens_per_layer.weight",
        "embedding.inputs_of": "model.per_layer_model_projection.weight",
        "embedding.inputs_norm": "model.per_layer_projection_norm.weight",
        "layers.{i}.inputs.gate": f"{_LAYER}.per_layer_input_gate.weight",
        "layers.{i}.inputs.out": f"{_LAYER}.per_layer_projection.weight",
        "layers.{i}.inputs.norm": f"{_LAYER}.post_per_layer_input_norm.weight",
        "layers.{i}.scale": f"{_LAYER}.layer_scalar",
        "layers.{i}.mlp.own_norm": f"{_NORM}_1.weight",
        "layers.{i}.router.norm": f"{_LAYER}.router.scale",
        "layers.{i}.router.weight": f"{_LAYER}.router.proj.weight",
        "layers.{i}.router.gains": f"{_LAYER}.router.per_expert_scale",
        "layers.{i}.experts.norm": f"{_LAYER}.pre_feedforward_layernorm_2.weight",
        "layers.{i}.experts.post_norm": f"{_NORM}_2.weight",
        **{
            f"layers.{{i}}.experts.{{e}}.{name}": Stacked(
                tensor=f"{_LAYER}.experts.gate_up_proj", parts=2, part=part
            )
            for part, name in enumerate(("gate", "up"))
        },
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_LAYER}.experts.down_proj"),
    },
    demands={
        "use_bidirectional_attention": None,
        "vocab_size_per_layer_input": None,
        "per_layer_config": None,
    },
    prepare=_spell_out,
)
