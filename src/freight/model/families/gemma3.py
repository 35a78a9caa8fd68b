"""Gemma 3: like Gemma 2, with norms on queries and keys in place of capped scores, and five layers
with a window for each that sees all, rotated in two ways. Of models that also see, the part that
reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.gemma2 import GEMMA2
from freight.model.families.table import Family, Key, fixed, read, rope_by_kind, text_part

__all__ = ["GEMMA3"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layers with a window turn faster, and what scales the others is not for them."""
    raw = {"head_dim": 256, "hidden_size": 2304, **text_part(raw)}
    windows = {"rope_theta": raw.get("rope_local_base_freq") or 10_000.0}
    every = raw.get("sliding_window_pattern") or 6
    raw = rope_by_kind(raw, every=every, windows=windows)
    return GEMMA2.prepare(raw)


GEMMA3: Final = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_types=("gemma3_text", "gemma3"),
    keys={
        **GEMMA2.keys,
        "max_positions": read("max_position_embeddings", 131_072),
        "num_heads": read("num_attention_heads", 8),
        "num_kv_heads": read("num_key_value_heads", 4),
        "vocab_size": read("vocab_size", 262_208),
        "qk_norm": fixed("per_head"),
        "attention_softcap": fixed(None),
        "logits_softcap": Key(names=("final_logit_softcapping",)),
        "rope_theta": read("rope_theta", 1_000_000.0),
    },
    tensors={
        **GEMMA2.tensors,
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    },
    demands={"use_bidirectional_attention": False},
    prepare=_spell_out,
)
