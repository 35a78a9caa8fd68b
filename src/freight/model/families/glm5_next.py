"""GLM-5.3 Flash, the part that reads: of four layers three keep a state as in Kimi Linear, the
fourth attends over latents without rotation, of which an indexer chooses; experts as in
DeepSeek-V3, what is gated having a limit everywhere; and four residual streams that are mixed
(mHC), of which the head takes the mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import DEEPSEEK_V3
from freight.model.families.deepseek_sparse import attend_all
from freight.model.families.kimi import KIMI_LINEAR
from freight.model.families.streams import stream_tensors
from freight.model.families.table import MOST_LAYERS, Family, fixed, is_number, read, text_part

__all__ = ["GLM5_NEXT"]

_LAYER: Final = "model.layers.{i}"
_WIDTHS: Final = {
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "max_position_embeddings": 1_048_576,
    "num_hidden_layers": 45,
    "first_k_dense_replace": 3,
}
_STATES: Final = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = text_part(raw)
    own = raw.get("linear_attn_config")
    given = own if isinstance(own, Mapping) else {}
    bound = {"linear_lower_bound": -5.0}
    stated = {new: given[old] for old, new in _STATES.items() if old in given}
    raw = {**_WIDTHS, **bound, **raw, **stated}
    if given.get("safe_gate", True) and raw["linear_lower_bound"] is None and given:
        raw |= bound
    num_layers, limit = raw["num_hidden_layers"], raw.get("swiglu_limit", 10.0)
    if not isinstance(num_layers, int):
        return raw
    num_layers = min(num_layers, MOST_LAYERS)
    lowest = raw["linear_lower_bound"]
    return attend_all(
        {
            **raw,
            "layer_types": _kinds(raw.get("layer_types"), num_layers),
            "rope_layers": [False] * num_layers,
            "rope_scaling": None,
            "rope_parameters": None,
            "mlp_limits": [limit] * num_layers,
            "expert_limits": [limit] * num_layers,
            "rate_bound": -lowest if is_number(lowest) else lowest,
        }
    )


def _kinds(stated: object, num_layers: int) -> list[Any]:
    """Of layers; those that attend go by the name that others have."""
    if not isinstance(stated, list):
        stated = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    return ["full_attention" if kind == "indexed_attention" else kind for kind in stated]


_RECURRENT: Final = {
    name: place
    for name, place in KIMI_LINEAR.tensors.items()
    if name.startswith("layers.{i}.recurrence.")
}

GLM5_NEXT: Final = Family(
    architectures=("Glm5NextForConditionalGeneration",),
    model_types=("glm5_next", "glm5_next_text"),
    keys={
        **DEEPSEEK_V3.keys,
        **{name: key for name, key in KIMI_LINEAR.keys.items() if name.startswith("recurrent_")},
        "norm_eps": read("rms_norm_eps", 1e-5),
        "num_heads": read("num_attention_heads", 64),
        "hidden_size": read("hidden_size", 4096),
        "intermediate_size": read("intermediate_size", 12_288),
        "num_layers": read("num_hidden_layers", 45),
        "vocab_size": read("vocab_size", 154_880),
        "latent_key_width": read("qk_nope_head_dim", 256),
        "latent_value_width": read("v_head_dim", 256),
        "latent_eps": read("rms_norm_eps", 1e-5),
        "rotary_width": fixed(None),
        "num_experts": read("n_routed_experts", 288),
        "expert_groups": read("n_group", 1),
        "groups_per_token": read("topk_group", 1),
        "recurrent_key_heads": read("linear_num_heads", 64),
        "recurrent_heads": read("linear_num_heads", 64),
        "recurrent_rate_bound": read("rate_bound", None),
        "limits_first": fixed(True),
        "streams": read("hc_mult", 4),
        "stream_floor": read("hc_eps", 1e-6),
        "stream_rounds": read("hc_sinkhorn_iters", 20),
        "stream_head": fixed(False),
    },
    tensors={
        **DEEPSEEK_V3.tensors,
        **_RECURRENT,
        **stream_tensors(
            {
                "attention": (f"{_LAYER}.hc_attn_", f"{_LAYER}.attn_hc."),
                "mlp": (f"{_LAYER}.hc_ffn_", f"{_LAYER}.ffn_hc."),
            }
        ),
    },
    demands={"index_kpool_always_select_tail": True, "hidden_act": "silu"},
    prepare=_spell_out,
)
