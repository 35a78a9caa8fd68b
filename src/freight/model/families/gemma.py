"""Gemma: Llama's shape with wide heads, gelu, norms that add one and scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, fixed, read

__all__ = ["GEMMA"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was published as gelu was trained with its approximation; embeddings are scaled by the
    root of the width."""
    width = raw.get("hidden_size")
    given = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    scale = width**0.5 if isinstance(width, int) and 0 < width < 1 << 63 else None
    activation = "gelu_pytorch_tanh" if given == "gelu" else given
    return {**raw, "hidden_act": activation, "embedding_scale": scale}


GEMMA: Final = Family(
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 8192),
        "head_dim": read("head_dim", 256),
        "embedding_scale": read("embedding_scale", None),
        "norm": fixed("rms_plus_one"),
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
        "tied_embeddings": read("tie_word_embeddings", True),
    },
    tensors=LLAMA_TENSORS,
    prepare=_spell_out,
)
