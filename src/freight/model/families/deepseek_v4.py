"""DeepSeek-V4: one key for all heads, which is its value, kept of a window and of what was before
it compressed; queries and updates through narrow products; experts that the first layers give by
token, and others by the root of a softplus; four residual streams that are mixed (mHC). Of keys
that stand for four tokens each an indexer chooses, where a row has more than so many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.streams import stream_tensors
from freight.model.families.table import (
    BASE_KEYS,
    MOST_LAYERS,
    Family,
    first_of,
    fixed,
    is_number,
    read,
)

__all__ = ["DEEPSEEK_V4"]

_DOUBLED: Final = "compressed_sparse_attention"
_PLAIN: Final = "heavily_compressed_attention"
_RATES: Final = {_DOUBLED: 4, _PLAIN: 128}
_OLD_RATES: Final = {_DOUBLED: "compress_rate_csa", _PLAIN: "compress_rate_hca"}
_OLD_KINDS: Final = {0: "sliding_attention", 4: _DOUBLED, 128: _PLAIN}
_ROTATED: Final = 64 / 512
"""Of a head, where nothing is said."""


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = {name: value for name, value in raw.items() if value is not None}
    num_layers = raw.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return raw
    num_layers = min(num_layers, MOST_LAYERS)
    kinds, rates = _kinds(raw, num_layers), _rates(raw)
    limit = raw.get("swiglu_limit", 10.0)
    limits = [limit if not is_number(limit) or limit > 0 else None] * num_layers
    own = {
        "kept_rates": [0 if kind == "sliding_attention" else rates.get(kind) for kind in kinds],
        "kept_doubled": [kind == _DOUBLED for kind in kinds],
        "kept_kinds": kinds,
        "layer_types": ["main" if kind == "sliding_attention" else "compress" for kind in kinds],
        "rope_scaling": None,
        "rope_parameters": _ropes(raw),
        "rotary_width": _rotated(raw),
        "token_layers": _by_token(raw, num_layers),
        "mlp_limits": limits,
        "expert_limits": limits,
    }
    packed = raw.get("quantization_config")
    if isinstance(packed, Mapping):
        skipped = packed.get("modules_to_not_convert")
        # Compressors and what weighs heads stay plain, and no file says so.
        own["quantization_config"] = {
            "expert_dtype": raw.get("expert_dtype"),
            **packed,
            "modules_to_not_convert": [
                *(skipped if isinstance(skipped, list) else ()),
                ".compressor.",
                ".weights_proj",
            ],
        }
    width, shared = raw.get("moe_intermediate_size", 2048), raw.get("n_shared_experts", 1)
    if isinstance(width, int) and isinstance(shared, int):
        own["shared_size"] = width * shared
    return {**raw, **own}


def _rates(raw: Mapping[str, Any]) -> dict[str, Any]:
    """How many tokens a key stands for, by kind of layer."""
    stated = raw.get("compress_rates")
    given = stated if isinstance(stated, Mapping) else {}
    old = {kind: raw[name] for kind, name in _OLD_RATES.items() if name in raw}
    return {kind: old.get(kind, given.get(kind, rate)) for kind, rate in _RATES.items()}


def _kinds(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """Of layers, in words; older files give numbers of tokens instead, and may give those of
    layers behind the last."""
    kinds, given = raw.get("layer_types"), raw.get("compress_ratios")
    if not isinstance(kinds, list) and isinstance(given, list):
        kinds = [_OLD_KINDS.get(own, own) if isinstance(own, int) else own for own in given]
    if not isinstance(kinds, list):
        kinds = [_DOUBLED if i > 1 and i % 2 else _PLAIN for i in range(num_layers)]
    return [str(kind) for kind in kinds[:num_layers]]


def _ropes(raw: Mapping[str, Any]) -> Any:
    """Layers with compressed keys are stretched; what that multiplies cosines by is left out."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        return given
    if isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping):
        return {name: dict(given[name]) for name in ("main", "compress")}
    stretched = {name: own for name, own in given.items() if name not in ("main", "compress")}
    kind = stretched.get("rope_type", stretched.get("type", "default"))
    if kind == "yarn":
        stretched.setdefault("attention_factor", 1.0)
    theta, own = raw.get("rope_theta", 10_000.0), raw.get("compress_rope_theta", 160_000.0)
    return {
        "main": {"rope_type": "default", "rope_theta": theta},
        "compress": {**stretched, "rope_type": kind, "rope_theta": own},
    }


def _rotated(raw: Mapping[str, Any]) -> Any:
    """Numbers of a head that are rotated: those that are given, or a share."""
    share = raw.get("partial_rotary_factor")
    given = raw.get("rope_parameters")
    if isinstance(given, Mapping) and isinstance(given.get("main"), Mapping):
        share = given["main"].get("partial_rotary_factor", share)
    if share is None and "qk_rope_head_dim" in raw:
        return raw["qk_rope_head_dim"]
    share, width = _ROTATED if share is None else share, raw.get("head_dim", 512)
    return int(width * share) if is_number(width) and is_number(share) else share


def _by_token(raw: Mapping[str, Any], num_layers: int) -> list[Any]:
    """Whether layers' experts are given by token; what is no such word is told by its own."""
    kinds = raw.get("mlp_layer_types")
    if isinstance(kinds, list):
        known = {"hash_moe": True, "moe": False}
        return [known.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    count = raw.get("num_hash_layers", 3)
    return [i < count if isinstance(count, int) else count for i in range(num_layers)]


_LAYER: Final = "model.layers.{i}"
_ATTENTION: Final = f"{_LAYER}.attn"
_OWN: Final = "layers.{i}.recurrence"
_COMPRESSOR: Final = f"{_ATTENTION}.compressor"
_INDEXER: Final = f"{_ATTENTION}.indexer"

_TENSORS: Final = {
    "embedding": first_of("model.embed_tokens.weight", "model.embed.weight"),
    "head.norm": "model.norm.weight",
    "head.weight": first_of("lm_head.weight", "head.weight"),
    # Of what transformers saves norms of two kinds have one name.
    f"{_OWN}.kv_norm": first_of(f"{_ATTENTION}.kv_norm.weight", f"{_ATTENTION}.norm.weight"),
    f"{_OWN}.q_down": f"{_ATTENTION}.wq_a.weight",
    f"{_OWN}.q_down_norm": f"{_ATTENTION}.q_norm.weight",
    f"{_OWN}.q": f"{_ATTENTION}.wq_b.weight",
    f"{_OWN}.kv": f"{_ATTENTION}.wkv.weight",
    f"{_OWN}.sinks": f"{_ATTENTION}.attn_sink",
    f"{_OWN}.groups": f"{_ATTENTION}.wo_a.weight",
    f"{_OWN}.out": f"{_ATTENTION}.wo_b.weight",
    f"{_OWN}.sources": f"{_COMPRESSOR}.wkv.weight",
    f"{_OWN}.source_gates": f"{_COMPRESSOR}.wgate.weight",
    f"{_OWN}.source_bias": f"{_COMPRESSOR}.ape",
    f"{_OWN}.source_norm": f"{_COMPRESSOR}.norm.weight",
    f"{_OWN}.index_sources": f"{_INDEXER}.compressor.wkv.weight",
    f"{_OWN}.index_source_gates": f"{_INDEXER}.compressor.wgate.weight",
    f"{_OWN}.index_source_bias": f"{_INDEXER}.compressor.ape",
    f"{_OWN}.index_source_norm": f"{_INDEXER}.compressor.norm.weight",
    f"{_OWN}.index_weights": f"{_INDEXER}.weights_proj.weight",
    f"{_OWN}.index_q": f"{_INDEXER}.wq_b.weight",
    "layers.{i}.attention.norm": f"{_LAYER}.attn_norm.weight",
    "layers.{i}.mlp.norm": f"{_LAYER}.ffn_norm.weight",
    "layers.{i}.router.weight": f"{_LAYER}.ffn.gate.weight",
    "layers.{i}.router.corrections": f"{_LAYER}.ffn.gate.bias",
    "layers.{i}.router.table": f"{_LAYER}.ffn.gate.tid2eid",
    **{
        f"layers.{{i}}.{own}.{name}": f"{_LAYER}.ffn.{place}.{spelt}.weight"
        for own, place in (("shared", "shared_experts"), ("experts.{e}", "experts.{e}"))
        for name, spelt in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
    **stream_tensors(
        {
            "attention": (f"{_LAYER}.hc_attn_",),
            "mlp": (f"{_LAYER}.hc_ffn_",),
            "head": ("model.hc_head.hc_", "model.hc_head_"),
        }
    ),
}

DEEPSEEK_V4: Final = Family(
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4",),
    keys={
        **BASE_KEYS,
        "intermediate_size": read("moe_intermediate_size", 2048),
        "num_kv_heads": fixed(1),
        "head_dim": read("head_dim", 512),
        "max_positions": read("max_position_embeddings", 1_048_576),
        "attention_sinks": fixed(True),
        "rotary_width": read("rotary_width", 64),
        "rotary_pairs": fixed(True),
        "query_rank": read("q_lora_rank", 1024),
        "kept_window": read("sliding_window", 128),
        "kept_groups": read("o_groups", 8),
        "kept_rank": read("o_lora_rank", 1024),
        "index_chosen": read("index_topk", 512),
        "index_heads": read("index_n_heads", 64),
        "index_width": read("index_head_dim", 128),
        "num_experts": read("n_routed_experts", 256),
        "experts_per_token": read("num_experts_per_tok", 6),
        "expert_size": read("moe_intermediate_size", 2048),
        "route_scores": read("scoring_func", "sqrtsoftplus"),
        "route_scale": read("routed_scaling_factor", 1.5),
        "route_corrections": fixed(True),
        "shared_size": read("shared_size", 2048),
        "limits_first": fixed(True),
        "streams": read("hc_mult", 4),
        "stream_floor": read("hc_eps", 1e-6),
        "stream_rounds": read("hc_sinkhorn_iters", 20),
    },
    tensors=_TENSORS,
    demands={"hidden_act": "silu", "norm_topk_prob": True, "attention_bias": False},
    prepare=_spell_out,
)
