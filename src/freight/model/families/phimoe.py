"""Phi-3.5-MoE: Mixtral's shape with layer norms and biases, also of the output head; experts are
chosen one by one, each weighed against those whose scores are near its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import PROJECTION_BIASES
from freight.model.families.mistral import MIXTRAL
from freight.model.families.starcoder2 import NORM_BIASES
from freight.model.families.table import Family, fixed, is_number, read

__all__ = ["PHIMOE"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scores may be farther apart by the jitter of the training on both sides. What rotated
    elements are multiplied by is given for short and for long rows: it must be one number."""
    noise = raw.get("router_jitter_noise", 0.01)
    changes: dict[str, Any] = {"route_margin": 2 * noise if is_number(noise) else noise}
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(name)
    if isinstance(rope, Mapping) and "short_mscale" in rope:
        short, long = rope["short_mscale"], rope.get("long_mscale")
        changes["factors_differ"] = short != long
        changes[name] = {**rope, "attention_factor": short}
    return {**raw, **changes}


PHIMOE: Final = Family(
    architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    model_types=("phimoe",),
    keys={
        **MIXTRAL.keys,
        "num_kv_heads": read("num_key_value_heads", 8),
        "norm": fixed("layer"),
        "norm_bias": fixed(True),
        "qkv_bias": read("attention_bias", False),
        "out_bias": read("attention_bias", False),
        "head_bias": read("lm_head_bias", False),
        "num_experts": read("num_local_experts", 16),
        "route_margin": read("route_margin", None),
    },
    tensors={
        **MIXTRAL.tensors,
        **PROJECTION_BIASES,
        **NORM_BIASES,
        "head.bias": "lm_head.bias",
    },
    demands={"num_experts_per_tok": 2, "factors_differ": False},
    prepare=_spell_out,
)
