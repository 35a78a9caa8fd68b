"""DeepSeek-V3.2 and GLM-5: V3, in which an indexer chooses so many keys for each query.

Rows of no more tokens than that attend all their keys, whatever it says: so long may rows be, and
its tensors are not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import DEEPSEEK_V3
from freight.model.families.table import Family, fixed, read

__all__ = ["DEEPSEEK_V32", "GLM_MOE_DSA", "attend_all"]


def attend_all(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rows end where the indexer would leave out keys; a count that is no number is refused."""
    stated = {name: value for name, value in raw.items() if value is not None}
    limits = [stated.get("index_topk", 2048), stated.get("max_position_embeddings", 163_840)]
    wrong = [limit for limit in limits if not isinstance(limit, int)]
    most = wrong[0] if wrong else min(limits)
    return DEEPSEEK_V3.prepare({"q_lora_rank": 1536, **raw, "max_position_embeddings": most})


def _attend_all_of_wide_heads(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}
    return attend_all({**own, "max_position_embeddings": 202_752, **raw})


DEEPSEEK_V32: Final = Family(
    architectures=("DeepseekV32ForCausalLM",),
    model_types=("deepseek_v32",),
    keys={**DEEPSEEK_V3.keys, "rotary_pairs": fixed(True)},
    tensors=DEEPSEEK_V3.tensors,
    prepare=attend_all,
)

GLM_MOE_DSA: Final = Family(
    architectures=("GlmMoeDsaForCausalLM",),
    model_types=("glm_moe_dsa",),
    keys={
        **DEEPSEEK_V32.keys,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "expert_groups": read("n_group", 1),
        "groups_per_token": read("topk_group", 1),
    },
    tensors=DEEPSEEK_V3.tensors,
    prepare=_attend_all_of_wide_heads,
)
