"""OLMo Hybrid: of four layers three keep a state by the gated delta rule, with norms before their
parts, and the fourth attends, with norms of what its parts return, and may not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.olmo import OLMO2
from freight.model.families.table import (
    MOST_LAYERS,
    Family,
    Key,
    OneOf,
    fixed,
    is_number,
    read,
)

__all__ = ["OLMO_HYBRID"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer attends, where none are named; heads are three quarters as wide as those
    that would fill the stream, their values twice that."""
    num_layers, heads = raw.get("num_hidden_layers", 32), raw.get("num_attention_heads", 30)
    kinds = raw.get("layer_types")
    if kinds is None and isinstance(num_layers, int):
        layers = range(min(num_layers, MOST_LAYERS))
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in layers]
        kinds[-1:] = kinds[-1:] if "full_attention" in kinds else ["full_attention"]
    stated = {name: value for name, value in raw.items() if value is not None}
    num_keys, width = stated.get("linear_num_key_heads", heads), raw.get("hidden_size", 3840)
    keys = stated.get("linear_key_head_dim")
    if keys is None and all(is_number(own) and own > 0 for own in (num_keys, width)):
        keys = int(0.75 * width / num_keys)
    twice = 2 * keys if isinstance(keys, int) else keys
    is_wide = raw.get("linear_allow_neg_eigval", True)
    changes: dict[str, Any] = {
        "layer_types": kinds,
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": stated.get("linear_num_value_heads", heads),
        "linear_key_head_dim": keys,
        "linear_value_head_dim": stated.get("linear_value_head_dim", twice),
        "strength": 1.0 + is_wide if isinstance(is_wide, bool) else is_wide,
    }
    if isinstance(kinds, list) and _theta(raw) is None:
        changes |= {"rope_layers": [False] * len(kinds), "rope_parameters": None}
    return {**raw, **changes}


def _theta(raw: Mapping[str, Any]) -> object:
    """The base of the rotation, null where that or all of the rotation is."""
    given, default = raw.get("rope_parameters", {}), 10_000.0
    own = given if isinstance(given, Mapping) else {}
    return own.get("rope_theta", raw.get("rope_theta", None if given is None else default))


_LAYER: Final = "model.layers.{i}"
_MIXER: Final = f"{_LAYER}.linear_attn"
_INNER_NORM: Final = OneOf(
    first=f"{_LAYER}.post_attention_layernorm.weight",
    otherwise=f"{_LAYER}.feedforward_layer_norm.weight",
)

OLMO_HYBRID: Final = Family(
    architectures=("OlmoHybridForCausalLM",),
    model_types=("olmo_hybrid",),
    keys={
        **OLMO2.keys,
        "max_positions": read("max_position_embeddings", 65_536),
        "norm_eps": read("rms_norm_eps", 1e-6),
        "norm_place": fixed("by_kind"),
        "recurrent_apart": fixed(True),
        "recurrent_strength": Key(names=("strength",), required=True),
        "recurrent_read_eps": fixed(1e-5),
        "recurrent_taps": read("linear_conv_kernel_dim", 4),
        "recurrent_key_heads": read("linear_num_key_heads", None),
        "recurrent_heads": read("linear_num_value_heads", None),
        "recurrent_key_width": read("linear_key_head_dim", None),
        "recurrent_value_width": read("linear_value_head_dim", None),
    },
    tensors={
        **OLMO2.tensors,
        "layers.{i}.attention.norm": OneOf(
            first=f"{_LAYER}.input_layernorm.weight",
            otherwise=f"{_LAYER}.attention_layer_norm.weight",
        ),
        "layers.{i}.attention.post_norm": _INNER_NORM,
        "layers.{i}.mlp.norm": _INNER_NORM,
        "layers.{i}.mlp.post_norm": f"{_LAYER}.post_feedforward_layernorm.weight",
        **{f"layers.{{i}}.recurrence.{x}": f"{_MIXER}.{x}_proj.weight" for x in "qkvab"},
        **{
            f"layers.{{i}}.recurrence.{x}_convolution": f"{_MIXER}.{x}_conv1d.weight" for x in "qkv"
        },
        "layers.{i}.recurrence.gate": f"{_MIXER}.g_proj.weight",
        "layers.{i}.recurrence.decay": f"{_MIXER}.A_log",
        "layers.{i}.recurrence.decay_bias": f"{_MIXER}.dt_bias",
        "layers.{i}.recurrence.read_norm": f"{_MIXER}.o_norm.weight",
        "layers.{i}.recurrence.out": f"{_MIXER}.o_proj.weight",
    },
    demands={"hidden_act": "silu"},
    prepare=_spell_out,
)
