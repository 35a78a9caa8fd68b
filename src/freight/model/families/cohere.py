"""Command R: attention and MLP side by side over one layer norm without bias, neighbours rotated
together, scaled logits. The second (R7B, A): windows, and layers that see all without positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read, window_kinds

__all__ = ["COHERE", "COHERE2"]


def _name_norms(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The largest of the first ones have norms on queries and keys, of each head its own."""
    return {**raw, "qk_norm": "each_head" if raw.get("use_qk_norm") else "none"}


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer sees all, and does not rotate."""
    every = raw.get("sliding_window_pattern") or 4
    kinds = raw.get("layer_types") or window_kinds(raw.get("num_hidden_layers"), every)
    if not isinstance(kinds, list) or raw.get("sliding_window", 4096) is None:
        return {**raw, "layer_types": kinds}
    rotates = [kind == "sliding_attention" for kind in kinds]
    return {**raw, "layer_types": kinds, "rope_layers": rotates}


_KEYS: Final = {
    **BASE_KEYS,
    "max_positions": read("max_position_embeddings", 8192),
    "norm": fixed("layer"),
    "norm_eps": read("layer_norm_eps", 1e-5),
    "parallel": fixed(True),
    "shared_norm": fixed(True),
    "qkv_bias": read("attention_bias", False),
    "out_bias": read("attention_bias", False),
    "tied_embeddings": read("tie_word_embeddings", True),
    "logits_scale": read("logit_scale", 0.0625),
    "rotary_pairs": fixed(True),
}
_TENSORS: Final = {
    **LLAMA_TENSORS,
    "layers.{i}.mlp.norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}

COHERE: Final = Family(
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    keys={**_KEYS, "qk_norm": read("qk_norm", "none"), "rope_theta": read("rope_theta", 500_000.0)},
    tensors=_TENSORS,
    prepare=_name_norms,
)

COHERE2: Final = Family(
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    keys={
        **_KEYS,
        "head_dim": fixed(None),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
    },
    tensors=_TENSORS,
    prepare=_name_layers,
)
