"""One table per model family: how its config.json is spelled and how its checkpoint names tensors.

Plain data. A family differs from another in its table only: a new one is a new table, and no code
anywhere asks for a family by name. Logical tensor names are the same for all families
("layers.{i}.attention.q", "head.norm", ...); a family lists the ones it has.
"""

from __future__ import annotations

from typing import Final

from freight.model.families.falcon import FALCON
from freight.model.families.gemma2 import GEMMA2
from freight.model.families.gpt_neox import GPT_NEOX
from freight.model.families.llama import LLAMA
from freight.model.families.mistral import MISTRAL, MIXTRAL
from freight.model.families.opt import OPT
from freight.model.families.palm import PALM
from freight.model.families.phi3 import PHI3
from freight.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from freight.model.families.table import (
    ACTIVATIONS,
    Either,
    Family,
    Fused,
    Key,
    Place,
    Stacked,
)

__all__ = ["ACTIVATIONS", "FAMILIES", "Either", "Family", "Fused", "Key", "Place", "Stacked"]

FAMILIES: Final[dict[str, Family]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "opt": OPT,
    "gpt_neox": GPT_NEOX,
    "falcon": FALCON,
    "palm": PALM,
}
