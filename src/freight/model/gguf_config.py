"""A config.json out of what a GGUF file says of its model, for files that come alone.

For the architectures that are run; what is left out there is what llama.cpp takes for granted.
Reads small tensors of rotary factors, no weights.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from freight.errors import ModelError
from freight.model.gguf import GgufFile

__all__ = ["config_of_gguf"]

_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
_CLASSES_WITH_EXPERTS: Final = {
    "llama": "MixtralForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""Of files that say how many experts there are."""
_KEYS: Final = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_GEMMA2_27B_LAYERS: Final = 46
_ROPE_NUMBERS: Final = (
    "rope.dimension_count",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
)
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """What a config.json of the model would say. Raises ModelError for other models."""
    architecture = file.architecture
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    problem = _problem(architecture, own)
    if problem:
        raise ModelError(
            f"The file {file.path} was opened.",
            f"{problem}; alone, files of {', '.join(_CLASSES)} can be run.",
            "Put the model's config.json beside it, or use its safetensors.",
        )
    raw = {name: own[key] for name, key in _KEYS.items() if own.get(key) is not None}
    table = file.tensors.get("token_embd.weight")
    if table is not None:
        raw["vocab_size"] = table.shape[0]
    raw["sliding_window"] = own.get("attention.sliding_window") or None
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    raw.setdefault("head_dim", hidden // max(heads, 1))
    classes = _CLASSES_WITH_EXPERTS if own.get("expert_count") else _CLASSES
    ends = {file.metadata.get(f"tokenizer.ggml.{name}"): None for name in _ENDS}
    return {
        **raw,
        "architectures": [classes[architecture]],
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "norm_topk_prob": True,
        "num_local_experts": own.get("expert_count"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [number for number in ends if number is not None] or None,
        # Not said in the file: llama.cpp knows it by the number of layers.
        "query_pre_attn_scalar": hidden // max(heads, 1)
        if own["block_count"] == _GEMMA2_27B_LAYERS
        else raw["head_dim"],
        **_rope(file, own, raw["head_dim"]),
    }


def _problem(architecture: str, own: Mapping[str, Any]) -> str:
    if architecture not in _CLASSES:
        return f"It holds a model of architecture {architecture}"
    for key in (*_KEYS.values(), *_ROPE_NUMBERS):
        if not isinstance(own.get(key, 0), int | float):
            return f"It does not say {key} as one number"
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if not isinstance(own.get(key), int):
            return f"It does not say {key} as one whole number"
    if own.get("expert_count") and architecture not in _CLASSES_WITH_EXPERTS:
        return f"It holds a model of {own['expert_count']} experts"
    if own.get("attention.value_length") != own.get("attention.key_length"):
        return "Its keys and values differ in length"
    return ""


def _rope(file: GgufFile, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """How positions are rotated: for some by factors of each frequency, which lie in tensors."""
    share = (own.get("rope.dimension_count") or head_dim) / max(head_dim, 1)
    length = own.get("rope.scaling.original_context_length")
    common, short = _factors(file, "rope_freqs"), _factors(file, "rope_factors_short")
    if common or short:
        # Llama 3's scaling is written as factors too, and needs no other by its length.
        scaling = {
            "type": "longrope",
            "short_factor": short or common,
            "long_factor": _factors(file, "rope_factors_long") or common,
            "attention_factor": own.get("rope.scaling.attn_factor", 1.0),
        }
        length = length or own.get("context_length")
    else:
        kind = own.get("rope.scaling.type", "none")
        scaling = {"type": "default" if kind == "none" else kind}
        if kind != "none":
            scaling["factor"] = own.get("rope.scaling.factor")
    scaling |= {"original_max_position_embeddings": length} if length else {}
    return {"rope_scaling": {**scaling, "partial_rotary_factor": share}}


def _factors(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(f"{name}.weight")
    if tensor is None or tensor.kind != "F32" or len(tensor.shape) != 1:
        return []
    form = struct.Struct(f"<{tensor.shape[0]}f")
    with file.path.open("rb") as data:
        data.seek(tensor.offset)
        content = data.read(form.size)
    if len(content) < form.size:
        raise ModelError(
            f"The file {file.path} was opened.",
            f"It is cut short: {name}.weight is not whole.",
            "Fetch the file again from where it was published.",
        )
    return list(form.unpack(content))
