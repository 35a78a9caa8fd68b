"""Nemotron-4 and Minitron: layer norms that add one, squares of relu in a plain MLP, half of each
head rotated. Arcee (AFM): root mean squares, and all of it. Jais 2: plain layer norms, biases."""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import LLAMA, LLAMA_TENSORS
from freight.model.families.starcoder2 import NORM_BIASES
from freight.model.families.table import Family, fixed, read

__all__ = ["ARCEE", "JAIS2", "NEMOTRON"]

ARCEE: Final = Family(
    architectures=("ArceeForCausalLM",),
    model_types=("arcee",),
    keys={
        **LLAMA.keys,
        "max_positions": read("max_position_embeddings", 4096),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "gated_mlp": fixed(False),
        "activation": read("hidden_act", "relu2"),
    },
    tensors=LLAMA_TENSORS,
)

NEMOTRON: Final = Family(
    architectures=("NemotronForCausalLM",),
    model_types=("nemotron",),
    keys={
        **ARCEE.keys,
        "norm": fixed("layer_plus_one"),
        "norm_eps": read("norm_eps", 1e-5),
        "norm_bias": fixed(True),
        "rotary_share": read("partial_rotary_factor", 0.5),
    },
    tensors={**LLAMA_TENSORS, **NORM_BIASES},
)

JAIS2: Final = Family(
    architectures=("Jais2ForCausalLM",),
    model_types=("jais2",),
    keys={
        **ARCEE.keys,
        "max_positions": read("max_position_embeddings", 8192),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_eps", 1e-5),
        "norm_bias": fixed(True),
        "qkv_bias": read("attention_bias", True),
        "out_bias": read("attention_bias", True),
        "mlp_bias": read("mlp_bias", True),
    },
    tensors=NEMOTRON.tensors,
)
