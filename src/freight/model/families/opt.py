"""OPT: learned positions, layer norms with biases (after each block in the 350m), a plain MLP, and
in the 350m embeddings narrower than the model. BioGPT: the same with scaled embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import BASE_KEYS, Family, fixed, read, required

__all__ = ["BIOGPT", "OPT"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    before = raw.get("do_layer_norm_before", True)
    kept = before and not raw.get("_remove_final_layer_norm", False)
    return {**raw, "norm_place": "before" if before else "after", "final_norm": kept}


_LAYER: Final = "model.decoder.layers.{i}"
_NAMES: Final = {
    "attention.norm": "self_attn_layer_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "mlp.norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}

OPT: Final = Family(
    architectures=("OPTForCausalLM",),
    model_types=("opt",),
    keys={
        **BASE_KEYS,
        "intermediate_size": required("ffn_dim"),
        "num_kv_heads": fixed(None),
        "head_dim": fixed(None),
        "embedding_size": read("word_embed_proj_dim", None),
        "norm": fixed("layer"),
        "norm_place": read("norm_place", "before"),
        "norm_eps": fixed(1e-5),
        "norm_bias": fixed(True),
        "final_norm": read("final_norm", True),
        "gated_mlp": fixed(False),
        "activation": read("activation_function", "relu"),
        **{name: read("enable_bias", True) for name in ("qkv_bias", "out_bias", "mlp_bias")},
        "tied_embeddings": read("tie_word_embeddings", True),
        "learned_positions": fixed(True),
        "position_offset": fixed(2),
    },
    tensors={
        "embedding": "model.decoder.embed_tokens.weight",
        "embedding.positions": "model.decoder.embed_positions.weight",
        "embedding.project": "model.decoder.project_in.weight",
        **{f"layers.{{i}}.{key}": f"{_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_LAYER}.{name}.bias" for key, name in _NAMES.items()},
        "head.norm": "model.decoder.final_layer_norm.weight",
        "head.norm_bias": "model.decoder.final_layer_norm.bias",
        "head.project": "model.decoder.project_out.weight",
        "head.weight": "lm_head.weight",
    },
    demands={"layer_norm_elementwise_affine": True},
    prepare=_spell_out,
)


def _scale(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    width = raw.get("hidden_size") if raw.get("scale_embedding", True) else None
    has_root = isinstance(width, int) and 0 < width < 1 << 63
    return {**raw, "embedding_scale": math.sqrt(width) if width and has_root else None}


_BIO_LAYER: Final = "biogpt.layers.{i}"

BIOGPT: Final = Family(
    architectures=("BioGptForCausalLM",),
    model_types=("biogpt",),
    keys={
        **OPT.keys,
        "intermediate_size": required("intermediate_size"),
        "max_positions": read("max_position_embeddings", 1024),
        "embedding_size": fixed(None),
        "embedding_scale": read("embedding_scale", None),
        "norm_place": fixed("before"),
        "norm_eps": fixed(1e-5),
        "final_norm": fixed(True),
        "activation": read("hidden_act", "gelu"),
        **{name: fixed(True) for name in ("qkv_bias", "out_bias", "mlp_bias")},
    },
    tensors={
        "embedding": "biogpt.embed_tokens.weight",
        "embedding.positions": "biogpt.embed_positions.weight",
        **{f"layers.{{i}}.{key}": f"{_BIO_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_BIO_LAYER}.{name}.bias" for key, name in _NAMES.items()},
        "head.norm": "biogpt.layer_norm.weight",
        "head.norm_bias": "biogpt.layer_norm.bias",
        "head.weight": "output_projection.weight",
    },
    prepare=_scale,
)
