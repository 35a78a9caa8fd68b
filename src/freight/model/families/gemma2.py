"""Gemma 2: norms before and after, soft-capped scores and logits, alternating windows, scaled
embeddings. VaultGemma: norms before alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, MOST_LAYERS, Family, Key, fixed, read

__all__ = ["GEMMA2", "VAULT_GEMMA"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layers alternate, beginning with a window; embeddings are scaled by the root of the width."""
    num_layers, width = raw.get("num_hidden_layers", 26), raw.get("hidden_size", 2304)
    if not isinstance(num_layers, int) or not isinstance(width, int) or width < 1:
        return raw
    kinds = [
        "full_attention" if i % 2 else "sliding_attention"
        for i in range(min(num_layers, MOST_LAYERS))
    ]
    return {**raw, "layer_types": raw.get("layer_types") or kinds, "embedding_scale": width**0.5}


_NORM: Final = "model.layers.{i}"

GEMMA2: Final = Family(
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 8192),
        "head_dim": read("head_dim", 256),
        "embedding_scale": read("embedding_scale", None),
        "norm": fixed("rms_plus_one"),
        "norm_place": fixed("both"),
        "activation": Key(names=("hidden_activation", "hidden_act"), default="gelu_pytorch_tanh"),
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
        "tied_embeddings": read("tie_word_embeddings", True),
        "attention_scalar": read("query_pre_attn_scalar", 256),
        "attention_softcap": Key(
            names=("attn_logit_softcapping",), default=50.0, null_is_value=True
        ),
        "logits_softcap": Key(names=("final_logit_softcapping",), default=30.0, null_is_value=True),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.attention.post_norm": f"{_NORM}.post_attention_layernorm.weight",
        "layers.{i}.mlp.norm": f"{_NORM}.pre_feedforward_layernorm.weight",
        "layers.{i}.mlp.post_norm": f"{_NORM}.post_feedforward_layernorm.weight",
    },
    prepare=_spell_out,
)

VAULT_GEMMA: Final = Family(
    architectures=("VaultGemmaForCausalLM",),
    model_types=("vaultgemma",),
    keys={**GEMMA2.keys, "norm_place": fixed("before")},
    tensors=GEMMA2.tensors,
    prepare=_spell_out,
)
