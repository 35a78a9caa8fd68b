"""Mistral Small 4, the part that reads: latents and experts as DeepSeek-V3 has them, chosen by
softmax without corrections. Its queries grow with their position from where its first training
ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import DEEPSEEK_V3
from freight.model.families.mistral import spell_out_growth
from freight.model.families.table import Family, OneOf, Stacked, fixed, read, text_part

__all__ = ["MISTRAL4"]

_WIDTHS: Final = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "first_k_dense_replace": 0,
}
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_EXPERT: Final = "model.layers.{i}.mlp.experts.{e}"
_GATE_UP: Final = "model.layers.{i}.mlp.experts.gate_up_proj"
_DOWN: Final = "model.layers.{i}.mlp.experts.down_proj"


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = text_part(raw)
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or _ROPE
    raw = {**_WIDTHS, "max_position_embeddings": 1_048_576, **raw, "rope_parameters": rope}
    return DEEPSEEK_V3.prepare(spell_out_growth(raw))


MISTRAL4: Final = Family(
    architectures=("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("mistral4",),
    keys={
        **DEEPSEEK_V3.keys,
        "latent_key_width": read("qk_nope_head_dim", 64),
        "num_experts": read("n_routed_experts", 128),
        "experts_per_token": read("num_experts_per_tok", 4),
        "route_scores": fixed("softmax"),
        "route_scale": read("routed_scaling_factor", 1.0),
        "route_corrections": fixed(False),
        "growth_rate": read("growth_rate", None),
        "growth_span": read("growth_span", None),
        "expert_groups": read("n_group", 1),
        "groups_per_token": read("topk_group", 1),
    },
    tensors={
        **DEEPSEEK_V3.tensors,
        "layers.{i}.experts.{e}.gate": OneOf(
            first=Stacked(tensor=_GATE_UP, parts=2, part=0),
            otherwise=f"{_EXPERT}.gate_proj.weight",
        ),
        "layers.{i}.experts.{e}.up": OneOf(
            first=Stacked(tensor=_GATE_UP, parts=2, part=1),
            otherwise=f"{_EXPERT}.up_proj.weight",
        ),
        "layers.{i}.experts.{e}.down": OneOf(
            first=Stacked(tensor=_DOWN), otherwise=f"{_EXPERT}.down_proj.weight"
        ),
    },
    prepare=_spell_out,
)
