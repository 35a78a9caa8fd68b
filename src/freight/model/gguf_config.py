"""A config.json out of what a GGUF file says of its model, for files that come alone.

For the architectures whose files say enough; what is left out there is what llama.cpp takes for
granted. Reads small tensors of rotary factors, no weights.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from freight.errors import ModelError
from freight.model.gguf import GgufFile
from freight.model.gguf_architectures import ARCHITECTURES
from freight.model.gguf_names import Architecture, Numbers

__all__ = ["config_of_gguf"]

# A number has the name that each family's configuration knows it by.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "context_length": ("max_position_embeddings",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "rope.freq_base": ("rope_theta",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
}
# Whether there is such a tensor says whether there are any.
_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_q.bias": ("attention_bias", "use_bias", "qkv_bias", "use_qkv_bias"),
    "attn_output.bias": ("attention_out_bias",),
    "ffn_up.bias": ("mlp_bias",),
    "attn_q_norm.weight": ("use_qk_norm",),
}
_NEEDED: Final = ("block_count", "embedding_length", "attention.head_count")
_ROPE_NUMBERS: Final = (
    "rope.dimension_count",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",
)
_ROPE_NAMES: Final = {
    "factor": "rope.scaling.factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}
_BY_LAYER: Final = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Those that may be a number for each layer, where an architecture spells it out."""
_COUNTS: Final = (
    "nextn_predict_layers",
    "full_attention_interval",
    "embedding_length_per_layer_input",
    "attention.shared_kv_layers",
    "attention.key_length_swa",
    "shortconv.l_cache",
    *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size")),
    "ssm.time_step_rank",
)
"""Numbers that architectures spell out."""
_LISTS: Final = {
    "attention.sliding_window_pattern": bool,
    "attention.recurrent_layers": bool,
    "swiglu_clamp_exp": float,
    "swiglu_clamp_shexp": float,
    **dict.fromkeys(_BY_LAYER, int),
}
"""What may be said of each layer."""
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEXTS_OF_ENDS: Final = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
    )
)
"""Tokens that end a turn, which files often do not name: llama.cpp knows them by their text."""
_NOT_AN_END: Final = "<|end|>"
_IF_THERE_ARE: Final = {"<|return|>", "<|call|>"}
"""Of gpt-oss, where it ends a message and not a turn."""
_MOST_FACTORS: Final = 65_536


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """What a config.json of the model would say. Raises ModelError for other models."""
    own = {
        key.removeprefix(f"{file.architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{file.architecture}.")
    }
    architecture = ARCHITECTURES.get(file.architecture)
    known = [name for name, other in ARCHITECTURES.items() if other.classes]
    if architecture is None or not architecture.classes:
        raise _refusal(file, f"It holds a model of architecture {file.architecture}", known)
    problem = next(_problems(own, architecture), "")
    if problem:
        raise _refusal(file, problem, known)
    return _spell_out(file, own, architecture)


def _refusal(file: GgufFile, problem: str, known: list[str]) -> ModelError:
    return ModelError(
        f"The file {file.path} was opened.",
        f"{problem}; alone, files of {', '.join(known)} can be run.",
        "Put the model's config.json beside it, or use its safetensors.",
    )


def _problems(own: Numbers, architecture: Architecture) -> Iterator[str]:
    for key in (*_NAMES, *_ROPE_NUMBERS):
        by_layer = key in _BY_LAYER and architecture.has_unlike_layers
        value = own.get(key, 0)
        if not (isinstance(value, int | float) and abs(value) < math.inf) and not by_layer:
            yield f"It does not say {key} as one number"
    if not _class_of(architecture, own):
        yield f"It does not say {' or '.join(architecture.classes)}"
    for key in (*_NEEDED, *_COUNTS):
        value = own.get(key, None if key in _NEEDED else 0)
        by_layer = key in _BY_LAYER and architecture.has_unlike_layers and value
        if not isinstance(value, int) and not (by_layer and isinstance(value, list)):
            yield f"It does not say {key} as one whole number"
    for key, kind in _LISTS.items():
        value = own.get(key)
        if isinstance(value, list) and not all(isinstance(item, kind) for item in value):
            yield f"It does not say {key} as a list of {kind.__name__}"
    for key, wanted in architecture.demands.items():
        if own.get(key, wanted) != wanted:
            yield f"It says {key} {own[key]}"
    if own.get("expert_count") and not architecture.may_have_experts:
        yield f"It holds a model of {own['expert_count']} experts"
    if own.get("attention.value_length") != own.get("attention.key_length"):
        yield "Its keys and values differ in length"


def _spell_out(file: GgufFile, own: Numbers, architecture: Architecture) -> dict[str, Any]:
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    most_heads = max(heads) if isinstance(heads, list) else heads
    raw: dict[str, Any] = {
        "norm_topk_prob": True,
        "sliding_window": None,
        "first_k_dense_replace": 0,
        **architecture.says,
    }
    for key, names in _NAMES.items():
        if own.get(key) is not None:
            raw |= dict.fromkeys(names, own[key])
    raw["sliding_window"] = raw["sliding_window"] or None
    for tensor, names in _FLAGS.items():
        raw |= dict.fromkeys(names, f"blk.0.{tensor}" in file.tensors)
    raw.setdefault("head_dim", hidden // max(most_heads, 1))
    table = file.tensors.get("token_embd.weight")
    if table is not None and len(table.shape) == 2:
        raw["vocab_size"] = table.shape[0]
    # Layers that guess tokens ahead lie behind the others.
    count = own["block_count"] - own.get("nextn_predict_layers", 0)
    windows = own.get("attention.sliding_window_pattern")
    if isinstance(windows, list):
        kinds = ["sliding_attention" if one else "full_attention" for one in windows]
        raw["layer_types"] = kinds[:count]
    return {
        **raw,
        "architectures": [_class_of(architecture, own)],
        "num_hidden_layers": count,
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(file) or None,
        "rope_scaling": _rope(file, own, raw["head_dim"], architecture.says_of_rope),
        **architecture.spells(file, own),
    }


def _ends(file: GgufFile) -> list[int]:
    named = [file.metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    known = {
        text: number
        for number, text in enumerate(tokens)
        if isinstance(text, str) and text in _TEXTS_OF_ENDS
    }
    if known.keys() >= _IF_THERE_ARE:
        known.pop(_NOT_AN_END, None)
    numbers = dict.fromkeys(number for number in named if isinstance(number, int))
    return [*(numbers | dict.fromkeys(known.values()))]


def _class_of(architecture: Architecture, own: Numbers) -> str:
    """An empty text where none is known."""
    found = [name for key, name in architecture.classes.items() if not key or own.get(key)]
    return found[-1] if found else ""


def _rope(file: GgufFile, own: Numbers, head_dim: int, said: Numbers) -> dict[str, Any]:
    """How positions are rotated: for some by factors of each frequency, which lie in tensors. Where
    it is said otherwise what is rotated is less than the file says, and factors go on behind."""
    found = _share(own.get("rope.dimension_count") or head_dim, head_dim)
    share = said.get("partial_rotary_factor", found)
    count = max(1, int(head_dim * share) // 2)
    length = own.get("rope.scaling.original_context_length")
    common, short = _factors(file, "rope_freqs"), _factors(file, "rope_factors_short")
    scaling: dict[str, Any]
    if common or short:
        # Llama 3's scaling is written as factors too, and needs no other by its length.
        scaling = {
            "type": "longrope",
            "short_factor": _first(short or common, count),
            "long_factor": _first(_factors(file, "rope_factors_long") or common, count),
            "attention_factor": own.get("rope.scaling.attn_factor", 1.0),
        }
        length = length or own.get("context_length")
    else:
        # A factor without a type, and one by an older name, are of the linear kind.
        factor = own.get("rope.scaling.factor", own.get("rope.scale_linear")) or 1.0
        kind = own.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
        scaling = {"type": "default" if kind == "none" else kind}
        if kind != "none":
            known = {name: own[key] for name, key in _ROPE_NAMES.items() if key in own}
            scaling |= {"factor": factor, **known}
    scaling |= {"original_max_position_embeddings": length} if length else {}
    return {**scaling, "partial_rotary_factor": share, **said}


def _share(width: float, head_dim: int) -> float:
    """Of a head, so that as many elements follow from it again."""
    share = width / max(head_dim, 1)
    return math.nextafter(share, 1.0) if int(head_dim * share) < width <= head_dim else share


def _first(factors: list[float], count: int) -> list[float]:
    """Without ones behind, for what is not rotated: more of others are wrong."""
    return factors[:count] if all(factor == 1 for factor in factors[count:]) else factors


def _factors(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(f"{name}.weight")
    if tensor is None or tensor.kind != "F32" or len(tensor.shape) != 1:
        return []
    end = tensor.offset + 4 * tensor.shape[0]
    if tensor.shape[0] > _MOST_FACTORS or end > file.sizes[tensor.path]:
        raise ModelError(
            f"The file {tensor.path} was opened.",
            f"It is cut short or damaged: {name}.weight, of {tensor.shape[0]} numbers, is not "
            "whole.",
            "Fetch the file again from where it was published.",
        )
    form = struct.Struct(f"<{tensor.shape[0]}f")
    with tensor.path.open("rb") as data:
        data.seek(tensor.offset)
        content = data.read(form.size)
    return list(form.unpack(content))
