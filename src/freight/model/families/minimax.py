"""MiniMax M2: half of each head rotated, norms over all queries and all keys, experts chosen by
sigmoids with corrections."""

from __future__ import annotations

from typing import Final

from freight.model.families.mistral import MIXTRAL
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read

__all__ = ["MINIMAX_M2"]

_MOE: Final = "model.layers.{i}.block_sparse_moe"

MINIMAX_M2: Final = Family(
    architectures=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    keys={
        **BASE_KEYS,
        "max_positions": read("max_position_embeddings", 196_608),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": read("head_dim", 128),
        "qk_norm": fixed("whole"),
        "rope_theta": read("rope_theta", 5_000_000.0),
        "rotary_width": Key(names=("rotary_dim",)),
        "num_experts": read("num_local_experts", 256),
        "experts_per_token": read("num_experts_per_tok", 8),
        "expert_size": read("intermediate_size", None),
        "route_scores": fixed("sigmoid"),
        "route_corrections": fixed(True),
    },
    tensors={
        **MIXTRAL.tensors,
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "layers.{i}.router.corrections": f"{_MOE}.e_score_correction_bias",
    },
)
