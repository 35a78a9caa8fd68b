"""StarCoder2: layer norms, biases everywhere, an MLP without a gate. StableLM: layer norms and a
quarter of each head rotated."""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read

__all__ = ["NORM_BIASES", "STABLELM", "STARCODER2"]

NORM_BIASES: Final = {
    "layers.{i}.attention.norm_bias": "model.layers.{i}.input_layernorm.bias",
    "layers.{i}.mlp.norm_bias": "model.layers.{i}.post_attention_layernorm.bias",
    "head.norm_bias": "model.norm.bias",
}

STARCODER2: Final = Family(
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    keys={
        **BASE_KEYS,
        "num_kv_heads": read("num_key_value_heads", 2),
        "head_dim": fixed(None),
        "max_positions": read("max_position_embeddings", 4096),
        "norm": fixed("layer"),
        "norm_eps": read("norm_epsilon", 1e-5),
        "norm_bias": fixed(True),
        "gated_mlp": fixed(False),
        "activation": read("hidden_act", "gelu_pytorch_tanh"),
        **{name: read("use_bias", True) for name in ("qkv_bias", "out_bias", "mlp_bias")},
        "tied_embeddings": read("tie_word_embeddings", True),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",)),
    },
    tensors={
        **LLAMA_TENSORS,
        **NORM_BIASES,
        "layers.{i}.mlp.up": "model.layers.{i}.mlp.c_fc.weight",
        "layers.{i}.mlp.down": "model.layers.{i}.mlp.c_proj.weight",
        "layers.{i}.mlp.up_bias": "model.layers.{i}.mlp.c_fc.bias",
        "layers.{i}.mlp.down_bias": "model.layers.{i}.mlp.c_proj.bias",
    },
)

STABLELM: Final = Family(
    architectures=("StableLmForCausalLM",),
    model_types=("stablelm",),
    keys={
        **BASE_KEYS,
        "head_dim": fixed(None),
        "max_positions": read("max_position_embeddings", 4096),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_eps", 1e-5),
        "norm_bias": fixed(True),
        "qkv_bias": read("use_qkv_bias", False),
        "rotary_share": read("partial_rotary_factor", 0.25),
    },
    tensors={**LLAMA_TENSORS, **NORM_BIASES},
    demands={"qk_layernorm": False, "use_parallel_residual": False},
)
