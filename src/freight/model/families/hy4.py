"""Hy 4: latents of which an indexer chooses, for the layers after it too, as in GLM-5, with sinks
and gates; experts as in DeepSeek-V3, of which what is gated has a limit; and four residual streams,
which are not mixed (independent hyper-connections)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import DEEPSEEK_V3
from freight.model.families.deepseek_sparse import INDEX_TENSORS, choose_keys
from freight.model.families.streams import stream_tensors
from freight.model.families.table import (
    MOST_LAYERS,
    Family,
    Place,
    Stacked,
    first_of,
    fixed,
    is_number,
    read,
)

__all__ = ["HY_V4"]

_WIDTHS: Final = {
    "moe_intermediate_size": 768,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 262_144,
    "first_k_dense_replace": 1,
}
_LAYER: Final = "model.layers.{i}"
_MLP: Final = f"{_LAYER}.mlp"


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A limit of experts that is none, or 0, is switched off. Of four layers one chooses keys, from
    the second on, and the first one does."""
    raw = {**_WIDTHS, **raw}
    limit, num_layers = raw.get("swiglu_limit", 10.0), raw.get("num_hidden_layers")
    is_limited = not is_number(limit) or limit > 0
    if isinstance(num_layers, int) and is_limited:
        raw["expert_limits"] = [limit] * min(num_layers, MOST_LAYERS)
    if raw.get("indexer_types") is None:
        raw |= {"index_topk_freq": 4, "index_skip_topk_offset": 2, "index_topk_pattern": None}
    return choose_keys(raw)


def _gate(prefix: str) -> Place:
    return first_of(f"{prefix}.gate_proj.weight", f"{prefix}.linear_gate.weight")


def _expert(name: str, stacked: Stacked) -> Place:
    return first_of(stacked, f"{_MLP}.experts.{{e}}.{name}.weight")


# transformers writes the second spelling of what was published as the first.
_STREAMS: Final = stream_tensors(
    {
        part: (
            f"{_LAYER}.hc_{own}_layer.hc_pre.hc_",
            f"{_LAYER}.hc_pre.hc_{own}_layer.hc_",
            f"{_LAYER}.hc_{own}_layer.hc_",
            f"{_LAYER}.{other}_hc.",
        )
        for part, own, other in (("attention", "attn", "attn"), ("mlp", "mlp", "ffn"))
    }
    | {
        "head": (
            "model.hc_head.hc_pre.hc_head_",
            "model.hc_pre.hc_head.hc_head_",
            "model.hc_head.hc_head_",
            "model.hc_head.hc_",
        )
    }
)

HY_V4: Final = Family(
    architectures=("HYV4ForCausalLM",),
    model_types=("hy_v4",),
    keys={
        **DEEPSEEK_V3.keys,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "rotary_pairs": fixed(False),
        "attention_sinks": fixed(True),
        "attention_gates": fixed("apart"),
        "latent_key_width": read("qk_nope_head_dim", 192),
        "latent_value_width": read("v_head_dim", 256),
        "expert_size": read("moe_intermediate_size", 768),
        "route_scale": read("routed_scaling_factor", 2.827),
        "expert_groups": read("n_group", 1),
        "groups_per_token": read("topk_group", 1),
        "limits_first": fixed(True),
        "index_chosen": read("index_topk", None),
        "index_heads": read("index_n_heads", 16),
        "index_width": read("index_head_dim", 128),
        "index_pairs": fixed(False),
        "index_turns_last": fixed(True),
        "index_eps": read("rms_norm_eps", 1e-5),
        "streams": read("hc_mult", 4),
        "stream_floor": read("hc_eps", 1e-6),
        "stream_magnitude": read("hc_magnitude", 2.0),
        "stream_least": read("hc_eps", 1e-6),
    },
    tensors={
        **DEEPSEEK_V3.tensors,
        **INDEX_TENSORS,
        "layers.{i}.attention.sinks": first_of(
            f"{_LAYER}.self_attn.learnable_sink_param", f"{_LAYER}.self_attn.sinks"
        ),
        "layers.{i}.attention.gates": first_of(
            f"{_LAYER}.self_attn.linear_gate.weight", f"{_LAYER}.self_attn.gate_proj.weight"
        ),
        "layers.{i}.mlp.gate": _gate(_MLP),
        "layers.{i}.shared.gate": _gate(f"{_MLP}.shared_experts"),
        "layers.{i}.experts.{e}.gate": _expert(
            "gate_proj", Stacked(tensor=f"{_MLP}.experts.gate_up_proj", parts=2, part=0)
        ),
        "layers.{i}.experts.{e}.up": _expert(
            "up_proj", Stacked(tensor=f"{_MLP}.experts.gate_up_proj", parts=2, part=1)
        ),
        "layers.{i}.experts.{e}.down": _expert(
            "down_proj", Stacked(tensor=f"{_MLP}.experts.down_proj")
        ),
        **_STREAMS,
    },
    prepare=_spell_out,
)
