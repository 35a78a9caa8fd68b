"""Models that also see or hear whose decoder is a model of its own, with a configuration that says
of which family: where it is in that of the whole. Rows are text here, of which no other part reads.

Each has been held against the whole model, but InternVL's by its makers, of which transformers has
another kind. Some that are not here read a prompt from both sides, or have layers that pictures
alone reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import text_part

__all__ = ["PARTS", "reading_part"]

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "AyaVisionForConditionalGeneration",
            "Cohere2VisionForConditionalGeneration",
            "DeepseekVLForConditionalGeneration",
            "Glm46VForConditionalGeneration",
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
            "Idefics2ForConditionalGeneration",
            "Idefics3ForConditionalGeneration",
            "InternVLForConditionalGeneration",
            "Lfm2VlForConditionalGeneration",
            "Lfm3VlForConditionalGeneration",
            "LlavaForConditionalGeneration",
            "LlavaNextForConditionalGeneration",
            "LlavaOnevisionForConditionalGeneration",
            "MiniCPMV4_6ForConditionalGeneration",
            "MiniCPMV4_7ForConditionalGeneration",
            "Ovis2ForConditionalGeneration",
            "SmolVLMForConditionalGeneration",
            "VideoLlama3ForConditionalGeneration",
            "VipLlavaForConditionalGeneration",
        ),
        ("text_config",),
    ),
    "InternVLChatModel": ("llm_config",),
    "Qwen2_5OmniForConditionalGeneration": ("thinker_config", "text_config"),
    "Qwen2_5OmniModel": ("thinker_config", "text_config"),
    "Qwen3OmniMoeForConditionalGeneration": ("thinker_config", "text_config"),
}
"""By architecture, the keys that lead to the decoder's configuration."""

_SIZES: Final = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LEFT_OUT: Final[Mapping[str, Mapping[str, int]]] = {
    "llama": {**_SIZES, "intermediate_size": 11_008, "vocab_size": 32_000},
    "mistral": {
        **_SIZES,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
    },
    "qwen2": {
        **_SIZES,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "vocab_size": 151_936,
    },
    "cohere2": {
        "hidden_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "intermediate_size": 22_528,
        "vocab_size": 256_000,
    },
}
"""What transformers does not write of a part, by the part's model_type: the defaults of its class.
Those of a model that is no part are always there."""


def reading_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the decoder, with what the whole says of all its parts; what is given
    where it is none of these, or has no such part."""
    names = raw.get("architectures")
    own = names if isinstance(names, list) else []
    path = next((PARTS[name] for name in own if isinstance(name, str) and name in PARTS), None)
    whole = raw
    for key in path or ():
        part = whole.get(key)
        if not isinstance(part, Mapping):
            return raw
        is_which = {name: part.get(name) for name in ("architectures", "model_type")}
        part = {**_LEFT_OUT.get(str(is_which["model_type"]), {}), **part}
        ties = whole.get("tie_word_embeddings"), part.get("tie_word_embeddings")
        whole = {**text_part({**whole, "text_config": part}), **is_which}
        if True in ties:  # either may say it; whether it is so the checkpoint shows
            whole = {**whole, "tie_word_embeddings": True}
    return whole
