"""GLM-4: half of each head rotated, neighbours together. The first has norms before the parts of a
layer, the second also of what they return, as has what reads in GLM-4.1V."""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.phi3 import PHI3
from freight.model.families.table import BASE_KEYS, Family, fixed, read

__all__ = ["GLM", "GLM4", "GLM4V"]

_KEYS: Final = {
    **BASE_KEYS,
    "max_positions": read("max_position_embeddings", 131_072),
    "num_kv_heads": read("num_key_value_heads", 2),
    "head_dim": read("head_dim", 128),
    "norm_eps": read("rms_norm_eps", 1.5625e-7),
    "qkv_bias": read("attention_bias", True),
    "rotary_share": read("partial_rotary_factor", 0.5),
    "rotary_pairs": fixed(True),
}
_TENSORS: Final = {
    **LLAMA_TENSORS,
    "layers.{i}.mlp.gate": PHI3.tensors["layers.{i}.mlp.gate"],
    "layers.{i}.mlp.up": PHI3.tensors["layers.{i}.mlp.up"],
}

GLM: Final = Family(
    architectures=("GlmForCausalLM",),
    model_types=("glm",),
    keys=_KEYS,
    tensors=_TENSORS,
)

GLM4: Final = Family(
    architectures=("Glm4ForCausalLM",),
    model_types=("glm4",),
    keys={**_KEYS, "norm_place": fixed("both")},
    tensors={
        **_TENSORS,
        "layers.{i}.attention.post_norm": "model.layers.{i}.post_self_attn_layernorm.weight",
        "layers.{i}.mlp.post_norm": "model.layers.{i}.post_mlp_layernorm.weight",
    },
)

GLM4V: Final = Family(
    architectures=(),
    model_types=("glm4v_text",),
    keys={
        **GLM4.keys,
        "max_positions": read("max_position_embeddings", 32_768),
        "head_dim": fixed(None),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "qkv_bias": fixed(True),
        "rotary_share": read("partial_rotary_factor", 1.0),
    },
    tensors=GLM4.tensors,
)
