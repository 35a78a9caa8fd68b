"""llama.cpp's architectures of which files are read: the families that each serves, where it has
their tensors, what its converter changes, and what it takes for granted that a config.json would
say.

Plain data, but for what a file's own numbers are spelled out to. A new architecture is an entry.
What converters change is as in llama.cpp's ``conversion``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from freight.model.families import Either, Fused, Halves
from freight.model.gguf import GgufFile
from freight.model.gguf_names import (
    COMMON_NORM,
    FUSED_EXPERTS,
    GATE_UP,
    LATE_NAMES,
    NORMS_BEHIND,
    QKV,
    SHARED,
    TENSORS,
    WOVEN,
    Architecture,
    Numbers,
    with_places,
)

__all__ = ["ARCHITECTURES", "Architecture", "Numbers"]

_LATENTS: Final = Architecture(
    families=("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
    tensors=with_places(
        attention_q=Either(
            switch="has_query_rank",
            then="blk.{i}.attn_q_b.weight",
            otherwise="blk.{i}.attn_q.weight",
        ),
        attention_q_down="blk.{i}.attn_q_a.weight",
        attention_q_down_bias="blk.{i}.attn_q_a.bias",
        attention_q_down_norm="blk.{i}.attn_q_a_norm.weight",
        attention_kv_down="blk.{i}.attn_kv_a_mqa.weight",
        attention_kv_down_bias="blk.{i}.attn_kv_a_mqa.bias",
        attention_kv_norm="blk.{i}.attn_kv_a_norm.weight",
        attention_kv_up=Halves(
            turned="blk.{i}.attn_k_b.weight",
            rest="blk.{i}.attn_v_b.weight",
            whole="blk.{i}.attn_kv_b.weight",
        ),
    ),
)
_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62


def _gemma2(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    return {"query_pre_attn_scalar": _scalar(own, _GEMMA2_27B_LAYERS)}


def _gemma3(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    return {"query_pre_attn_scalar": _scalar(own, _GEMMA3_27B_LAYERS)}


def _scalar(own: Numbers, layers_of_largest: int) -> int:
    """What scores are divided by the root of: llama.cpp knows the largest by its layers."""
    width: int = own["embedding_length"] // max(own["attention.head_count"], 1)
    is_largest = own["block_count"] == layers_of_largest
    return width if is_largest else own.get("attention.key_length", width)


def _gemma4(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Layers that see all have heads of their own, and may have no values beside their keys."""
    windows = own.get("attention.sliding_window_pattern")
    windows = windows if isinstance(windows, list) else []
    last = max(len(windows) - 1, 0)
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
        "num_kv_shared_layers": own.get("attention.shared_kv_layers", 0),
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


def _states(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    """Of the layers each so manieth attends; the values of all heads are counted together."""
    heads = own.get("ssm.time_step_rank") or 1
    return {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": own.get("ssm.inner_size", 0) // heads,
        "linear_num_key_heads": own.get("ssm.group_count"),
        "linear_key_head_dim": own.get("ssm.state_size"),
        "linear_conv_kernel_dim": own.get("ssm.conv_kernel"),
        "full_attention_interval": own.get("full_attention_interval"),
    }


_WITH_STATES: Final = Architecture(
    families=("qwen3_5",),
    tensors=LATE_NAMES,
    plus_one=True,
    plain_norms=("recurrence.read_norm",),
    negated=("recurrence.decay",),
    deals_heads=True,
    classes={"": "Qwen3_5ForCausalLM"},
    spells=_states,
)


def _columns(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
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


def _scans(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
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


_SCANNED: Final = Fused(
    tensor="blk.{i}.ssm_in.weight",
    of=("recurrence.gate", "recurrence.mixed", "recurrence.a"),
)
_WITH_SCANS: Final = Architecture(
    families=("granitemoehybrid", "bamba"),
    tensors=with_places(recurrence_gate=_SCANNED, recurrence_mixed=_SCANNED, recurrence_a=_SCANNED),
    woven=WOVEN,
    negated=("recurrence.decay",),
    classes={"attention.scale": "GraniteMoeHybridForCausalLM"},
    spells=_scans,
    may_have_experts=True,
    has_unlike_layers=True,
)
_NEMOTRON_H: Final = replace(
    _WITH_SCANS,
    families=("nemotron_h",),
    classes={},
    tensors={
        **_WITH_SCANS.tensors,
        "layers.{i}.mlp.norm": "blk.{i}.attn_norm.weight",
        "layers.{i}.narrow": "blk.{i}.ffn_latent_down.weight",
        "layers.{i}.widen": "blk.{i}.ffn_latent_up.weight",
    },
    woven=(),
)
_CONVOLVED: Final = Fused(
    tensor="blk.{i}.shortconv.in_proj.weight",
    of=("recurrence.gate", "recurrence.outer", "recurrence.mixed"),
)
_WITH_COLUMNS: Final = Architecture(
    families=("lfm2",),
    tensors={
        **with_places(
            recurrence_gate=_CONVOLVED,
            recurrence_outer=_CONVOLVED,
            recurrence_mixed=_CONVOLVED,
            recurrence_convolution="blk.{i}.shortconv.conv.weight",
            recurrence_out="blk.{i}.shortconv.out_proj.weight",
        ),
        "head.norm": "token_embd_norm.weight",
    },
    classes={"": "Lfm2ForCausalLM"},
    spells=_columns,
    has_unlike_layers=True,
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        families=("llama", "mistral", "mixtral", "internlm3", "iquestcoder"),
        tensors=TENSORS,
        woven=WOVEN,
        classes={"": "LlamaForCausalLM", "expert_count": "MixtralForCausalLM"},
        may_have_experts=True,
    ),
    "qwen2": Architecture(families=("qwen2",), tensors=TENSORS, classes={"": "Qwen2ForCausalLM"}),
    "qwen2moe": Architecture(
        families=("qwen2_moe",),
        tensors=TENSORS,
        classes={"": "Qwen2MoeForCausalLM"},
        says={"norm_topk_prob": False},
        may_have_experts=True,
    ),
    "qwen3": Architecture(families=("qwen3",), tensors=TENSORS, classes={"": "Qwen3ForCausalLM"}),
    "qwen3moe": Architecture(
        families=("qwen3_moe",),
        tensors=TENSORS,
        classes={"": "Qwen3MoeForCausalLM"},
        may_have_experts=True,
    ),
    "qwen35": _WITH_STATES,
    "qwen35moe": replace(
        _WITH_STATES,
        families=("qwen3_5_moe",),
        classes={"": "Qwen3_5MoeForCausalLM"},
        may_have_experts=True,
    ),
    "granitehybrid": _WITH_SCANS,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": _WITH_COLUMNS,
    "lfm2moe": replace(
        _WITH_COLUMNS,
        families=("lfm2_moe",),
        classes={"": "Lfm2MoeForCausalLM"},
        may_have_experts=True,
    ),
    "phi3": Architecture(
        families=("phi3",),
        tensors=with_places(
            attention_q=QKV,
            attention_k=QKV,
            attention_v=QKV,
            mlp_gate=GATE_UP,
            mlp_up=GATE_UP,
        ),
        classes={"": "Phi3ForCausalLM"},
    ),
    "gemma": Architecture(
        families=("gemma",), tensors=TENSORS, plus_one=True, classes={"": "GemmaForCausalLM"}
    ),
    "gemma2": Architecture(
        families=("gemma2",),
        tensors=TENSORS,
        plus_one=True,
        classes={"": "Gemma2ForCausalLM"},
        spells=_gemma2,
    ),
    "gemma3": Architecture(
        families=("gemma3",),
        tensors=TENSORS,
        plus_one=True,
        classes={"": "Gemma3ForCausalLM"},
        spells=_gemma3,
    ),
    "gemma4": Architecture(
        families=("gemma4",),
        tensors=with_places(
            mlp_own_norm="blk.{i}.post_ffw_norm_1.weight",
            router_norm="blk.{i}.ffn_gate_inp.scale",
            router_gains="blk.{i}.ffn_down_exps.scale",
            experts_norm="blk.{i}.pre_ffw_norm_2.weight",
            experts_post_norm="blk.{i}.post_ffw_norm_2.weight",
            scale="blk.{i}.layer_output_scale.weight",
        )
        | FUSED_EXPERTS,
        classes={"": "Gemma4ForCausalLM"},
        spells=_gemma4,
        may_have_experts=True,
        has_unlike_layers=True,
    ),
    "gpt-oss": Architecture(
        families=("gpt_oss",),
        tensors=LATE_NAMES,
        classes={"": "GptOssForCausalLM"},
        says_of_rope={"truncate": False},
        may_have_experts=True,
    ),
    "granite": Architecture(
        families=("granite",),
        tensors=TENSORS,
        woven=WOVEN,
        classes={"": "GraniteForCausalLM"},
    ),
    "granitemoe": Architecture(
        families=("granitemoe", "granitemoeshared"),
        tensors=TENSORS,
        woven=WOVEN,
        classes={
            "": "GraniteMoeForCausalLM",
            "expert_shared_feed_forward_length": "GraniteMoeSharedForCausalLM",
        },
        may_have_experts=True,
    ),
    "granite_swa": Architecture(
        families=("granite_swa", "granitemoe_swa"),
        tensors=with_places(shared_gate=SHARED, shared_up=SHARED) | FUSED_EXPERTS,
        woven=WOVEN,
    ),
    "smollm3": Architecture(
        families=("smollm3",),
        tensors=TENSORS,
        woven=WOVEN,
        classes={"": "SmolLM3ForCausalLM"},
    ),
    "glm4": Architecture(
        families=("glm4",),
        tensors=with_places(mlp_gate=GATE_UP, mlp_up=GATE_UP),
        classes={"": "Glm4ForCausalLM"},
    ),
    "glm4moe": Architecture(
        families=("glm4_moe", "solar_open"),
        tensors=LATE_NAMES,
        classes={"": "Glm4MoeForCausalLM"},
        may_have_experts=True,
    ),
    "dots1": Architecture(
        families=("dots1",),
        tensors=TENSORS,
        classes={"": "Dots1ForCausalLM"},
        may_have_experts=True,
    ),
    "olmo": Architecture(
        families=("olmo",), tensors=TENSORS, woven=WOVEN[:2], classes={"": "OlmoForCausalLM"}
    ),
    "olmo2": Architecture(
        families=("olmo2", "olmo3"),
        tensors=NORMS_BEHIND,
        classes={"": "Olmo2ForCausalLM", "attention.sliding_window": "Olmo3ForCausalLM"},
    ),
    "olmoe": Architecture(
        families=("olmoe",),
        tensors=TENSORS,
        classes={"": "OlmoeForCausalLM"},
        says={"norm_topk_prob": False},
        may_have_experts=True,
    ),
    "command-r": Architecture(
        families=("cohere",), tensors=COMMON_NORM, classes={"": "CohereForCausalLM"}
    ),
    "cohere2": Architecture(
        families=("cohere2",), tensors=COMMON_NORM, classes={"": "Cohere2ForCausalLM"}
    ),
    "cohere2moe": Architecture(families=("cohere2_moe",), tensors=COMMON_NORM),
    "seed_oss": Architecture(
        families=("seed_oss",), tensors=LATE_NAMES, classes={"": "SeedOssForCausalLM"}
    ),
    "ernie4_5": Architecture(
        families=("ernie4_5",), tensors=TENSORS, classes={"": "Ernie4_5ForCausalLM"}
    ),
    "ernie4_5-moe": Architecture(
        families=("ernie4_5_moe",),
        tensors=TENSORS,
        classes={"": "Ernie4_5_MoeForCausalLM"},
        may_have_experts=True,
    ),
    "exaone4": Architecture(
        families=("exaone4",), tensors=NORMS_BEHIND, classes={"": "Exaone4ForCausalLM"}
    ),
    "exaone-moe": Architecture(
        families=("exaone_moe",),
        tensors=TENSORS,
        classes={"": "ExaoneMoeForCausalLM"},
        may_have_experts=True,
    ),
    "hunyuan-dense": Architecture(
        families=("hunyuan_v1_dense",),
        tensors=TENSORS,
        classes={"": "HunYuanDenseV1ForCausalLM"},
    ),
    "hy_v3": Architecture(families=("hy_v3",), tensors=TENSORS),
    "deepseek2": _LATENTS,
    "deepseek32": replace(_LATENTS, families=("deepseek_v32",)),
    "glm-dsa": replace(_LATENTS, families=("glm_moe_dsa",)),
    "minimax-m2": Architecture(families=("minimax_m2",), tensors=TENSORS),
    "mellum": Architecture(families=("mellum",), tensors=TENSORS),
    "afmoe": Architecture(families=("afmoe",), tensors=TENSORS),
    "llama4": Architecture(families=("llama4",), tensors=TENSORS),
    "mistral3": Architecture(families=("mistral",), tensors=TENSORS, woven=WOVEN),
    "nemotron": Architecture(
        families=("nemotron",),
        tensors=TENSORS,
        plus_one=True,
        classes={"": "NemotronForCausalLM"},
    ),
    "arcee": Architecture(
        families=("arcee",), tensors=TENSORS, woven=WOVEN, classes={"": "ArceeForCausalLM"}
    ),
    "jais2": Architecture(families=("jais2",), tensors=TENSORS),
    "starcoder2": Architecture(
        families=("starcoder2",), tensors=TENSORS, classes={"": "Starcoder2ForCausalLM"}
    ),
    "stablelm": Architecture(
        families=("stablelm",), tensors=TENSORS, classes={"": "StableLmForCausalLM"}
    ),
    "phi2": Architecture(
        families=("phi",),
        tensors=with_places(
            mlp_norm="blk.{i}.attn_norm.weight", mlp_norm_bias="blk.{i}.attn_norm.bias"
        ),
        classes={"": "PhiForCausalLM"},
    ),
}
