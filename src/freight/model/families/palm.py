"""PaLM: attention and a gated MLP side by side over one norm without a bias, one key/value head.

Its weights were never published: the table serves plans and random weights, and its tensors have
Llama's names.
"""

from __future__ import annotations

from typing import Final

from freight.model.families.llama import LLAMA_TENSORS
from freight.model.families.table import BASE_KEYS, Family, fixed, read

__all__ = ["PALM"]

PALM: Final = Family(
    architectures=(),
    model_types=("palm",),
    keys={
        **BASE_KEYS,
        "num_kv_heads": read("num_key_value_heads", 1),
        "norm": fixed("layer"),
        "norm_eps": read("layer_norm_eps", 1e-5),
        "parallel": read("parallel", True),
        "shared_norm": read("parallel", True),
        "tied_embeddings": read("tie_word_embeddings", True),
    },
    tensors={name: own for name, own in LLAMA_TENSORS.items() if not name.endswith("_bias")},
)
