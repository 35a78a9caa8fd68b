"""One table per model family: how its config.json is spelled and how its checkpoint names tensors.

Plain data; knows no files, tensors or configurations. A family differs from another in its table
only: a new one is a new entry here, and no code anywhere asks for a family by name.

Logical tensor names are the same for all families ("layers.{i}.attention.q", "head.norm", ...);
a family lists the ones it has. A tensor that a checkpoint keeps stacked with others is ``Fused``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["ACTIVATIONS", "FAMILIES", "Family", "Fused", "Key"]

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
}

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
    """Rows of one checkpoint tensor, which stacks the logical tensors ``of`` in this order."""

    tensor: str
    of: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """``keys``: switch -> its source in config.json. ``tensors``: logical name -> checkpoint name.

    ``{i}`` stands for the layer. ``model_types`` serve configurations that state no architecture.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    keys: Mapping[str, Key]
    tensors: Mapping[str, str | Fused]


def _required(name: str) -> Key:
    return Key(names=(name,), required=True)


def _read(name: str, default: Scalar) -> Key:
    return Key(names=(name,), default=default)


def _fixed(value: Scalar) -> Key:
    return Key(default=value)


_LLAMA_KEYS: Final = {
    "num_layers": _required("num_hidden_layers"),
    "hidden_size": _required("hidden_size"),
    "intermediate_size": _required("intermediate_size"),
    "num_heads": _required("num_attention_heads"),
    "num_kv_heads": _read("num_key_value_heads", None),
    "head_dim": _read("head_dim", None),
    "vocab_size": _required("vocab_size"),
    "max_positions": _read("max_position_embeddings", 2048),
    "norm_eps": _read("rms_norm_eps", 1e-6),
    "activation": _read("hidden_act", "silu"),
    "qkv_bias": _read("attention_bias", False),
    "out_bias": _read("attention_bias", False),
    "mlp_bias": _read("mlp_bias", False),
    "tied_embeddings": _read("tie_word_embeddings", False),
    "rope_theta": _read("rope_theta", 10_000.0),
    "rotary_share": _fixed(1.0),
    "uses_windows": _fixed(False),
    "window": _fixed(None),
    "first_window_layer": _fixed(0),
}

_LLAMA_TENSORS: Final = {
    "embedding": "model.embed_tokens.weight",
    "layers.{i}.attention.norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.out": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention.q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.attention.out_bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.mlp.norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.mlp.gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.mlp.up_bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.mlp.down_bias": "model.layers.{i}.mlp.down_proj.bias",
    "head.norm": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(
        architectures=("LlamaForCausalLM",),
        model_types=("llama",),
        keys=_LLAMA_KEYS,
        tensors=_LLAMA_TENSORS,
    ),
    "mistral": Family(
        architectures=("MistralForCausalLM",),
        model_types=("mistral",),
        keys={
            **_LLAMA_KEYS,
            "max_positions": _read("max_position_embeddings", 131_072),
            "qkv_bias": _fixed(False),
            "out_bias": _fixed(False),
            "mlp_bias": _fixed(False),
            "uses_windows": _fixed(True),
            "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
        },
        tensors=_LLAMA_TENSORS,
    ),
    "qwen2": Family(
        architectures=("Qwen2ForCausalLM",),
        model_types=("qwen2",),
        keys={
            **_LLAMA_KEYS,
            "max_positions": _read("max_position_embeddings", 32_768),
            "qkv_bias": _fixed(True),
            "out_bias": _fixed(False),
            "mlp_bias": _fixed(False),
            "uses_windows": _read("use_sliding_window", False),
            "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
            "first_window_layer": _read("max_window_layers", 28),
        },
        tensors=_LLAMA_TENSORS,
    ),
}
