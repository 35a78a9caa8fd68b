"""One table per model family: how its config.json is spelled and how its checkpoint names tensors.

Plain data. A family differs from another in its table only: a new one is a new table, and no code
anywhere asks for a family by name. Logical tensor names are the same for all families
("layers.{i}.attention.q", "head.norm", ...); a family lists the ones it has.
"""

from __future__ import annotations

from typing import Final

from freight.model.families.afmoe import AFMOE
from freight.model.families.apertus import APERTUS
from freight.model.families.bamba import BAMBA
from freight.model.families.bloom import BLOOM, MPT
from freight.model.families.cohere import COHERE, COHERE2, COHERE2_MOE
from freight.model.families.deepseek import AXK1, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, YOUTU
from freight.model.families.deepseek_sparse import DEEPSEEK_V32, GLM_MOE_DSA
from freight.model.families.deepseek_v4 import DEEPSEEK_V4
from freight.model.families.ernie_moe import ERNIE45_MOE
from freight.model.families.exaone import EXAONE4, EXAONE_MOE
from freight.model.families.falcon import FALCON
from freight.model.families.falcon_h1 import FALCON_H1
from freight.model.families.flint import FLINT
from freight.model.families.gemma import GEMMA
from freight.model.families.gemma2 import GEMMA2, VAULT_GEMMA
from freight.model.families.gemma3 import GEMMA3
from freight.model.families.gemma4 import GEMMA4
from freight.model.families.glm import GLM, GLM4, GLM4V
from freight.model.families.glm5_next import GLM5_NEXT
from freight.model.families.glm_moe import DOTS1, GLM4_MOE, GLM4V_MOE, SOLAR_OPEN
from freight.model.families.gpt2 import GPT2, GPT_BIGCODE
from freight.model.families.gpt_neo import GPT_NEO
from freight.model.families.gpt_neox import GPT_NEOX
from freight.model.families.gpt_oss import GPT_OSS
from freight.model.families.gptj import CODEGEN, GPTJ
from freight.model.families.granite import (
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    HYPERCLOVAX,
)
from freight.model.families.granite_swash import GRANITE_MOE_SWASH, GRANITE_SWASH
from freight.model.families.hunyuan import HUNYUAN, HUNYUAN_3, HUNYUAN_MOE
from freight.model.families.hy4 import HY_V4
from freight.model.families.internlm import INTERNLM2, INTERNLM3
from freight.model.families.kimi import KIMI_LINEAR
from freight.model.families.kolibri import KOLIBRI1
from freight.model.families.laguna import LAGUNA
from freight.model.families.lfm2 import LFM2, LFM2_MOE, LFM3
from freight.model.families.ling import LING_3
from freight.model.families.llama import CWM, ERNIE45, HELIUM, IQUEST_CODER, LLAMA, SEED_OSS
from freight.model.families.llama4 import LLAMA4
from freight.model.families.mellum import MELLUM
from freight.model.families.mimo import MIMO_V2_FLASH
from freight.model.families.minicpm import MINICPM, MINICPM3
from freight.model.families.minimax import MINIMAX_M2, MINIMAX_M3, MINIMAX_M3_TEXT
from freight.model.families.mistral import MISTRAL, MIXTRAL
from freight.model.families.mistral4 import MISTRAL4
from freight.model.families.mistral_large4 import MISTRAL_LARGE4
from freight.model.families.nemotron import ARCEE, JAIS2, NEMOTRON
from freight.model.families.nemotron_h import NEMOTRON_H
from freight.model.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMOE
from freight.model.families.olmo_hybrid import OLMO_HYBRID
from freight.model.families.opt import BIOGPT, OPT
from freight.model.families.palm import PALM
from freight.model.families.parts import PARTS, reading_part
from freight.model.families.phi import PERSIMMON, PHI
from freight.model.families.phi3 import PHI3
from freight.model.families.phimoe import PHIMOE
from freight.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_VL_MOE
from freight.model.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from freight.model.families.smollm3 import SMOLLM3
from freight.model.families.starcoder2 import STABLELM, STARCODER2
from freight.model.families.step import STEP
from freight.model.families.table import (
    ACTIVATIONS,
    MOST_EXPERTS,
    MOST_LAYERS,
    Either,
    Family,
    Fused,
    Halves,
    Key,
    OneOf,
    Place,
    Stacked,
)

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "MOST_EXPERTS",
    "MOST_LAYERS",
    "PARTS",
    "Either",
    "Family",
    "Fused",
    "Halves",
    "Key",
    "OneOf",
    "Place",
    "Stacked",
    "reading_part",
]

FAMILIES: Final[dict[str, Family]] = {
    "llama": LLAMA,
    "llama4": LLAMA4,
    "mistral": MISTRAL,
    "mistral4": MISTRAL4,
    "mistral_large4": MISTRAL_LARGE4,
    "mixtral": MIXTRAL,
    "mimo_v2_flash": MIMO_V2_FLASH,
    "minimax_m2": MINIMAX_M2,
    "minimax_m3_vl": MINIMAX_M3,
    "minimax_m3_vl_text": MINIMAX_M3_TEXT,
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
    "gemma4": GEMMA4,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "flex_olmo": FLEX_OLMO,
    "olmo_hybrid": OLMO_HYBRID,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "glm": GLM,
    "glm4": GLM4,
    "glm4v_text": GLM4V,
    "glm4_moe": GLM4_MOE,
    "glm4v_moe_text": GLM4V_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "axk1": AXK1,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
    "deepseek_v4": DEEPSEEK_V4,
    "hy_v4": HY_V4,
    "glm5_next": GLM5_NEXT,
    "youtu": YOUTU,
    "minicpm": MINICPM,
    "minicpm3": MINICPM3,
    "kimi_linear": KIMI_LINEAR,
    "bailing_hybrid": LING_3,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "cohere2_moe": COHERE2_MOE,
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
    "granite_swa": GRANITE_SWASH,
    "granitemoe_swa": GRANITE_MOE_SWASH,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "lfm3": LFM3,
    "laguna": LAGUNA,
    "step3p5": STEP,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "hy_v3": HUNYUAN_3,
    "mellum": MELLUM,
    "flint": FLINT,
    "exaone_moe": EXAONE_MOE,
    "gemma": GEMMA,
    "gpt2": GPT2,
    "gpt_bigcode": GPT_BIGCODE,
    "gptj": GPTJ,
    "codegen": CODEGEN,
    "gpt_neo": GPT_NEO,
    "phi": PHI,
    "persimmon": PERSIMMON,
    "arcee": ARCEE,
    "nemotron": NEMOTRON,
    "jais2": JAIS2,
    "olmo": OLMO,
    "helium": HELIUM,
    "iquestcoder": IQUEST_CODER,
    "cwm": CWM,
    "internlm2": INTERNLM2,
    "internlm3": INTERNLM3,
    "hyperclovax": HYPERCLOVAX,
    "granitemoeshared": GRANITE_MOE_SHARED,
    "vaultgemma": VAULT_GEMMA,
    "biogpt": BIOGPT,
    "phimoe": PHIMOE,
    "bloom": BLOOM,
    "mpt": MPT,
    "apertus": APERTUS,
    "afmoe": AFMOE,
    "kolibri1": KOLIBRI1,
}
