"""Falcon: attention and MLP side by side, over one norm (7B, one key/value head) or two (40B,
grouped heads); query, key and value stacked by key/value head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import BASE_KEYS, Either, Family, Key, fixed, read, required

__all__ = ["FALCON"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The newer architecture groups heads and has two norms unless it says one."""
    newer = raw.get("new_decoder_architecture", False)
    heads = raw.get("num_attention_heads", raw.get("n_head"))
    kv_heads = raw.get("num_kv_heads") or heads if newer else heads
    if not newer and raw.get("multi_query", True):
        kv_heads = 1
    width = raw.get("hidden_size")
    return {
        **raw,
        "num_kv_heads": kv_heads,
        "parallel": newer or raw.get("parallel_attn", True),
        "shared_norm": (raw.get("num_ln_in_parallel_attn") or (2 if newer else 1)) == 1,
        "ffn_hidden_size": raw.get("ffn_hidden_size")
        or (4 * width if isinstance(width, int) else None),
    }


_LAYER: Final = "transformer.h.{i}"
_NAMES: Final = {
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def _norms(kind: str, two: str, serial: str) -> dict[str, Either]:
    """Names of the weight and the bias of one norm."""
    one = f"{_LAYER}.input_layernorm"
    return {
        f"layers.{{i}}.{kind}.norm{suffix}": Either(
            switch="parallel",
            then=Either(
                switch="shared_norm",
                then=f"{one}.{part}",
                otherwise=f"{_LAYER}.{two}.{part}",
            ),
            otherwise=f"{_LAYER}.{serial}.{part}",
        )
        for suffix, part in (("", "weight"), ("_bias", "bias"))
    }


FALCON: Final = Family(
    architectures=("FalconForCausalLM",),
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    keys={
        **BASE_KEYS,
        "num_layers": Key(names=("num_hidden_layers", "n_layer"), required=True),
        "num_heads": Key(names=("num_attention_heads", "n_head"), required=True),
        "num_kv_heads": read("num_kv_heads", None),
        "head_dim": fixed(None),
        "intermediate_size": required("ffn_hidden_size"),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_epsilon", 1e-5),
        "norm_bias": fixed(True),
        "parallel": read("parallel", True),
        "shared_norm": read("shared_norm", True),
        "gated_mlp": fixed(False),
        "activation": read("activation", "gelu"),
        "fused_qkv": fixed(True),
        **{name: read("bias", False) for name in ("qkv_bias", "out_bias", "mlp_bias")},
        "tied_embeddings": read("tie_word_embeddings", True),
    },
    tensors={
        "embedding": "transformer.word_embeddings.weight",
        **{f"layers.{{i}}.{key}": f"{_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_LAYER}.{name}.bias" for key, name in _NAMES.items()},
        **_norms("attention", "ln_attn", "input_layernorm"),
        **_norms("mlp", "ln_mlp", "post_attention_layernorm"),
        "head.norm": "transformer.ln_f.weight",
        "head.norm_bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    demands={"alibi": False},
    prepare=_spell_out,
)
