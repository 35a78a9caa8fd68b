"""gpt-oss: experts with biases, whose gates and values take turns and have a limit, attention with
a sink in each head, every other layer with a window. Published in MXFP4; plain ones lie turned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import DECODER_TENSORS, PROJECTION_BIASES
from freight.model.families.table import (
    BASE_KEYS,
    Family,
    Key,
    Stacked,
    fixed,
    read,
    window_kinds,
)

__all__ = ["GPT_OSS"]


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first has a window, the next sees all."""
    kinds = raw.get("layer_types") or window_kinds(raw.get("num_hidden_layers"), 2)
    return {**raw, "layer_types": kinds}


_EXPERTS: Final = "model.layers.{i}.mlp.experts"


def _of_two(first: int, name: str, *, turned: bool) -> Stacked:
    return Stacked(tensor=f"{_EXPERTS}.gate_up_proj{name}", every=2, first=first, turned=turned)


GPT_OSS: Final = Family(
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 131_072),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 64),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qkv_bias": read("attention_bias", True),
        "out_bias": read("attention_bias", True),
        "mlp_bias": fixed(True),
        "gate_limit": read("swiglu_limit", 7.0),
        "gate_slope": read("swiglu_alpha", 1.702),
        "attention_sinks": fixed(True),
        "rope_theta": read("rope_theta", 150_000.0),
        "uses_windows": fixed(True),
        "window": Key(names=("sliding_window",), default=128, null_is_value=True),
        "num_experts": Key(names=("num_local_experts", "num_experts"), default=128),
        "experts_per_token": Key(names=("num_experts_per_tok", "experts_per_token"), default=4),
        "expert_size": read("intermediate_size", None),
        "route_bias": fixed(True),
    },
    tensors={
        **DECODER_TENSORS,
        **PROJECTION_BIASES,
        "layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks",
        "layers.{i}.router.weight": "model.layers.{i}.mlp.router.weight",
        "layers.{i}.router.bias": "model.layers.{i}.mlp.router.bias",
        "layers.{i}.experts.{e}.gate": _of_two(0, "", turned=True),
        "layers.{i}.experts.{e}.up": _of_two(1, "", turned=True),
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_EXPERTS}.down_proj", turned=True),
        "layers.{i}.experts.{e}.gate_bias": _of_two(0, "_bias", turned=False),
        "layers.{i}.experts.{e}.up_bias": _of_two(1, "_bias", turned=False),
        "layers.{i}.experts.{e}.down_bias": Stacked(tensor=f"{_EXPERTS}.down_proj_bias"),
    },
    prepare=_name_layers,
)
