"""BLOOM: scores that sink with the distance, normed embeddings, layer norms, biases everywhere,
query, key and value stacked head by head. MPT: without biases, query, key and value one after the
other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import BASE_KEYS, Family, Fused, Key, fixed, read, required

__all__ = ["BLOOM", "MPT"]


def _widen(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The MLP is four times as wide as the model."""
    width = raw.get("hidden_size", raw.get("n_embed"))
    return {**raw, "inner": 4 * width if isinstance(width, int) else None}


_LAYER: Final = "transformer.h.{i}"
_NAMES: Final = {
    "attention.norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

BLOOM: Final = Family(
    architectures=("BloomForCausalLM", "BloomModel"),
    model_types=("bloom",),
    keys={
        **BASE_KEYS,
        "num_layers": Key(names=("n_layer", "num_hidden_layers"), required=True),
        "hidden_size": Key(names=("hidden_size", "n_embed"), required=True),
        "intermediate_size": required("inner"),
        "num_heads": Key(names=("n_head", "num_attention_heads"), required=True),
        "num_kv_heads": fixed(None),
        "head_dim": fixed(None),
        "max_positions": read("seq_length", 2048),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_epsilon", 1e-5),
        "gated_mlp": fixed(False),
        "activation": fixed("gelu_tanh"),
        "fused_qkv": fixed(True),
        **{f"{name}_bias": fixed(True) for name in ("norm", "qkv", "out", "mlp")},
        "tied_embeddings": read("tie_word_embeddings", True),
        "slope_span": fixed(8.0),
        "embedding_norm": fixed(True),
    },
    tensors={
        "embedding": "transformer.word_embeddings.weight",
        "embedding.norm": "transformer.word_embeddings_layernorm.weight",
        "embedding.norm_bias": "transformer.word_embeddings_layernorm.bias",
        **{f"layers.{{i}}.{key}": f"{_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_LAYER}.{name}.bias" for key, name in _NAMES.items()},
        "head.norm": "transformer.ln_f.weight",
        "head.norm_bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    demands={"apply_residual_connection_post_layernorm": False},
    prepare=_widen,
)


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of attention is a part of its own."""
    own, width = raw.get("attn_config") or {}, raw.get("d_model")
    own = own if isinstance(own, Mapping) else {"attn_type": own}
    limit, scale = own.get("clip_qkv"), own.get("softmax_scale")
    inner = 4 * width if isinstance(width, int) else None
    return {**raw, **own, "clip_qkv": limit or None, "softmax_scale": scale, "inner": inner}


_BLOCK: Final = "transformer.blocks.{i}"
_QKV: Final = Fused(
    tensor=f"{_BLOCK}.attn.Wqkv.weight", of=("attention.q", "attention.k", "attention.v")
)

MPT: Final = Family(
    architectures=("MPTForCausalLM", "MptForCausalLM"),
    model_types=("mpt",),
    keys={
        **BASE_KEYS,
        "num_layers": Key(names=("n_layers", "num_hidden_layers"), required=True),
        "hidden_size": Key(names=("d_model", "hidden_size"), required=True),
        "intermediate_size": required("inner"),
        "num_heads": Key(names=("n_heads", "num_attention_heads"), required=True),
        "num_kv_heads": fixed(None),
        "head_dim": fixed(None),
        "max_positions": read("max_seq_len", 2048),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_epsilon", 1e-5),
        "gated_mlp": fixed(False),
        "activation": fixed("gelu"),
        "qkv_limit": read("clip_qkv", None),
        "tied_embeddings": read("tie_word_embeddings", True),
        "slope_span": fixed(8.0),
    },
    tensors={
        "embedding": "transformer.wte.weight",
        "layers.{i}.attention.norm": f"{_BLOCK}.norm_1.weight",
        **{f"layers.{{i}}.attention.{own}": _QKV for own in "qkv"},
        "layers.{i}.attention.out": f"{_BLOCK}.attn.out_proj.weight",
        "layers.{i}.mlp.norm": f"{_BLOCK}.norm_2.weight",
        "layers.{i}.mlp.up": f"{_BLOCK}.ffn.up_proj.weight",
        "layers.{i}.mlp.down": f"{_BLOCK}.ffn.down_proj.weight",
        "head.norm": "transformer.norm_f.weight",
        "head.weight": "lm_head.weight",
    },
    demands={
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_type": "multihead_attention",
        "expansion_ratio": 4,
        "logit_scale": None,
        "no_bias": True,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    prepare=_spell_out,
)
