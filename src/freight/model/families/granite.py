"""Granite 3: Llama's shape with a factor for embeddings, scores, updates and logits each; also with
experts, whose weights have the factor of updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import DECODER_TENSORS, LLAMA, PROJECTION_BIASES
from freight.model.families.table import Family, Stacked, fixed, inverse, read, required

__all__ = ["GRANITE", "GRANITE_MOE"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scores are multiplied by a number that others give as the root of one, logits divided."""
    scores, logits = raw.get("attention_multiplier", 1.0), raw.get("logits_scaling", 1.0)
    return {**raw, "score_scalar": inverse(scores, 2), "logits_scale": inverse(logits, 1)}


GRANITE: Final = Family(
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    keys={
        **LLAMA.keys,
        "embedding_scale": read("embedding_multiplier", 1.0),
        "residual_scale": read("residual_multiplier", 1.0),
        "attention_scalar": read("score_scalar", 1.0),
        "logits_scale": read("logits_scale", 1.0),
    },
    tensors=LLAMA.tensors,
    prepare=_spell_out,
)

_MOE: Final = "model.layers.{i}.block_sparse_moe"
_BOTH: Final = f"{_MOE}.input_linear.weight"

GRANITE_MOE: Final = Family(
    architectures=("GraniteMoeForCausalLM",),
    model_types=("granitemoe",),
    keys={
        **GRANITE.keys,
        "mlp_bias": fixed(False),
        "num_experts": read("num_local_experts", 8),
        "experts_per_token": read("num_experts_per_tok", 2),
        "expert_size": required("intermediate_size"),
        "route_scale": read("residual_multiplier", 1.0),
    },
    tensors={
        **DECODER_TENSORS,
        **PROJECTION_BIASES,
        "layers.{i}.router.weight": f"{_MOE}.router.layer.weight",
        "layers.{i}.experts.{e}.gate": Stacked(tensor=_BOTH, parts=2, part=0),
        "layers.{i}.experts.{e}.up": Stacked(tensor=_BOTH, parts=2, part=1),
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_MOE}.output_linear.weight"),
    },
    prepare=_spell_out,
)
