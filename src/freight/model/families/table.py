"""What a family's table is made of: where switches come from, and what tensors are called.

Plain data; knows no files, tensors or configurations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

__all__ = [
    "ACTIVATIONS",
    "BASE_KEYS",
    "MOST_EXPERTS",
    "MOST_LAYERS",
    "Either",
    "Family",
    "Fused",
    "Halves",
    "Key",
    "OneOf",
    "Place",
    "Stacked",
    "first_of",
    "fixed",
    "inverse",
    "is_number",
    "read",
    "required",
    "rope_by_kind",
    "text_part",
    "window_kinds",
]

# The spellings of transformers; several are one function.
ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

MOST_LAYERS: Final = 10_000
MOST_EXPERTS: Final = 4096
"""Of a layer. A configuration of more is wrong."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Where a switch comes from: the first of ``names`` in config.json, otherwise ``default``.

    No names: the family fixes the value. ``null_is_value``: an explicit null is an answer of its
    own; elsewhere it counts as absent.
    """

    names: tuple[str, ...] = ()
    default: Scalar = None
    required: bool = False
    null_is_value: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """Rows of one checkpoint tensor, which stacks the logical tensors ``of`` in this order; its
    columns where it is ``turned``."""

    tensor: str
    of: tuple[str, ...]
    turned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacked:
    """Rows of one checkpoint tensor, which stacks those of all experts.

    With ``every`` above 1 an expert's rows take turns with those of others: they are every so many,
    from ``first`` on. Of as many ``parts`` of equal size that an expert has they are the one of
    number ``part``. Where they are ``turned`` the tensor has their columns as rows, and a dim of
    its own for the experts.
    """

    tensor: str
    every: int = 1
    first: int = 0
    parts: int = 1
    part: int = 0
    turned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Either:
    """One of two places, by a flag of the configuration."""

    switch: str
    then: Place
    otherwise: Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """Rows of heads that lie in two tensors: of each head the columns of ``turned``, then the rows
    of ``rest``."""

    turned: str
    rest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OneOf:
    """The first of two places, unless the checkpoint has no such tensor."""

    first: Place
    otherwise: Place


Place = str | Fused | Stacked | Either | Halves | OneOf
"""Where a logical tensor lies in the checkpoint."""


def first_of(first: Place, *others: Place) -> Place:
    """The first of several places that the checkpoint has."""
    return OneOf(first=first, otherwise=first_of(*others)) if others else first


def _as_it_is(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """``keys``: switch -> its source in config.json. ``tensors``: logical name -> its place.

    In names ``{i}`` stands for the layer, ``{e}`` for the expert. ``model_types`` serve
    configurations that state no architecture. ``demands``: values without which the model is
    another one than this table describes. ``prepare`` spells out what a config.json only implies.
    ``rope_exponents`` names a tensor whose exponentials multiply the frequencies of rotation.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    keys: Mapping[str, Key]
    tensors: Mapping[str, Place]
    demands: Mapping[str, Scalar] = field(default_factory=dict)
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_it_is
    rope_exponents: str | None = None


def required(name: str) -> Key:
    return Key(names=(name,), required=True)


def read(name: str, default: Scalar) -> Key:
    return Key(names=(name,), default=default)


def fixed(value: Scalar) -> Key:
    return Key(default=value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is one that a float can be."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def inverse(value: object, power: int) -> object:
    """1 / value ** power of a number that has one; what else there is, for it to be refused."""
    if not is_number(value) or value <= 0:
        return value
    try:
        return float(value) ** -power
    except OverflowError:
        return math.inf


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a configuration of several parts the one of the decoder, beside what is said of all.
    Whether embeddings are tied the whole model says, where it does."""
    part = raw.get("text_config")
    if not isinstance(part, Mapping):
        return raw
    common = {name: value for name, value in raw.items() if not isinstance(value, Mapping)}
    whole = ("quantization_config", "tie_word_embeddings")
    # What is null is switched off, unless the whole says what it is.
    is_said = {name for name, value in common.items() if value is not None}
    own = {name: value for name, value in part.items() if value is not None or name not in is_said}
    return {**common, **own, **{name: raw[name] for name in whole if raw.get(name) is not None}}


def window_kinds(num_layers: object, every: object) -> list[str] | None:
    """Kinds of layers of which every so many sees all, and the others a window."""
    if not isinstance(num_layers, int) or not isinstance(every, int) or every < 1:
        return None
    return [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(min(num_layers, MOST_LAYERS))
    ]


def rope_by_kind(
    raw: Mapping[str, Any], *, every: int, windows: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A configuration whose rotation is given by kind of layer, where it was one set for those that
    see all, and ``windows`` for the others."""
    kinds = raw.get("layer_types") or window_kinds(raw.get("num_hidden_layers"), every)
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(own, Mapping) for own in given.values()):
        return {**raw, "layer_types": kinds}
    sets = {"full_attention": dict(given), "sliding_attention": dict(windows)}
    return {**raw, "layer_types": kinds, "rope_scaling": None, "rope_parameters": sets}


BASE_KEYS: Final[Mapping[str, Key]] = {
    "num_layers": required("num_hidden_layers"),
    "hidden_size": required("hidden_size"),
    "intermediate_size": required("intermediate_size"),
    "num_heads": required("num_attention_heads"),
    "num_kv_heads": read("num_key_value_heads", None),
    "head_dim": read("head_dim", None),
    "vocab_size": required("vocab_size"),
    "max_positions": read("max_position_embeddings", 2048),
    "embedding_size": fixed(None),
    "embedding_scale": fixed(None),
    "residual_scale": fixed(None),
    "logits_scale": fixed(None),
    "norm": fixed("rms"),
    "norm_place": fixed("before"),
    "norm_eps": read("rms_norm_eps", 1e-6),
    "norm_bias": fixed(False),
    "final_norm": fixed(True),
    "qk_norm": fixed("none"),
    "qk_norm_bias": fixed(False),
    "parallel": fixed(False),
    "shared_norm": fixed(False),
    "gated_mlp": fixed(True),
    "activation": read("hidden_act", "silu"),
    "gate_limit": fixed(None),
    "gate_slope": fixed(1.0),
    "fused_qkv": fixed(False),
    "qkv_bias": fixed(False),
    "out_bias": fixed(False),
    "mlp_bias": fixed(False),
    "head_bias": fixed(False),
    "qkv_limit": fixed(None),
    "qkv_blocks": fixed(None),
    "tied_embeddings": read("tie_word_embeddings", False),
    "attention_scalar": fixed(None),
    "attention_sinks": fixed(False),
    "window_sinks": fixed(False),
    "value_width": fixed(None),
    "attention_softcap": fixed(None),
    "logits_softcap": fixed(None),
    "learned_positions": fixed(False),
    "slope_span": fixed(None),
    "embedding_norm": fixed(False),
    "rotary_pairs": fixed(False),
    "position_offset": fixed(0),
    "rope_theta": read("rope_theta", 10_000.0),
    "rotary_share": fixed(1.0),
    "uses_windows": fixed(False),
    "window": fixed(None),
    "first_window_layer": fixed(0),
    "num_experts": fixed(None),
    "experts_per_token": fixed(None),
    "expert_size": fixed(None),
    "normalised_routes": fixed(True),
    "route_scores": fixed("softmax"),
    "route_scale": fixed(1.0),
    "route_bias": fixed(False),
    "route_corrections": fixed(False),
    "route_by_logits": fixed(False),
    "expert_groups": fixed(1),
    "groups_per_token": fixed(1),
    "shared_size": fixed(0),
    "shared_gate": fixed(False),
    "shared_scale": fixed(1.0),
    "route_inputs": fixed(False),
    "expert_latent": fixed(None),
    "best_of_group": fixed(2),
    "route_margin": fixed(None),
    "beside_mlp": fixed(False),
    "route_gains": fixed(False),
    "rotary_width": fixed(None),
    "latent_rank": fixed(None),
    "query_rank": fixed(None),
    "latent_key_width": fixed(128),
    "latent_value_width": fixed(128),
    "latent_eps": fixed(1e-6),
    "limits_first": fixed(False),
    "streams": fixed(None),
    "stream_floor": fixed(1e-6),
    "stream_magnitude": fixed(2.0),
    "stream_least": fixed(0.0),
    "stream_rounds": fixed(0),
    "stream_head": fixed(True),
    "attention_gates": fixed("none"),
    "gate_function": fixed("sigmoid"),
    "other_num_kv_heads": fixed(None),
    "other_head_dim": fixed(None),
    "other_num_heads": fixed(None),
    "keys_are_values": fixed(False),
    "value_norm": fixed(False),
    "layer_scales": fixed(False),
    "layer_inputs": fixed(None),
    "sharing_layers": fixed(0),
    "sharing_doubles_mlp": fixed(False),
    "recurrent_taps": fixed(None),
    "recurrent_key_heads": fixed(16),
    "recurrent_heads": fixed(32),
    "recurrent_key_width": fixed(128),
    "recurrent_value_width": fixed(128),
    "recurrent_rule": fixed("delta"),
    "recurrent_bias": fixed(False),
    "recurrent_deal": fixed(False),
    "recurrent_apart": fixed(False),
    "recurrent_strength": fixed(1.0),
    "recurrent_by_row": fixed(False),
    "recurrent_rate_rank": fixed(None),
    "recurrent_rate_bound": fixed(None),
    "recurrent_read_eps": fixed(None),
    "recurrent_norm": fixed(True),
    "recurrent_beside": fixed(False),
    "kept_window": fixed(None),
    "kept_groups": fixed(8),
    "kept_rank": fixed(1024),
    "index_chosen": fixed(None),
    "index_heads": fixed(64),
    "index_width": fixed(128),
    "index_pairs": fixed(True),
    "growth_rate": fixed(None),
    "growth_span": fixed(None),
    "growth_learnt": fixed(False),
    "index_turns_last": fixed(False),
    "index_of_stream": fixed(False),
    "latent_alone_unturned": fixed(False),
    "index_eps": fixed(1e-6),
}
"""Llama's spelling, and what a model is unless its family says otherwise."""
