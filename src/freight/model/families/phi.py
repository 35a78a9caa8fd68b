"""Phi-1.5 and Phi-2: attention and a plain MLP side by side over one layer norm, a part of each
head rotated, biases everywhere, also of the output head."""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import DECODER_TENSORS, PROJECTION_BIASES
from freight.model.families.table import BASE_KEYS, Family, fixed, read

__all__ = ["PHI"]

_LAYER: Final = "model.layers.{i}"

PHI: Final = Family(
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    keys={
        **BASE_KEYS,
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_eps", 1e-5),
        "parallel": fixed(True),
        "shared_norm": fixed(True),
        "gated_mlp": fixed(False),
        "activation": read("hidden_act", "gelu_new"),
        **{f"{name}_bias": fixed(True) for name in ("norm", "qkv", "out", "mlp", "head")},
        "rotary_share": read("partial_rotary_factor", 0.5),
    },
    tensors={
        **DECODER_TENSORS,
        **PROJECTION_BIASES,
        "layers.{i}.attention.norm_bias": f"{_LAYER}.input_layernorm.bias",
        "layers.{i}.attention.out": f"{_LAYER}.self_attn.dense.weight",
        "layers.{i}.attention.out_bias": f"{_LAYER}.self_attn.dense.bias",
        "layers.{i}.mlp.norm": f"{_LAYER}.input_layernorm.weight",
        "layers.{i}.mlp.norm_bias": f"{_LAYER}.input_layernorm.bias",
        "layers.{i}.mlp.up": f"{_LAYER}.mlp.fc1.weight",
        "layers.{i}.mlp.up_bias": f"{_LAYER}.mlp.fc1.bias",
        "layers.{i}.mlp.down": f"{_LAYER}.mlp.fc2.weight",
        "layers.{i}.mlp.down_bias": f"{_LAYER}.mlp.fc2.bias",
        "head.norm": "model.final_layernorm.weight",
        "head.norm_bias": "model.final_layernorm.bias",
        "head.bias": "lm_head.bias",
    },
    demands={"qk_layernorm": False},
)
