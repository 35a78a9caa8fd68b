"""Phi-3: Llama's shape, with the projections of attention and of the MLP stacked in the file."""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import DECODER_TENSORS
from freight.model.families.table import BASE_KEYS, Family, Fused, fixed, read

__all__ = ["PHI3"]

_QKV: Final = Fused(
    tensor="model.layers.{i}.self_attn.qkv_proj.weight",
    of=("attention.q", "attention.k", "attention.v"),
)
_GATE_UP: Final = Fused(
    tensor="model.layers.{i}.mlp.gate_up_proj.weight", of=("mlp.gate", "mlp.up")
)

PHI3: Final = Family(
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 4096),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "rotary_share": read("partial_rotary_factor", 1.0),
        "uses_windows": fixed(True),
        "window": read("sliding_window", None),
    },
    tensors={
        **DECODER_TENSORS,
        "layers.{i}.attention.q": _QKV,
        "layers.{i}.attention.k": _QKV,
        "layers.{i}.attention.v": _QKV,
        "layers.{i}.mlp.gate": _GATE_UP,
        "layers.{i}.mlp.up": _GATE_UP,
        "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj.weight",
    },
)
