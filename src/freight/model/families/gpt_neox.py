"""GPT-NeoX and Pythia: attention and MLP side by side or in turn, a part of each head rotated,
query, key and value stacked head by head."""

from __future__ import annotations

from typing import Final

from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read

__all__ = ["GPT_NEOX"]

_LAYER: Final = "gpt_neox.layers.{i}"
_NAMES: Final = {
    "attention.norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

GPT_NEOX: Final = Family(
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    keys={
        **BASE_KEYS,
        "num_kv_heads": fixed(None),
        "head_dim": fixed(None),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_eps", 1e-5),
        "norm_bias": fixed(True),
        "parallel": read("use_parallel_residual", True),
        "gated_mlp": fixed(False),
        "activation": read("hidden_act", "gelu"),
        "fused_qkv": fixed(True),
        "qkv_bias": read("attention_bias", True),
        "out_bias": read("attention_bias", True),
        "mlp_bias": fixed(True),
        "rope_theta": Key(names=("rotary_emb_base", "rope_theta"), default=10_000.0),
        "rotary_share": Key(names=("rotary_pct", "partial_rotary_factor"), default=0.25),
    },
    tensors={
        "embedding": "gpt_neox.embed_in.weight",
        **{f"layers.{{i}}.{key}": f"{_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_LAYER}.{name}.bias" for key, name in _NAMES.items()},
        "head.norm": "gpt_neox.final_layer_norm.weight",
        "head.norm_bias": "gpt_neox.final_layer_norm.bias",
        "head.weight": "embed_out.weight",
    },
)
