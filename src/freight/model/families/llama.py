"""Llama 2 and 3: pre-norm, rotary positions, grouped heads, a gated MLP. Others build on it.
Seed-OSS: with biases on query, key and value. ERNIE 4.5 and Helium: neighbours rotated together.
IQuest-Coder: the same as Llama. CWM: windows but in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import BASE_KEYS, MOST_LAYERS, Family, fixed, read

__all__ = [
    "CWM",
    "DECODER_TENSORS",
    "ERNIE45",
    "HELIUM",
    "IQUEST_CODER",
    "LLAMA",
    "LLAMA_TENSORS",
    "PROJECTION_BIASES",
    "SEED_OSS",
]

PROJECTION_BIASES: Final = {
    "layers.{i}.attention.q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.attention.out_bias": "model.layers.{i}.self_attn.o_proj.bias",
}

# Everything but the MLP.
DECODER_TENSORS: Final = {
    "embedding": "model.embed_tokens.weight",
    "layers.{i}.attention.norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.out": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp.norm": "model.layers.{i}.post_attention_layernorm.weight",
    "head.norm": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

LLAMA_TENSORS: Final = {
    **DECODER_TENSORS,
    **PROJECTION_BIASES,
    "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.mlp.gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.mlp.up_bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.mlp.down_bias": "model.layers.{i}.mlp.down_proj.bias",
}

LLAMA: Final = Family(
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    keys={
        **BASE_KEYS,
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
        "mlp_bias": read("mlp_bias", False),
    },
    tensors=LLAMA_TENSORS,
)

SEED_OSS: Final = Family(
    architectures=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    keys={
        **LLAMA.keys,
        "head_dim": read("head_dim", 128),
        "qkv_bias": read("attention_bias", True),
        "out_bias": read("attention_out_bias", False),
    },
    tensors=LLAMA_TENSORS,
)

ERNIE45: Final = Family(
    architectures=("Ernie4_5ForCausalLM",),
    model_types=("ernie4_5",),
    keys={
        **BASE_KEYS,
        **{name: read("use_bias", False) for name in ("qkv_bias", "out_bias", "mlp_bias")},
        "head_dim": read("head_dim", 128),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "rope_theta": read("rope_theta", 500_000.0),
        "rotary_pairs": fixed(True),
        "tied_embeddings": read("tie_word_embeddings", True),
    },
    tensors=LLAMA_TENSORS,
)

HELIUM: Final = Family(
    architectures=("HeliumForCausalLM",),
    model_types=("helium",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 4096),
        "head_dim": read("head_dim", 128),
        "norm_eps": read("rms_norm_eps", 1e-8),
        "qkv_bias": read("attention_bias", False),
        "mlp_bias": read("mlp_bias", False),
        "rope_theta": read("rope_theta", 100_000.0),
        "rotary_pairs": fixed(True),
    },
    tensors=LLAMA_TENSORS,
)

IQUEST_CODER: Final = Family(
    architectures=("IQuestCoderForCausalLM",),
    model_types=("iquestcoder",),
    keys={
        **LLAMA.keys,
        "max_positions": read("max_position_embeddings", 131_072),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 128),
        "norm_eps": read("rms_norm_eps", 1e-5),
    },
    tensors=LLAMA_TENSORS,
    demands={"clip_qkv": None, "use_sliding_window": False},
)


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of each four sees all."""
    kinds, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    if kinds is None and isinstance(num_layers, int):
        layers = range(min(num_layers, MOST_LAYERS))
        kinds = ["sliding_attention" if i % 4 else "full_attention" for i in layers]
    return {**raw, "layer_types": kinds}


CWM: Final = Family(
    architectures=("CwmForCausalLM",),
    model_types=("cwm",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 131_072),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 128),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "rope_theta": read("rope_theta", 1_000_000.0),
        "uses_windows": fixed(True),
        "window": read("sliding_window", 8192),
    },
    tensors=LLAMA_TENSORS,
    demands={"attention_bias": False},
    prepare=_name_layers,
)
