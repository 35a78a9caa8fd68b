"""Granite 3: Llama's shape with a factor for embeddings, scores, updates and logits each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import LLAMA
from freight.model.families.table import Family, inverse, read

__all__ = ["GRANITE"]


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
