"""Qwen3-Next and Qwen3.5: of four layers three keep a state by the gated delta rule, the fourth
attends, with gates; all norms add one. Of models that also see, the part that reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.qwen import QWEN2_MOE, QWEN3, name_expert_layers
from freight.model.families.table import MOST_LAYERS, Family, OneOf, Stacked, fixed, read, text_part

__all__ = ["QWEN3_5", "QWEN3_5_MOE", "QWEN3_NEXT"]

_KEYS: Final = {
    **QWEN3.keys,
    "num_kv_heads": read("num_key_value_heads", 2),
    "head_dim": read("head_dim", 256),
    "norm": fixed("rms_plus_one"),
    "rotary_share": read("partial_rotary_factor", 0.25),
    "uses_windows": fixed(False),
    "attention_gates": fixed("queries"),
    "recurrent_taps": read("linear_conv_kernel_dim", 4),
    "recurrent_key_heads": read("linear_num_key_heads", 16),
    "recurrent_heads": read("linear_num_value_heads", 32),
    "recurrent_key_width": read("linear_key_head_dim", 128),
    "recurrent_value_width": read("linear_value_head_dim", 128),
}
_EXPERT_KEYS: Final = {
    name: QWEN2_MOE.keys[name] for name in ("num_experts", "experts_per_token", "shared_gate")
}
_MIXER: Final = "model.layers.{i}.linear_attn"
_COMMON: Final = {
    "layers.{i}.recurrence.convolution": f"{_MIXER}.conv1d.weight",
    "layers.{i}.recurrence.decay": f"{_MIXER}.A_log",
    "layers.{i}.recurrence.decay_bias": f"{_MIXER}.dt_bias",
    "layers.{i}.recurrence.read_norm": f"{_MIXER}.norm.weight",
    "layers.{i}.recurrence.out": f"{_MIXER}.out_proj.weight",
}
_DEALT: Final = {
    **_COMMON,
    "layers.{i}.recurrence.all": f"{_MIXER}.in_proj_qkvz.weight",
    "layers.{i}.recurrence.ba": f"{_MIXER}.in_proj_ba.weight",
}
_APART: Final = {
    **_COMMON,
    "layers.{i}.recurrence.mixed": f"{_MIXER}.in_proj_qkv.weight",
    "layers.{i}.recurrence.gate": f"{_MIXER}.in_proj_z.weight",
    "layers.{i}.recurrence.b": f"{_MIXER}.in_proj_b.weight",
    "layers.{i}.recurrence.a": f"{_MIXER}.in_proj_a.weight",
}


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth attends, where config.json names none."""
    raw = text_part(raw)
    num_layers, every = raw.get("num_hidden_layers"), raw.get("full_attention_interval") or 4
    if raw.get("layer_types") is not None or not isinstance(num_layers, int):
        return raw
    if not isinstance(every, int) or every < 1:
        return raw
    kinds = ("linear_attention", "full_attention")
    layers = range(min(num_layers, MOST_LAYERS))
    return {**raw, "layer_types": [kinds[(i + 1) % every == 0] for i in layers]}


def _name_both(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return name_expert_layers(_name_layers(raw))


QWEN3_NEXT: Final = Family(
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    keys={
        **_KEYS,
        **_EXPERT_KEYS,
        "num_experts": read("num_experts", 512),
        "experts_per_token": read("num_experts_per_tok", 10),
        "expert_size": read("moe_intermediate_size", 512),
        "shared_size": read("shared_expert_intermediate_size", 512),
        "normalised_routes": read("norm_topk_prob", True),
        "recurrent_deal": fixed(True),
    },
    tensors={**QWEN2_MOE.tensors, **QWEN3.tensors, **_DEALT},
    prepare=_name_both,
)

QWEN3_5: Final = Family(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_types=("qwen3_5_text", "qwen3_5"),
    keys=_KEYS,
    tensors={**QWEN3.tensors, **_APART},
    prepare=_name_layers,
)

_EXPERT: Final = "model.layers.{i}.mlp.experts.{e}"
_STACKED: Final = "model.layers.{i}.mlp.experts"


def _half(part: int, name: str) -> OneOf:
    return OneOf(
        first=Stacked(tensor=f"{_STACKED}.gate_up_proj", parts=2, part=part),
        otherwise=f"{_EXPERT}.{name}.weight",
    )


QWEN3_5_MOE: Final = Family(
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    keys={
        **QWEN3_NEXT.keys,
        "intermediate_size": read("shared_expert_intermediate_size", 512),
        "num_experts": read("num_experts", 256),
        "experts_per_token": read("num_experts_per_tok", 8),
        "normalised_routes": fixed(True),
        "recurrent_deal": fixed(False),
    },
    tensors={
        **QWEN2_MOE.tensors,
        **QWEN3_5.tensors,
        "layers.{i}.experts.{e}.gate": _half(0, "gate_proj"),
        "layers.{i}.experts.{e}.up": _half(1, "up_proj"),
        "layers.{i}.experts.{e}.down": OneOf(
            first=Stacked(tensor=f"{_STACKED}.down_proj"),
            otherwise=f"{_EXPERT}.down_proj.weight",
        ),
    },
    prepare=_name_both,
)
