"""One table per model family: how its config.json is spelled and how its checkpoint names tensors.

Plain data. A family differs from another in its table only: a new one is a new table, and no code
anywhere asks for a family by name. Logical tensor names are the same for all families
("layers.{i}.attention.q", "head.norm", ...); a family lists the ones it has.
"""

from __future__ import annotations

from typing import Final

from freight.model.families.bamba import BAMBA
from freight.model.families.cohere import COHERE, COHERE2
from freight.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from freight.model.families.ernie_moe import ERNIE45_MOE
from freight.model.families.exaone import EXAONE4, EXAONE_MOE
from freight.model.families.falcon import FALCON
from freight.model.families.falcon_h1 import FALCON_H1
from freight.model.families.gemma2 import GEMMA2
from freight.model.families.gemma3 import GEMMA3
from freight.model.families.glm import GLM, GLM4
from freight.model.families.glm_moe import DOTS1, GLM4_MOE, SOLAR_OPEN
from freight.model.families.gpt_neox import GPT_NEOX
from freight.model.families.gpt_oss import GPT_OSS
from freight.model.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from freight.model.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from freight.model.families.lfm2 import LFM2, LFM2_MOE
from freight.model.families.llama import ERNIE45, LLAMA, SEED_OSS
from freight.model.families.llama4 import LLAMA4
from freight.model.families.minimax import MINIMAX_M2
from freight.model.families.mistral import MISTRAL, MIXTRAL
from freight.model.families.nemotron import NEMOTRON_H
from freight.model.families.olmo import OLMO2, OLMO3, OLMOE
from freight.model.families.opt import OPT
from freight.model.families.palm import PALM
from freight.model.families.phi3 import PHI3
from freight.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_VL_MOE
from freight.model.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from freight.model.families.smollm3 import SMOLLM3
from freight.model.families.starcoder2 import STABLELM, STARCODER2
from freight.model.families.table import (
    ACTIVATIONS,
    MOST_LAYERS,
    Either,
    Family,
    Fused,
    Key,
    Place,
    Stacked,
)

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "MOST_LAYERS",
    "Either",
    "Family",
    "Fused",
    "Key",
    "Place",
    "Stacked",
]

FAMILIES: Final[dict[str, Family]] = {
    "llama": LLAMA,
    "llama4": LLAMA4,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "minimax_m2": MINIMAX_M2,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "gpt_oss": GPT_OSS,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "glm": GLM,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "starcoder2": STARCODER2,
    "stablelm": STABLELM,
    "exaone4": EXAONE4,
    "seed_oss": SEED_OSS,
    "ernie4_5": ERNIE45,
    "opt": OPT,
    "gpt_neox": GPT_NEOX,
    "falcon": FALCON,
    "palm": PALM,
    "solar_open": SOLAR_OPEN,
    "dots1": DOTS1,
    "ernie4_5_moe": ERNIE45_MOE,
    "granitemoe": GRANITE_MOE,
    "granitemoehybrid": GRANITE_HYBRID,
    "bamba": BAMBA,
    "falcon_h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "exaone_moe": EXAONE_MOE,
}
