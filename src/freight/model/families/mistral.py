"""Mistral: Llama's shape with a sliding window; of models that also see, the part that reads.
Ministral: with one in some layers. Ministral 3: without one, and with queries that grow with their
position, from where its first training ended. Mixtral: with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import DECODER_TENSORS, LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read, text_part

__all__ = ["MISTRAL", "MIXTRAL", "spell_out_growth"]

_TYPES: Final = ("mistral", "ministral", "ministral3", "mistral3")
_KEYS: Final = {
    **BASE_KEYS,
    "max_positions": read("max_position_embeddings", 131_072),
    "uses_windows": fixed(True),
    "window": Key(names=("sliding_window",), default=4096, null_is_value=True),
    "growth_rate": read("growth_rate", None),
    "growth_span": read("growth_span", None),
}


def _take_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of Mistral 3 the decoder, unless it is another than Mistral's."""
    part = raw.get("text_config")
    kind = part.get("model_type") if isinstance(part, Mapping) else None
    own = text_part(raw)
    found = kind if kind and kind not in _TYPES else _TYPES[0]
    return {**spell_out_growth(own), "text_model": found}


def spell_out_growth(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """By what queries grow with their position is said among what rotates them."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("llama_4_scaling_beta") is None:
        return raw
    span = rope.get("original_max_position_embeddings")
    return {**raw, "growth_rate": rope["llama_4_scaling_beta"], "growth_span": span}


MISTRAL: Final = Family(
    architectures=(
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration",
    ),
    model_types=_TYPES,
    keys=_KEYS,
    tensors=LLAMA_TENSORS,
    demands={"text_model": _TYPES[0]},
    prepare=_take_text,
)

_EXPERT: Final = "model.layers.{i}.block_sparse_moe.experts.{e}"

MIXTRAL: Final = Family(
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    keys={
        **_KEYS,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "rope_theta": read("rope_theta", 1e6),
        "window": read("sliding_window", None),
        "num_experts": read("num_local_experts", 8),
        "experts_per_token": read("num_experts_per_tok", 2),
        "expert_size": read("intermediate_size", None),
    },
    tensors={
        **DECODER_TENSORS,
        "layers.{i}.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
        "layers.{i}.experts.{e}.gate": f"{_EXPERT}.w1.weight",
        "layers.{i}.experts.{e}.up": f"{_EXPERT}.w3.weight",
        "layers.{i}.experts.{e}.down": f"{_EXPERT}.w2.weight",
    },
)
