"""Step 3.5 and 3.7 Flash, of the second the part that reads: layers with windows have more query
heads and another rotation than those that see all, and each head a gate; experts by sigmoids with
corrections behind the first layers, and one beside them for all; in some layers gates have limits.

Published lists go on for layers that only guess tokens ahead, which are not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import (
    BASE_KEYS,
    MOST_LAYERS,
    Family,
    Key,
    Stacked,
    fixed,
    is_number,
    read,
    text_part,
)

__all__ = ["STEP"]

_ATTENTION: Final = "model.layers.{i}.self_attn"
_MOE: Final = "model.layers.{i}.moe"
_SHARED: Final = "model.layers.{i}.share_expert"
_WINDOW, _ALL = "sliding_attention", "full_attention"


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = {name: value for name, value in text_part(raw).items() if value is not None}
    num_layers = stated.get("num_hidden_layers", 45)
    count = min(num_layers, MOST_LAYERS) if isinstance(num_layers, int) else 0
    kinds = stated.get("layer_types") or [_ALL] * count
    kinds = kinds[:count] if isinstance(kinds, list) else kinds
    found = {
        **stated,
        **_heads(stated),
        "layer_types": kinds,
        "expert_layers": _expert_layers(stated, count),
        "gates": "heads" if stated.get("use_head_wise_attn_gate", True) else "none",
        "rope_parameters": _ropes(stated, kinds),
        "rope_scaling": None,
        "rope_theta": None,
    }
    if all(own is True for own in _list(stated.get("use_rope_layers"))):
        found["use_rope_layers"] = None
    if stated.get("yarn_only_types") in ([_ALL], []):
        found["yarn_only_types"] = None
    for name, own in (("swiglu_limits", "expert_limits"), ("swiglu_limits_shared", "mlp_limits")):
        if isinstance(limits := stated.get(name), list):
            found |= {name: None, own: [limit or None for limit in limits[:count]]}
    return found


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ([] if value is None else [value])


def _heads(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's are those of layers with windows; what these are said to have otherwise stays
    where it is read, to be refused."""
    others = stated.get("attention_other_setting")
    own = dict(others) if isinstance(others, Mapping) else {}
    left: object = others if others and not own else None
    heads = stated.get("num_attention_heads", 64)
    in_windows = own.pop("num_attention_heads", heads)
    if own.pop("attention_type", _WINDOW) == _WINDOW:
        keys = stated.get("num_attention_groups", stated.get("num_key_value_heads", 8))
        width = stated.get("head_dim", 128)
        same = {"num_attention_groups": keys, "head_dim": width, "true_head_dim": width}
        own = {name: value for name, value in own.items() if value != same.get(name)}
    return {
        "attention_other_setting": own or left,
        "num_attention_heads": stated.get("num_sliding_attention_heads", in_windows),
        "other_num_heads": heads,
    }


def _expert_layers(stated: Mapping[str, Any], count: int) -> object:
    kinds, numbers = stated.get("mlp_layer_types"), stated.get("moe_layers_enum")
    if kinds is not None:
        return [kind == "sparse" for kind in _list(kinds)[:count]]
    if isinstance(numbers, str):
        numbers = [number.strip() for number in numbers.split(",") if number.strip()]
    listed = range(3, count) if numbers is None else _list(numbers)
    own = set(map(str, listed))
    # Of what is no number of a layer nothing follows: none says what it has.
    is_known = all(number.isdecimal() for number in own)
    return [str(layer) in own for layer in range(count)] if is_known else []


def _ropes(stated: Mapping[str, Any], kinds: object) -> object:
    """By kind of layer, each as one of its layers has it; scaled are those that see all."""
    given, scaling = stated.get("rope_parameters"), stated.get("rope_scaling")
    sets = given if isinstance(given, Mapping) else {}
    own = {name for name, value in sets.items() if value and isinstance(value, Mapping)}
    wrong = [one for one in (given, scaling) if one and not isinstance(one, Mapping)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds) or wrong:
        return wrong[0] if wrong else given
    if own and own >= {*kinds}:
        return given
    thetas, shares = stated.get("rope_theta", 1e4), stated.get("partial_rotary_factors", 1.0)
    found = {}
    for layer, kind in reversed([*enumerate(kinds)]):
        found[kind] = {
            **(scaling if isinstance(scaling, Mapping) and kind == _ALL else {}),
            "rope_theta": _of_layer(thetas, layer),
            "partial_rotary_factor": _of_layer(shares, layer),
        }
    return found


def _of_layer(values: object, layer: int) -> object:
    if isinstance(values, list):
        return values[layer] if layer < len(values) and is_number(values[layer]) else "missing"
    return values


STEP: Final = Family(
    architectures=("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    model_types=("step3p5", "step3p7"),
    keys={
        **BASE_KEYS,
        "num_layers": read("num_hidden_layers", 45),
        "hidden_size": read("hidden_size", 4096),
        "intermediate_size": read("intermediate_size", 11_264),
        "num_heads": read("num_attention_heads", 64),
        "num_kv_heads": Key(names=("num_key_value_heads", "num_attention_groups"), default=8),
        "head_dim": read("head_dim", 128),
        "vocab_size": read("vocab_size", 128_815),
        "max_positions": Key(names=("max_position_embeddings", "max_seq_len"), default=128_000),
        "norm": fixed("rms_plus_one"),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qk_norm": fixed("per_head"),
        "attention_scalar": read("query_pre_attn_scalar", None),
        "attention_gates": read("gates", "heads"),
        "other_num_heads": read("other_num_heads", None),
        "uses_windows": fixed(True),
        "window": read("sliding_window", None),
        "num_experts": Key(names=("n_routed_experts", "moe_num_experts"), default=288),
        "experts_per_token": Key(names=("num_experts_per_tok", "moe_top_k"), default=8),
        "expert_size": read("moe_intermediate_size", 1280),
        "normalised_routes": read("norm_expert_weight", True),
        "route_scores": fixed("sigmoid"),
        "route_scale": read("moe_router_scaling_factor", 1.0),
        "route_corrections": read("use_moe_router_bias", True),
        "shared_size": Key(names=("share_expert_dim", "share_expert_dims"), default=1280),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.attention.q_norm": f"{_ATTENTION}.q_norm.weight",
        "layers.{i}.attention.k_norm": f"{_ATTENTION}.k_norm.weight",
        "layers.{i}.attention.gates": f"{_ATTENTION}.g_proj.weight",
        "layers.{i}.router.weight": f"{_MOE}.gate.weight",
        "layers.{i}.router.corrections": f"{_MOE}.router_bias",
        "layers.{i}.shared.gate": f"{_SHARED}.gate_proj.weight",
        "layers.{i}.shared.up": f"{_SHARED}.up_proj.weight",
        "layers.{i}.shared.down": f"{_SHARED}.down_proj.weight",
        "layers.{i}.experts.{e}.gate": Stacked(tensor=f"{_MOE}.gate_proj.weight"),
        "layers.{i}.experts.{e}.up": Stacked(tensor=f"{_MOE}.up_proj.weight"),
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_MOE}.down_proj.weight"),
    },
    demands={
        "attention_other_setting": None,
        "use_rope_layers": None,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
        "yarn_only_types": None,
        "moe_router_activation": "sigmoid",
        "use_qk_norm": True,
        "zero_centered": True,
        "attention_bias": False,
        "mlp_bias": False,
    },
    prepare=_spell_out,
)
