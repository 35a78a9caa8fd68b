"""MiniMax M2: half of each head rotated, norms over all queries and all keys, experts chosen by
sigmoids with corrections. M3, the part that reads: norms of heads, gates with a limit, an MLP
beside the experts. Of its keys an indexer chooses so many blocks; rows that have no more attend all
keys, whatever it says: so long may rows be, and its tensors are not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.mistral import MIXTRAL
from freight.model.families.table import (
    BASE_KEYS,
    Family,
    Fused,
    Key,
    OneOf,
    Stacked,
    fixed,
    read,
    text_part,
)

__all__ = ["MINIMAX_M2", "MINIMAX_M3", "MINIMAX_M3_TEXT"]

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


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layers with experts are named, or flagged; what is rotated is a share, or a width."""
    raw = text_part(raw)
    kinds, flags = raw.get("mlp_layer_types"), raw.get("moe_layer_freq")
    layers = [bool(flag) for flag in flags] if isinstance(flags, list) else flags
    if isinstance(kinds, list):
        layers = [kind == "sparse" for kind in kinds]
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    shares = (raw, rope if isinstance(rope, Mapping) else {})
    is_share = any(own.get("partial_rotary_factor") is not None for own in shares)
    return {
        **raw,
        "expert_layers": layers,
        "rotary_dim": None if is_share else raw.get("rotary_dim", 64),
        "max_position_embeddings": _most_positions(raw),
    }


def _most_positions(raw: Mapping[str, Any]) -> object:
    """As many as are in the blocks that are chosen; what is no number, to be refused."""
    stated = {name: value for name, value in raw.items() if value is not None}
    older = stated.get("sparse_attention_config")
    own = older if isinstance(older, Mapping) else {}
    counts = (
        stated.get("max_position_embeddings", 524_288),
        own.get("sparse_block_size", stated.get("index_block_size", 128)),
        own.get("sparse_topk_blocks", stated.get("index_topk_blocks", 16)),
    )
    wrong = [count for count in counts if not isinstance(count, int)]
    return wrong[0] if wrong else min(counts[0], counts[1] * counts[2])


_SHARED: Final = f"{_MOE}.shared_experts"

MINIMAX_M3: Final = Family(
    architectures=("MiniMaxM3SparseForConditionalGeneration",),
    model_types=("minimax_m3_vl",),
    keys={
        **MINIMAX_M2.keys,
        "intermediate_size": read("dense_intermediate_size", 12_288),
        "num_kv_heads": read("num_key_value_heads", 4),
        "norm": fixed("rms_plus_one"),
        "qk_norm": fixed("per_head"),
        "activation": fixed("silu"),
        "gate_limit": read("swiglu_limit", 7.0),
        "gate_slope": read("swiglu_alpha", 1.702),
        "rotary_share": read("partial_rotary_factor", 1.0),
        "num_experts": Key(names=("num_local_experts", "num_experts"), default=128),
        "experts_per_token": read("num_experts_per_tok", 4),
        "route_scale": read("routed_scaling_factor", 2.0),
        "shared_size": read("shared_intermediate_size", 3072),
    },
    tensors={
        **MINIMAX_M2.tensors,
        "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj.weight",
        "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj.weight",
        "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj.weight",
        "layers.{i}.shared.gate": f"{_SHARED}.gate_proj.weight",
        "layers.{i}.shared.up": f"{_SHARED}.up_proj.weight",
        "layers.{i}.shared.down": f"{_SHARED}.down_proj.weight",
    },
    prepare=_spell_out,
)

_MLP: Final = "model.layers.{i}.mlp"


def _half(part: int, name: str) -> OneOf:
    return OneOf(
        first=Stacked(tensor=f"{_MLP}.experts.gate_up_proj", parts=2, part=part),
        otherwise=f"{_MOE}.experts.{{e}}.{name}.weight",
    )


def _both(prefix: str, tensor: str) -> Mapping[str, Fused]:
    of = (f"{prefix}.gate", f"{prefix}.up")
    return {
        f"layers.{{i}}.{name}": Fused(tensor=f"{tensor}.gate_up_proj.weight", of=of) for name in of
    }


MINIMAX_M3_TEXT: Final = Family(
    architectures=("MiniMaxM3VLForCausalLM",),
    model_types=("minimax_m3_vl_text",),
    keys=MINIMAX_M3.keys,
    tensors={
        **MINIMAX_M3.tensors,
        **_both("mlp", _MLP),
        **_both("shared", f"{_MLP}.shared_experts"),
        "layers.{i}.shared.down": f"{_MLP}.shared_experts.down_proj.weight",
        "layers.{i}.router.weight": f"{_MLP}.gate.weight",
        "layers.{i}.router.corrections": f"{_MLP}.gate.e_score_correction_bias",
        "layers.{i}.experts.{e}.gate": _half(0, "w1"),
        "layers.{i}.experts.{e}.up": _half(1, "w3"),
        "layers.{i}.experts.{e}.down": OneOf(
            first=Stacked(tensor=f"{_MLP}.experts.down_proj"),
            otherwise=f"{_MOE}.experts.{{e}}.w2.weight",
        ),
    },
    prepare=_spell_out,
)
"""The decoder alone, as transformers writes it."""
