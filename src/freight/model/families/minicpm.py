"""MiniCPM: Llama's shape with a factor for embeddings, updates and logits each, of which that of
updates counts layers and that of logits is a ratio of widths. The third has keys and values as
latents. The fourth may choose what longer rows attend; rows that are no longer attend all keys: so
long may rows be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import YOUTU, spell_out_latents
from freight.model.families.llama import LLAMA
from freight.model.families.table import Family, is_number, read, required

__all__ = ["MINICPM", "MINICPM3"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What updates and logits are multiplied by; what is no number, to be refused."""
    layers, width = raw.get("num_hidden_layers"), raw.get("hidden_size")
    root = math.sqrt(layers) if is_number(layers) and layers > 0 else None
    return {
        **raw,
        "scale_depth": _ratio(raw.get("scale_depth"), root),
        "dim_model_base": _ratio(raw.get("dim_model_base"), width),
        "max_position_embeddings": _most_positions(raw),
    }


def _ratio(value: object, other: object) -> object:
    """Of two numbers; where they are none, the first as it is."""
    if not is_number(value) or not is_number(other) or other <= 0:
        return value
    return value / other


def _most_positions(raw: Mapping[str, Any]) -> object:
    most, sparse = raw.get("max_position_embeddings"), raw.get("sparse_config")
    dense = sparse.get("dense_len", 8192) if isinstance(sparse, Mapping) else None
    if dense is None or not is_number(most):
        return most
    return min(most, dense) if is_number(dense) else dense


_FACTORS: Final = {
    "embedding_scale": required("scale_emb"),
    "residual_scale": required("scale_depth"),
    "logits_scale": required("dim_model_base"),
    "tied_embeddings": read("tie_word_embeddings", True),
}

MINICPM: Final = Family(
    architectures=("MiniCPMForCausalLM",),
    model_types=("minicpm",),
    keys={**LLAMA.keys, **_FACTORS},
    tensors=LLAMA.tensors,
    demands={"num_experts": 0},
    prepare=_spell_out,
)


def _spell_out_latents(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values are as wide as a head would be."""
    heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
    usual: dict[str, Any] = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "kv_lora_rank": 256}
    usual |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        usual["v_head_dim"] = width // heads
    stated = {name: value for name, value in raw.items() if value is not None}
    rank = raw.get("q_lora_rank", 768)  # None is a value: queries are made at once
    return spell_out_latents(_spell_out({**usual, **stated, "q_lora_rank": rank}))


MINICPM3: Final = Family(
    architectures=("MiniCPM3ForCausalLM",),
    model_types=("minicpm3",),
    keys={
        **YOUTU.keys,
        **_FACTORS,
        "max_positions": read("max_position_embeddings", 32_768),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "rotary_pairs": read("rope_interleave", False),
    },
    tensors=YOUTU.tensors,
    prepare=_spell_out_latents,
)
