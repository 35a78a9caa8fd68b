"""MiMo V2 Flash: layers with windows have sinks and twice as many heads of keys as those that see
all; values are narrower than keys, and scaled. Experts as in GLM-4.5, but none for all tokens.

Published files say by numbers which layers have windows and experts, and count the tokens before
one that its window reaches; those that transformers writes name the kinds, and count itself too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.glm_moe import GLM4_MOE
from freight.model.families.table import MOST_LAYERS, Family, Key, OneOf, fixed, read

__all__ = ["MIMO_V2_FLASH"]

_SINKS: Final = "model.layers.{i}.self_attn"
_WINDOW, _ALL = "sliding_attention", "full_attention"
_SAME_IN_WINDOWS: Final = {
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_attention_heads": "num_attention_heads",
}
"""What layers with windows are said to have, and what the others have: one size is read."""
_UNSTATED: Final = {
    "head_dim": 192,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = {name: value for name, value in raw.items() if value is not None}
    own = {**_UNSTATED, **stated}
    num_layers = own.get("num_hidden_layers")
    layers = range(min(num_layers, MOST_LAYERS) if isinstance(num_layers, int) else 0)
    kinds = own.get("layer_types") or _kinds(own.get("hybrid_layer_pattern"), _ALL, _WINDOW)
    if kinds is None:
        kinds = [_WINDOW if i and (i + 1) % 6 else _ALL for i in layers]
    parts = own.get("mlp_layer_types") or _kinds(own.get("moe_layer_freq"), "dense", "sparse")
    if parts is None:
        parts = ["sparse" if i else "dense" for i in layers]
    heads, before = own["num_key_value_heads"], own.get("sliding_window_size")
    scale = raw.get("attention_value_scale", 0.707)
    found = {
        **own,
        "layer_types": kinds,
        "expert_layers": [part == "sparse" for part in parts] if isinstance(parts, list) else parts,
        "window_heads": 2 * heads if isinstance(heads, int) else heads,
        "window_sinks": not own.get("add_full_attention_sink_bias", False),
        "rope_parameters": own.get("rope_parameters") or _ropes(own),
        "matrix_factors": {} if scale is None else {"attention.v": scale},
    }
    if isinstance(before, int):
        found["sliding_window"] = before + 1
    for name, like in _SAME_IN_WINDOWS.items():
        if name in own and own[name] == own.get(like):
            del found[name]
    if own.get("swa_num_key_value_heads") == found["window_heads"]:
        del found["swa_num_key_value_heads"]
    return found


def _kinds(numbers: object, zero: str, one: str) -> list[str] | None:
    """Layers by a list of 0 and 1; None where there is none."""
    if not isinstance(numbers, list) or any(number not in (0, 1) for number in numbers):
        return None
    return [one if number else zero for number in numbers]


def _ropes(own: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    share = own["partial_rotary_factor"]
    return {
        kind: {"rope_type": "default", "rope_theta": own[name], "partial_rotary_factor": share}
        for kind, name in ((_ALL, "rope_theta"), (_WINDOW, "swa_rope_theta"))
    }


MIMO_V2_FLASH: Final = Family(
    architectures=("MiMoV2FlashForCausalLM",),
    model_types=("mimo_v2_flash",),
    keys={
        **GLM4_MOE.keys,
        "num_kv_heads": read("window_heads", 8),
        "head_dim": read("head_dim", 192),
        "value_width": read("v_head_dim", 128),
        "other_num_kv_heads": read("num_key_value_heads", 4),
        "norm_eps": Key(names=("rms_norm_eps", "layernorm_epsilon"), default=1e-5),
        "qk_norm": fixed("none"),
        "attention_sinks": read("add_swa_attention_sink_bias", True),
        "window_sinks": read("window_sinks", True),
        "uses_windows": fixed(True),
        "window": read("sliding_window", 129),
        "num_experts": Key(names=("n_routed_experts", "num_local_experts"), default=256),
        "expert_size": read("moe_intermediate_size", 2048),
        "shared_size": fixed(0),
    },
    tensors={
        **GLM4_MOE.tensors,
        "layers.{i}.attention.sinks": OneOf(
            first=f"{_SINKS}.attention_sink_bias", otherwise=f"{_SINKS}.sinks"
        ),
    },
    demands={
        **dict.fromkeys(_SAME_IN_WINDOWS),
        "swa_num_key_value_heads": None,
        "n_shared_experts": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    prepare=_spell_out,
)
