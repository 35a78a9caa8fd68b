"""DeepSeek-V3.2 and GLM-5: V3, in which an indexer chooses so many keys for each query.

Rows of no more tokens than that attend all their keys, whatever it says, and its tensors are not
read. Some layers attend what one before them has chosen. Where an indexer does something else than
choose keys no rows may be longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import DEEPSEEK_V3
from freight.model.families.table import MOST_LAYERS, Family, fixed, read

__all__ = ["DEEPSEEK_V32", "GLM_MOE_DSA", "INDEX_TENSORS", "attend_all", "choose_keys"]


def attend_all(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rows end where the indexer would leave out keys; a count that is no number is refused."""
    stated = {name: value for name, value in raw.items() if value is not None}
    limits = [stated.get("index_topk", 2048), stated.get("max_position_embeddings", 163_840)]
    wrong = [limit for limit in limits if not isinstance(limit, int)]
    most = wrong[0] if wrong else min(limits)
    return DEEPSEEK_V3.prepare({"q_lora_rank": 1536, **raw, "max_position_embeddings": most})


_WIDE: Final = {
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
}


_SHARED: Final = ("shared", "S")


def _shared_layers(raw: Mapping[str, Any]) -> list[bool] | None:
    """Which layers attend what one before has chosen: as is listed, as letters say, or all but
    every so many."""
    num_layers = raw.get("num_hidden_layers")
    for listed in (raw.get("indexer_types"), raw.get("index_topk_pattern")):
        if isinstance(listed, list | str):
            own = [kind in _SHARED for kind in listed]
            return own[:num_layers] if isinstance(num_layers, int) else own
    every, offset = raw.get("index_topk_freq") or 1, raw.get("index_skip_topk_offset", 2)
    if not all(isinstance(count, int) for count in (num_layers, every, offset)):
        return None
    layers = range(min(num_layers or 0, MOST_LAYERS))
    return [max(layer - offset + 1, 0) % max(every, 1) > 0 for layer in layers]


def choose_keys(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rows of any length."""
    stated = {name: value for name, value in raw.items() if value is not None}
    own = {"index_topk": 2048, "max_position_embeddings": 163_840, "q_lora_rank": 1536}
    return DEEPSEEK_V3.prepare({**own, **stated, "index_shared": _shared_layers(raw)})


def _choose_of_wide_heads(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return choose_keys({**_WIDE, **raw})


_INDEXER: Final = "model.layers.{i}.self_attn.indexer"
INDEX_TENSORS: Final = {
    "layers.{i}.attention.index_q": f"{_INDEXER}.wq_b.weight",
    "layers.{i}.attention.index_k": f"{_INDEXER}.wk.weight",
    "layers.{i}.attention.index_k_norm": f"{_INDEXER}.k_norm.weight",
    "layers.{i}.attention.index_k_norm_bias": f"{_INDEXER}.k_norm.bias",
    "layers.{i}.attention.index_weights": f"{_INDEXER}.weights_proj.weight",
}
_TENSORS: Final = {**DEEPSEEK_V3.tensors, **INDEX_TENSORS}
DEEPSEEK_V32: Final = Family(
    architectures=("DeepseekV32ForCausalLM",),
    model_types=("deepseek_v32",),
    keys={
        **DEEPSEEK_V3.keys,
        "rotary_pairs": fixed(True),
        "index_chosen": read("index_topk", None),
        "index_heads": read("index_n_heads", 64),
        "index_width": read("index_head_dim", 128),
        "index_pairs": fixed(False),
    },
    tensors=_TENSORS,
    prepare=choose_keys,
)

GLM_MOE_DSA: Final = Family(
    architectures=("GlmMoeDsaForCausalLM",),
    model_types=("glm_moe_dsa",),
    keys={
        **DEEPSEEK_V32.keys,
        "index_heads": read("index_n_heads", 32),
        "index_pairs": read("indexer_rope_interleave", True),
        "norm_eps": read("rms_norm_eps", 1e-5),
        "expert_groups": read("n_group", 1),
        "groups_per_token": read("topk_group", 1),
    },
    tensors=_TENSORS,
    prepare=_choose_of_wide_heads,
)
