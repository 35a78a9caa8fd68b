"""Numbers of GGUF files that a config.json gives otherwise, or by layer, for some of llama.cpp's
architectures.

Plain functions of what a file says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from freight.model.families import MOST_LAYERS
from freight.model.gguf import GgufFile
from freight.model.gguf_names import Numbers

__all__ = [
    "columns",
    "gemma2",
    "gemma3",
    "gemma4",
    "minicpm",
    "perhaps_unrotated",
    "scans",
    "states",
    "step",
]

_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62


def gemma2(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    return {"query_pre_attn_scalar": _scalar(own, _GEMMA2_27B_LAYERS)}


def gemma3(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    return {"query_pre_attn_scalar": _scalar(own, _GEMMA3_27B_LAYERS)}


def _scalar(own: Numbers, layers_of_largest: int) -> int:
    """What scores are divided by the root of: llama.cpp knows the largest by its layers."""
    width: int = own["embedding_length"] // max(own["attention.head_count"], 1)
    is_largest = own["block_count"] == layers_of_largest
    return width if is_largest else own.get("attention.key_length", width)


def gemma4(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Layers that see all have heads of their own, and may have no values beside their keys; the
    last layers may attend the keys of others, and have MLPs twice as wide."""
    windows = own.get("attention.sliding_window_pattern")
    windows = windows if isinstance(windows, list) else []
    shared = own.get("attention.shared_kv_layers", 0)
    first = max(0, len(windows) - shared)
    last = max((layer for layer in range(first) if not windows[layer]), default=0)
    table = file.tensors.get("per_layer_token_embd.weight")
    widths = own.get("feed_forward_length")
    widths = widths if isinstance(widths, list) else []
    doubled = [widths[0] * (1 + (layer >= first)) for layer in range(len(widths))]
    doubles = bool(widths) and widths == doubled
    counts = own.get("attention.head_count_kv")
    counts = counts if isinstance(counts, list) else [counts] * len(windows)
    of_kind = dict(zip(windows, counts, strict=False))
    return {
        "head_dim": own.get("attention.key_length_swa"),
        "global_head_dim": own.get("attention.key_length"),
        "num_key_value_heads": of_kind.get(True),
        "num_global_key_value_heads": of_kind.get(False),
        "attention_k_eq_v": f"blk.{last}.attn_v.weight" not in file.tensors,
        "enable_moe_block": bool(own.get("expert_count")),
        "top_k_experts": own.get("expert_used_count"),
        "hidden_size_per_layer_input": own.get("embedding_length_per_layer_input", 0),
        **({"vocab_size_per_layer_input": table.shape[0]} if table is not None else {}),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": doubles,
        **({"intermediate_size": widths[0]} if doubles else {}),
        # The frequencies of the file are those of this rotation.
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": own.get("rope.freq_base_swa"),
            },
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": own.get("rope.freq_base"),
            },
        },
    }


def perhaps_unrotated(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """A flag of another name says whether positions are rotated."""
    rotates = own.get("rope.scaling.finetuned", True)
    return {} if rotates else {"rope_layers": [False] * min(own["block_count"], MOST_LAYERS)}


def minicpm(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Factors as they are; older files leave out those that all models had."""
    updates, logits = own.get("residual_scale"), own.get("logit_scale")
    return {
        "scale_emb": own.get("embedding_scale", 12.0),
        "scale_depth": updates * math.sqrt(own["block_count"]) if updates else 1.4,
        "dim_model_base": own["embedding_length"] / logits if logits else 256,
    }


def states(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Layers are listed, or one in so many attends; values of all heads are counted together."""
    heads = own.get("ssm.time_step_rank") or 1
    listed = own.get("attention.recurrent_layers")
    listed = listed if isinstance(listed, list) else []
    count = own["block_count"] - own.get("nextn_predict_layers", 0)
    kinds = ["linear_attention" if one else "full_attention" for one in listed]
    return {
        **({"layer_types": kinds[:count]} if listed else {}),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": own.get("ssm.inner_size", 0) // heads,
        "linear_num_key_heads": own.get("ssm.group_count"),
        "linear_key_head_dim": own.get("ssm.state_size"),
        "linear_conv_kernel_dim": own.get("ssm.conv_kernel"),
        "full_attention_interval": own.get("full_attention_interval"),
    }


def columns(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Layers without heads of keys keep columns instead. Widths are the final ones."""
    heads = own.get("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else []
    return {
        "num_key_value_heads": max(heads, default=None),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": own.get("shortconv.l_cache"),
        "norm_eps": own.get("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": own.get("leading_dense_block_count", 0),
    }


def scans(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Layers without heads of keys keep a state. A flag of another name says whether the others
    rotate."""
    counts = own.get("attention.head_count_kv")
    counts = counts if isinstance(counts, list) else []
    heads, inner = own.get("ssm.time_step_rank") or 1, own.get("ssm.inner_size", 0)
    biased = any(name.endswith("ssm_conv1d.bias") for name in file.tensors)
    return {
        "num_key_value_heads": max(counts, default=None) or own["attention.head_count"],
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "num_local_experts": own.get("expert_count", 0),
        "position_embedding_type": "rope" if own.get("rope.scaling.finetuned", True) else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // max(own["embedding_length"], 1),
        "mamba_n_groups": own.get("ssm.group_count"),
        "mamba_d_state": own.get("ssm.state_size"),
        "mamba_d_conv": own.get("ssm.conv_kernel"),
        "mamba_conv_bias": biased,
    }


def step(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Heads, windows and limits by layer, which may go on for layers that guess. What layers with a
    window rotate is all of a head, and half of it elsewhere, whatever the file says."""
    count = min(own["block_count"] - own.get("nextn_predict_layers", 0), MOST_LAYERS)
    windows = own.get("attention.sliding_window_pattern")
    if windows is not None and not isinstance(windows, list):
        return {"layer_types": windows}  # to be refused
    windows = [False] * count if windows is None else windows[:count]
    heads, keys = (
        dict.fromkeys((False, True))
        | dict(zip(windows, _by_layer(own, f"attention.{name}", count), strict=False))
        for name in ("head_count", "head_count_kv")
    )
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(count)]
    base = own.get("rope.freq_base", 10_000.0)
    thetas = {False: base, True: own.get("rope.freq_base_swa", base)}
    limits = {
        f"swiglu_limits{ours}": _by_layer(own, f"swiglu_clamp_{theirs}", count)
        for ours, theirs in (("", "exp"), ("_shared", "shexp"))
    }
    return {
        "num_attention_heads": heads[False] or heads[True],
        "num_sliding_attention_heads": heads[True],
        "num_key_value_heads": keys[False] or keys[True],
        "attention_other_setting": {"num_attention_groups": keys[True]} if keys[True] else None,
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
        "rope_theta": [thetas[one] for one in windows],
        "partial_rotary_factors": [1.0 if one else 0.5 for one in windows],
        "share_expert_dim": own.get("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": own.get("expert_weights_scale"),
        "norm_expert_weight": bool(own.get("expert_weights_norm", False)),
        **limits,
    }


def _by_layer(own: Numbers, name: str, count: int) -> list[Any]:
    """A list that is too short says nothing of any, so that it is refused."""
    value = own.get(name)
    if isinstance(value, list):
        return value[:count] if len(value) >= count else [value]
    return [value] * count
