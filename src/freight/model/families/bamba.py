"""Bamba: most layers keep a state, by a scan; a few attend, with half of each head rotated. All
have an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA, LLAMA_TENSORS
from freight.model.families.scans import SCAN_KEYS, scan_tensors, spell_out_scan
from freight.model.families.table import MOST_LAYERS, Family, fixed, read

__all__ = ["BAMBA"]


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those that attend are listed by number."""
    raw = spell_out_scan(raw)
    num_layers, attending = raw.get("num_hidden_layers", 32), raw.get("attn_layer_indices") or []
    if not isinstance(num_layers, int) or not isinstance(attending, list):
        return {**raw, "layer_types": None}  # to be refused
    kinds = ("linear_attention", "full_attention")
    layers = range(min(num_layers, MOST_LAYERS))
    return {**raw, "layer_types": [kinds[i in attending] for i in layers]}


_LAYER: Final = "model.layers.{i}"

BAMBA: Final = Family(
    architectures=("BambaForCausalLM",),
    model_types=("bamba",),
    keys={
        **LLAMA.keys,
        "num_layers": read("num_hidden_layers", 32),
        "hidden_size": read("hidden_size", 4096),
        "intermediate_size": read("intermediate_size", 14_336),
        "num_heads": read("num_attention_heads", 32),
        "num_kv_heads": read("num_key_value_heads", 8),
        "vocab_size": read("vocab_size", 128_000),
        "max_positions": read("max_position_embeddings", 262_144),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "rotary_share": fixed(0.5),
        **SCAN_KEYS,
    },
    tensors={
        **LLAMA_TENSORS,
        **scan_tensors(f"{_LAYER}.mamba"),
        "layers.{i}.mlp.norm": f"{_LAYER}.pre_ff_layernorm.weight",
        **{
            f"layers.{{i}}.mlp.{own}": f"{_LAYER}.feed_forward.{own}_proj.weight"
            for own in ("gate", "up", "down")
        },
        **{
            f"layers.{{i}}.mlp.{own}_bias": f"{_LAYER}.feed_forward.{own}_proj.bias"
            for own in ("gate", "up", "down")
        },
        "head.norm": "model.final_layernorm.weight",
    },
    demands={"mamba_proj_bias": False, "hidden_act": "silu", "time_step_limit": None},
    prepare=_name_layers,
)
