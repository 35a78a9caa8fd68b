"""InternLM 2: Llama's shape by names of its own, query, key and value stacked by key/value head.
InternLM 3: Llama's, with biases by other flags."""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import LLAMA, LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read

__all__ = ["INTERNLM2", "INTERNLM3"]

_LAYER: Final = "model.layers.{i}"

INTERNLM2: Final = Family(
    architectures=("InternLM2ForCausalLM",),
    model_types=("internlm2",),
    keys={
        **BASE_KEYS,
        "head_dim": fixed(None),
        "fused_qkv": fixed(True),
        "qkv_bias": read("bias", False),
        "out_bias": read("bias", False),
    },
    tensors={
        "embedding": "model.tok_embeddings.weight",
        "layers.{i}.attention.norm": f"{_LAYER}.attention_norm.weight",
        "layers.{i}.attention.qkv": f"{_LAYER}.attention.wqkv.weight",
        "layers.{i}.attention.qkv_bias": f"{_LAYER}.attention.wqkv.bias",
        "layers.{i}.attention.out": f"{_LAYER}.attention.wo.weight",
        "layers.{i}.attention.out_bias": f"{_LAYER}.attention.wo.bias",
        "layers.{i}.mlp.norm": f"{_LAYER}.ffn_norm.weight",
        "layers.{i}.mlp.gate": f"{_LAYER}.feed_forward.w1.weight",
        "layers.{i}.mlp.up": f"{_LAYER}.feed_forward.w3.weight",
        "layers.{i}.mlp.down": f"{_LAYER}.feed_forward.w2.weight",
        "head.norm": "model.norm.weight",
        "head.weight": "output.weight",
    },
)

INTERNLM3: Final = Family(
    architectures=("InternLM3ForCausalLM",),
    model_types=("internlm3",),
    keys={
        **LLAMA.keys,
        "max_positions": read("max_position_embeddings", 32_768),
        "num_kv_heads": read("num_key_value_heads", 2),
        "head_dim": read("head_dim", 128),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qkv_bias": Key(names=("qkv_bias", "attention_bias"), default=False),
        "out_bias": Key(names=("bias", "attention_bias"), default=False),
        "mlp_bias": Key(names=("bias", "mlp_bias"), default=False),
    },
    tensors=LLAMA_TENSORS,
)
