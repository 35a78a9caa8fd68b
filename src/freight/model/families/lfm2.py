"""LFM2, also with experts: most layers keep the columns of a row's last tokens alone, convolved
between two gates; the others attend, with norms of heads. LFM3: some of these by windows, each kind
with a rotation of its own, a gate for each head, and norms of what the parts of a layer make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import (
    BASE_KEYS,
    MOST_LAYERS,
    Family,
    Fused,
    OneOf,
    fixed,
    is_number,
    read,
)

__all__ = ["LFM2", "LFM2_MOE", "LFM3"]

_KINDS: Final = {"conv": "linear_attention"}


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Kinds of layers by their other name, or by a list of those that attend; what newer versions
    call otherwise."""
    kinds, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers", 32)
    if kinds is None and isinstance(num_layers, int):
        layers = range(min(num_layers, MOST_LAYERS))
        attending = raw.get("full_attn_idxs")
        attending = [*layers] if attending is None else attending
        if isinstance(attending, list):
            kinds = ["full_attention" if i in attending else "conv" for i in layers]
    if isinstance(kinds, list):
        kinds = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    changes: dict[str, Any] = {"layer_types": kinds, "mixer_width": raw.get("hidden_size", 2560)}
    if "tie_embedding" in raw:
        changes["tie_word_embeddings"] = raw["tie_embedding"]
    return {**raw, **changes}


def _fit_width(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Two thirds of the width that is given, in whole multiples, unless it is not to be changed."""
    raw = _name_layers(raw)
    width = raw.get("block_ff_dim", raw.get("intermediate_size", 12_288))
    factor, step = raw.get("block_ffn_dim_multiplier", 1.0), raw.get("block_multiple_of", 256)
    is_whole = all(isinstance(n, int) and 0 < n < 2**63 for n in (width, step))
    if raw.get("block_auto_adjust_ff_dim", True) and is_whole:
        if not is_number(1.0 if factor is None else factor):
            return {**raw, "intermediate_size": factor}  # to be refused
        width = int((1.0 if factor is None else factor) * int(2 * width / 3))
        width = step * -(-width // step)
    return {**raw, "intermediate_size": width}


def _name_experts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first layers are plain."""
    raw = _name_layers(raw)
    num_layers, plain = raw.get("num_hidden_layers", 32), raw.get("num_dense_layers", 2)
    if not isinstance(num_layers, int) or not isinstance(plain, int):
        return raw
    return {**raw, "expert_layers": [i >= plain for i in range(min(num_layers, MOST_LAYERS))]}


_LAYER: Final = "model.layers.{i}"
_MIXED: Final = Fused(
    tensor=f"{_LAYER}.conv.in_proj.weight",
    of=("recurrence.gate", "recurrence.outer", "recurrence.mixed"),
)

LFM2: Final = Family(
    architectures=("Lfm2ForCausalLM",),
    model_types=("lfm2",),
    keys={
        **BASE_KEYS,
        "num_layers": read("num_hidden_layers", 32),
        "hidden_size": read("hidden_size", 2560),
        "intermediate_size": read("intermediate_size", 12_288),
        "num_heads": read("num_attention_heads", 32),
        "num_kv_heads": read("num_key_value_heads", 8),
        "vocab_size": read("vocab_size", 65_536),
        "max_positions": read("max_position_embeddings", 128_000),
        "norm_eps": read("norm_eps", 1e-5),
        "activation": fixed("silu"),
        "tied_embeddings": read("tie_word_embeddings", True),
        "qk_norm": fixed("per_head"),
        "rope_theta": read("rope_theta", 1_000_000.0),
        "recurrent_rule": fixed("gates"),
        "recurrent_taps": read("conv_L_cache", 3),
        "recurrent_key_heads": fixed(1),
        "recurrent_heads": fixed(1),
        "recurrent_key_width": fixed(0),
        "recurrent_value_width": read("mixer_width", None),
    },
    tensors={
        "embedding": "model.embed_tokens.weight",
        "layers.{i}.attention.norm": f"{_LAYER}.operator_norm.weight",
        "layers.{i}.attention.q": f"{_LAYER}.self_attn.q_proj.weight",
        "layers.{i}.attention.k": f"{_LAYER}.self_attn.k_proj.weight",
        "layers.{i}.attention.v": f"{_LAYER}.self_attn.v_proj.weight",
        "layers.{i}.attention.out": f"{_LAYER}.self_attn.out_proj.weight",
        "layers.{i}.attention.q_norm": f"{_LAYER}.self_attn.q_layernorm.weight",
        "layers.{i}.attention.k_norm": f"{_LAYER}.self_attn.k_layernorm.weight",
        "layers.{i}.recurrence.gate": _MIXED,
        "layers.{i}.recurrence.outer": _MIXED,
        "layers.{i}.recurrence.mixed": _MIXED,
        "layers.{i}.recurrence.convolution": f"{_LAYER}.conv.conv.weight",
        "layers.{i}.recurrence.out": f"{_LAYER}.conv.out_proj.weight",
        "layers.{i}.mlp.norm": f"{_LAYER}.ffn_norm.weight",
        "layers.{i}.mlp.gate": f"{_LAYER}.feed_forward.w1.weight",
        "layers.{i}.mlp.up": f"{_LAYER}.feed_forward.w3.weight",
        "layers.{i}.mlp.down": f"{_LAYER}.feed_forward.w2.weight",
        "head.norm": "model.embedding_norm.weight",
        "head.weight": "lm_head.weight",
    },
    demands={"conv_bias": False},
    prepare=_fit_width,
)

_EXPERT: Final = f"{_LAYER}.feed_forward.experts.{{e}}"

LFM2_MOE: Final = Family(
    architectures=("Lfm2MoeForCausalLM",),
    model_types=("lfm2_moe",),
    keys={
        **LFM2.keys,
        "hidden_size": read("hidden_size", 2048),
        "intermediate_size": read("intermediate_size", 7168),
        "num_experts": read("num_experts", 32),
        "experts_per_token": read("num_experts_per_tok", 4),
        "expert_size": read("moe_intermediate_size", 1792),
        "normalised_routes": read("norm_topk_prob", True),
        "route_scores": fixed("sigmoid"),
        "route_scale": read("routed_scaling_factor", 1.0),
        "route_corrections": read("use_expert_bias", True),
    },
    tensors={
        **LFM2.tensors,
        "layers.{i}.router.weight": f"{_LAYER}.feed_forward.gate.weight",
        "layers.{i}.router.corrections": f"{_LAYER}.feed_forward.expert_bias",
        "layers.{i}.experts.{e}.gate": f"{_EXPERT}.w1.weight",
        "layers.{i}.experts.{e}.up": f"{_EXPERT}.w3.weight",
        "layers.{i}.experts.{e}.down": f"{_EXPERT}.w2.weight",
    },
    demands=LFM2.demands,
    prepare=_name_experts,
)


_LFM3_ROPES: Final = {
    "sliding_attention": {"rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
}


def _name_newer_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layers that attend nothing do not rotate."""
    stated = {name: value for name, value in raw.items() if value is not None}
    num_layers, kinds = stated.get("num_hidden_layers", 24), stated.get("layer_types")
    if kinds is None and isinstance(num_layers, int):
        turns = ("sliding_attention", "conv", "full_attention", "conv")
        kinds = [turns[i % 4] if i else "conv" for i in range(min(num_layers, MOST_LAYERS))]
    ropes = stated.get("rope_parameters") or _LFM3_ROPES
    found = {
        **_name_layers({"hidden_size": 2048, **stated, "layer_types": kinds}),
        "rope_parameters": {**ropes, _KINDS["conv"]: {}} if isinstance(ropes, Mapping) else ropes,
        "norms": "both" if stated.get("use_sandwich_norm", True) else "before",
        "gates": "heads" if stated.get("use_attention_gate", True) else "none",
    }
    if isinstance(kinds, list):
        found["rope_layers"] = [kind not in (*_KINDS, *_KINDS.values()) for kind in kinds]
    return found


LFM3: Final = Family(
    architectures=("Lfm3ForCausalLM",),
    model_types=("lfm3",),
    keys={
        **LFM2.keys,
        "num_layers": read("num_hidden_layers", 24),
        "hidden_size": read("hidden_size", 2048),
        "intermediate_size": read("intermediate_size", 7680),
        "num_heads": read("num_attention_heads", 16),
        "num_kv_heads": read("num_key_value_heads", 4),
        "head_dim": read("head_dim", 128),
        "vocab_size": read("vocab_size", 128_000),
        "norm_place": read("norms", "both"),
        "attention_gates": read("gates", "heads"),
        "uses_windows": fixed(True),
        "window": read("sliding_window", 256),
        "recurrent_taps": read("conv_L_cache", 7),
    },
    tensors={
        **LFM2.tensors,
        "layers.{i}.attention.post_norm": f"{_LAYER}.post_operator_norm.weight",
        "layers.{i}.attention.out": f"{_LAYER}.self_attn.o_proj.weight",
        "layers.{i}.attention.q_norm": f"{_LAYER}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm": f"{_LAYER}.self_attn.k_norm.weight",
        "layers.{i}.attention.gates": OneOf(
            first=f"{_LAYER}.self_attn.gate_proj.weight",
            otherwise=f"{_LAYER}.self_attn.g_proj.weight",
        ),
        "layers.{i}.mlp.post_norm": f"{_LAYER}.post_ffn_norm.weight",
    },
    demands={**LFM2.demands, "attention_bias": False},
    prepare=_name_newer_layers,
)
