"""Apertus: Llama's shape with norms on queries and keys and a plain MLP, whose activation has two
weights of its own in each layer."""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import LLAMA, LLAMA_TENSORS
from freight.model.families.table import Family, fixed, read

__all__ = ["APERTUS"]

_LAYER: Final = "model.layers.{i}"

APERTUS: Final = Family(
    architectures=("ApertusForCausalLM",),
    model_types=("apertus",),
    keys={
        **LLAMA.keys,
        "max_positions": read("max_position_embeddings", 65_536),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qk_norm": fixed("per_head"),
        "gated_mlp": fixed(False),
        "activation": fixed("xielu"),
        "mlp_bias": fixed(False),
        "rope_theta": read("rope_theta", 12_000_000.0),
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{i}.attention.norm": f"{_LAYER}.attention_layernorm.weight",
        "layers.{i}.attention.q_norm": f"{_LAYER}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm": f"{_LAYER}.self_attn.k_norm.weight",
        "layers.{i}.mlp.norm": f"{_LAYER}.feedforward_layernorm.weight",
        "layers.{i}.mlp.positive": f"{_LAYER}.mlp.act_fn.alpha_p",
        "layers.{i}.mlp.negative": f"{_LAYER}.mlp.act_fn.alpha_n",
    },
    demands={"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True},
)
