"""Llama 4, the part that reads: experts by sigmoids that weigh what comes in, one beside them for
all, heads without a gain but of equal size where they rotate, every fourth layer without positions.

Its rotating layers attend within chunks, and the others' queries grow with their position, both
from some thousands of tokens on. Up to there neither changes anything: so long may rows be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import DECODER_TENSORS, PROJECTION_BIASES
from freight.model.families.table import (
    BASE_KEYS,
    MOST_LAYERS,
    Family,
    Stacked,
    fixed,
    read,
    required,
    text_part,
)

__all__ = ["LLAMA4"]

_MOE: Final = "model.layers.{i}.feed_forward"
_GATE_UP: Final = f"{_MOE}.experts.gate_up_proj"


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = {"num_hidden_layers": 48, **text_part(raw)}
    num_layers = raw["num_hidden_layers"]
    every, interval = raw.get("interleave_moe_layer_step", 1), raw.get("no_rope_layer_interval", 4)
    if not all(isinstance(n, int) and n > 0 for n in (num_layers, every, interval)):
        return raw
    layers = range(min(num_layers, MOST_LAYERS))
    with_experts = raw.get("moe_layers")
    if not isinstance(with_experts, list):
        with_experts = [*layers[every - 1 :: every]]
    rotates = raw.get("no_rope_layers") or [(i + 1) % interval != 0 for i in layers]
    return {
        **raw,
        "expert_layers": [i in with_experts for i in layers],
        "rope_layers": [bool(flag) for flag in rotates] if isinstance(rotates, list) else rotates,
        "qk_norm": "rotated" if raw.get("use_qk_norm", True) else "none",
        "max_position_embeddings": _most_positions(raw),
    }


def _most_positions(raw: Mapping[str, Any]) -> object:
    """As far as chunks and growing queries make no difference; what is no number, to be refused."""
    stated = raw.get("max_position_embeddings", 131_072)
    if stated is not None and not isinstance(stated, int):
        return stated
    limits = [stated, raw.get("attention_chunk_size", 8192)]
    if raw.get("attn_temperature_tuning", True):
        grows_from = raw.get("floor_scale", 8192)
        limits.append(grows_from - 1 if isinstance(grows_from, int) else grows_from)
    known = [limit for limit in limits if isinstance(limit, int)]
    return min(known, default=None)


LLAMA4: Final = Family(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_types=("llama4_text", "llama4"),
    keys={
        **BASE_KEYS,
        "intermediate_size": read("intermediate_size_mlp", 16_384),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 128),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qk_norm": read("qk_norm", "rotated"),
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
        "rope_theta": read("rope_theta", 500_000.0),
        "rotary_pairs": fixed(True),
        "num_experts": read("num_local_experts", 16),
        "experts_per_token": read("num_experts_per_tok", 1),
        "expert_size": required("intermediate_size"),
        "normalised_routes": fixed(False),
        "route_scores": fixed("sigmoid"),
        "route_inputs": fixed(True),
        "shared_size": required("intermediate_size"),
    },
    tensors={
        **DECODER_TENSORS,
        **PROJECTION_BIASES,
        "layers.{i}.mlp.gate": f"{_MOE}.gate_proj.weight",
        "layers.{i}.mlp.up": f"{_MOE}.up_proj.weight",
        "layers.{i}.mlp.down": f"{_MOE}.down_proj.weight",
        "layers.{i}.router.weight": f"{_MOE}.router.weight",
        "layers.{i}.shared.gate": f"{_MOE}.shared_expert.gate_proj.weight",
        "layers.{i}.shared.up": f"{_MOE}.shared_expert.up_proj.weight",
        "layers.{i}.shared.down": f"{_MOE}.shared_expert.down_proj.weight",
        "layers.{i}.experts.{e}.gate": Stacked(tensor=_GATE_UP, parts=2, part=0, turned=True),
        "layers.{i}.experts.{e}.up": Stacked(tensor=_GATE_UP, parts=2, part=1, turned=True),
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_MOE}.experts.down_proj", turned=True),
    },
    prepare=_spell_out,
)
