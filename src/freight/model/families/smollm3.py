"""SmolLM3: Llama's shape, every fourth layer without positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA
from freight.model.families.table import MOST_LAYERS, Family, Key, read

__all__ = ["SMOLLM3"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A list says with 1 which layers rotate, the others may have windows."""
    num_layers, every = raw.get("num_hidden_layers"), raw.get("no_rope_layer_interval") or 4
    flags = raw.get("no_rope_layers")
    if flags is None and isinstance(num_layers, int) and isinstance(every, int) and every > 0:
        flags = [(i + 1) % every != 0 for i in range(min(num_layers, MOST_LAYERS))]
    if not isinstance(flags, list):
        return raw
    kinds = ["full_attention" if flag else "sliding_attention" for flag in flags]
    return {
        **raw,
        "rope_layers": [bool(flag) for flag in flags],
        "layer_types": raw.get("layer_types") or kinds,
    }


SMOLLM3: Final = Family(
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    keys={
        **LLAMA.keys,
        "max_positions": read("max_position_embeddings", 32_768),
        "num_kv_heads": Key(names=("num_key_value_heads",), default=4),
        "rope_theta": read("rope_theta", 2_000_000.0),
        "tied_embeddings": read("tie_word_embeddings", True),
        "uses_windows": read("use_sliding_window", False),
        "window": read("sliding_window", None),
    },
    tensors=LLAMA.tensors,
    prepare=_spell_out,
)
