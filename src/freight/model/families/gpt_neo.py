"""GPT-Neo: GPT-2's shape, scores that are not scaled, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import (
    BASE_KEYS,
    MOST_LAYERS,
    Family,
    Key,
    fixed,
    read,
    required,
)

__all__ = ["GPT_NEO"]

_KINDS: Final = {"global": "full_attention", "local": "sliding_attention"}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Kinds of layers are lists of patterns, each with how often it comes, or one by one."""
    width = raw.get("hidden_size")
    inner = raw.get("intermediate_size") or (4 * width if isinstance(width, int) else None)
    raw = {**raw, "intermediate_size": inner}
    kinds, patterns = raw.get("attention_layers"), raw.get("attention_types")
    if patterns is None:
        patterns = [[["global", "local"], 12]]
    if kinds is None and _are_patterns(patterns):
        kinds = [kind for pattern, count in patterns for _ in range(count) for kind in pattern]
    if not isinstance(kinds, list):
        return {**raw, "layer_types": patterns}
    known = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    return {**raw, "layer_types": known}


def _are_patterns(own: object) -> bool:
    """Whether these are pairs of a list and a number, of which no more than can be layers."""
    if not isinstance(own, list):
        return False
    pairs = [pair for pair in own if isinstance(pair, list) and len(pair) == 2]
    counts = [
        len(pattern) * count
        for pattern, count in pairs
        if isinstance(pattern, list) and isinstance(count, int) and count >= 0
    ]
    return len(counts) == len(own) and sum(counts) <= MOST_LAYERS


_LAYER: Final = "transformer.h.{i}"
_NAMES: Final = {
    "attention.norm": "ln_1",
    "attention.q": "attn.attention.q_proj",
    "attention.k": "attn.attention.k_proj",
    "attention.v": "attn.attention.v_proj",
    "attention.out": "attn.attention.out_proj",
    "mlp.norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

GPT_NEO: Final = Family(
    architectures=("GPTNeoForCausalLM",),
    model_types=("gpt_neo",),
    keys={
        **BASE_KEYS,
        "num_layers": Key(names=("num_layers", "num_hidden_layers"), required=True),
        "num_heads": Key(names=("num_heads", "num_attention_heads"), required=True),
        "intermediate_size": required("intermediate_size"),
        "num_kv_heads": fixed(None),
        "head_dim": fixed(None),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_epsilon", 1e-5),
        "norm_bias": fixed(True),
        "gated_mlp": fixed(False),
        "activation": read("activation_function", "gelu_new"),
        "out_bias": fixed(True),
        "mlp_bias": fixed(True),
        "tied_embeddings": read("tie_word_embeddings", True),
        "attention_scalar": fixed(1.0),
        "learned_positions": fixed(True),
        "uses_windows": fixed(True),
        "window": read("window_size", 256),
    },
    tensors={
        "embedding": "transformer.wte.weight",
        "embedding.positions": "transformer.wpe.weight",
        **{f"layers.{{i}}.{key}": f"{_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_LAYER}.{name}.bias" for key, name in _NAMES.items()},
        "head.norm": "transformer.ln_f.weight",
        "head.norm_bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    prepare=_spell_out,
)
