"""llama.cpp's architectures of which files are read: where each has the logical tensors, what its
converter changes, and what it takes for granted that a config.json would say.

Plain data, but for what a file's own numbers are spelled out to. A new architecture is an entry.
Names as in gguf's ``constants.py`` and ``tensor_mapping.py``; what converters change as in
llama.cpp's ``conversion``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from freight.model.families import Either, Fused, Halves, Place, Spelled, Stacked
from freight.model.gguf import GgufFile

__all__ = ["ARCHITECTURES", "Architecture", "Numbers"]

Numbers = Mapping[str, Any]
"""What a file says under its architecture's own name, without that name."""


def _nothing(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """``families``: those that it serves. ``tensors``: logical name -> its place in the file. The
    rows of ``woven`` tensors lie with the halves of each head woven together; with ``plus_one``
    the gains of norms have one added, but ``plain_norms``; of ``negated`` tensors the file has
    minus the exponentials. With ``deals_heads`` those that keep a state lie so that the first of
    each key head come first.

    For files that come alone: ``classes`` has what a config.json would call the model, by a number
    of the file that is there and not zero, the last of them; "" is always. Without any, a
    config.json must lie beside the file. ``says``, and of the rotation ``says_of_rope``: what it
    would say that the file does not; ``spells``: what has to be made of more than one of the file's
    numbers. ``may_have_experts``; ``has_unlike_layers``, whose numbers of heads are listed.
    """

    families: tuple[str, ...]
    tensors: Mapping[str, Place]
    woven: tuple[str, ...] = ()
    plus_one: bool = False
    plain_norms: tuple[str, ...] = ()
    negated: tuple[str, ...] = ()
    deals_heads: bool = False
    classes: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    says_of_rope: Mapping[str, Any] = field(default_factory=dict)
    spells: Callable[[GgufFile, Numbers], Mapping[str, Any]] = _nothing
    may_have_experts: bool = False
    has_unlike_layers: bool = False


_LAYER_TENSORS: Final = {
    "attention.norm": "attn_norm.weight",
    "attention.norm_bias": "attn_norm.bias",
    "attention.q": "attn_q.weight",
    "attention.k": "attn_k.weight",
    "attention.v": "attn_v.weight",
    "attention.q_bias": "attn_q.bias",
    "attention.k_bias": "attn_k.bias",
    "attention.v_bias": "attn_v.bias",
    "attention.q_norm": "attn_q_norm.weight",
    "attention.k_norm": "attn_k_norm.weight",
    "attention.sinks": "attn_sinks.weight",
    "attention.gates": "attn_gate.weight",
    "attention.out": "attn_output.weight",
    "attention.out_bias": "attn_output.bias",
    "attention.post_norm": "post_attention_norm.weight",
    "mlp.norm": "ffn_norm.weight",
    "mlp.norm_bias": "ffn_norm.bias",
    "mlp.gate": "ffn_gate.weight",
    "mlp.up": "ffn_up.weight",
    "mlp.down": "ffn_down.weight",
    "mlp.gate_bias": "ffn_gate.bias",
    "mlp.up_bias": "ffn_up.bias",
    "mlp.down_bias": "ffn_down.bias",
    "mlp.post_norm": "post_ffw_norm.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared.share": "ffn_gate_inp_shexp.weight",
    "recurrence.mixed": "attn_qkv.weight",
    "recurrence.gate": "attn_gate.weight",
    "recurrence.a": "ssm_alpha.weight",
    "recurrence.b": "ssm_beta.weight",
    "recurrence.convolution": "ssm_conv1d.weight",
    "recurrence.decay": "ssm_a",
    "recurrence.decay_bias": "ssm_dt.bias",
    "recurrence.read_norm": "ssm_norm.weight",
    "recurrence.out": "ssm_out.weight",
}
_TENSORS: Final[dict[str, Place]] = {
    "embedding": "token_embd.weight",
    **{f"layers.{{i}}.{own}": f"blk.{{i}}.{theirs}" for own, theirs in _LAYER_TENSORS.items()},
    "layers.{i}.router.corrections": Spelled(
        tensor="blk.{i}.exp_probs_b.bias", otherwise="blk.{i}.exp_probs_b"
    ),
    **{
        f"layers.{{i}}.experts.{{e}}.{part}{own}": Stacked(
            tensor=f"blk.{{i}}.ffn_{part}_exps.{theirs}"
        )
        for part in ("gate", "up", "down")
        for own, theirs in (("", "weight"), ("_bias", "bias"))
    },
    "head.norm": "output_norm.weight",
    "head.norm_bias": "output_norm.bias",
    "head.weight": "output.weight",
    "head.bias": "output.bias",
}
_WOVEN: Final = ("attention.q", "attention.k", "attention.q_bias", "attention.k_bias")


def _with(**places: Place) -> dict[str, Place]:
    """The usual names, but for some of a layer: attention_norm stands for "attention.norm"."""
    return _TENSORS | {
        f"layers.{{i}}.{name.replace('_', '.', 1)}": place for name, place in places.items()
    }


_QKV: Final = Fused(
    tensor="blk.{i}.attn_qkv.weight", of=("attention.q", "attention.k", "attention.v")
)
_GATE_UP: Final = Fused(tensor="blk.{i}.ffn_up.weight", of=("mlp.gate", "mlp.up"))
_SHARED: Final = Fused(tensor="blk.{i}.ffn_up_shexp.weight", of=("shared.gate", "shared.up"))
_WITH_FUSED_EXPERTS: Final[dict[str, Place]] = {
    f"layers.{{i}}.experts.{{e}}.{name}": Stacked(
        tensor="blk.{i}.ffn_gate_up_exps.weight", parts=2, part=part
    )
    for part, name in enumerate(("gate", "up"))
}
# One norm for both parts of a layer, side by side.
_COMMON_NORM: Final = _with(mlp_norm="blk.{i}.attn_norm.weight")
# What others call the norm of what attention returns is before the MLP.
_LATE_NAMES: Final = _with(mlp_norm="blk.{i}.post_attention_norm.weight")
# Norms of what the parts return alone.
_NORMS_BEHIND: Final = _with(
    attention_norm="blk.{i}.post_attention_norm.weight", mlp_norm="blk.{i}.post_ffw_norm.weight"
)
_LATENTS: Final = Architecture(
    families=("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
    tensors=_with(
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
    tensors=_LATE_NAMES,
    plus_one=True,
    plain_norms=("recurrence.read_norm",),
    negated=("recurrence.decay",),
    deals_heads=True,
    classes={"": "Qwen3_5ForCausalLM"},
    spells=_states,
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        families=("llama", "mistral", "mixtral", "internlm3", "iquestcoder"),
        tensors=_TENSORS,
        woven=_WOVEN,
        classes={"": "LlamaForCausalLM", "expert_count": "MixtralForCausalLM"},
        may_have_experts=True,
    ),
    "qwen2": Architecture(families=("qwen2",), tensors=_TENSORS, classes={"": "Qwen2ForCausalLM"}),
    "qwen2moe": Architecture(
        families=("qwen2_moe",),
        tensors=_TENSORS,
        classes={"": "Qwen2MoeForCausalLM"},
        says={"norm_topk_prob": False},
        may_have_experts=True,
    ),
    "qwen3": Architecture(families=("qwen3",), tensors=_TENSORS, classes={"": "Qwen3ForCausalLM"}),
    "qwen3moe": Architecture(
        families=("qwen3_moe",),
        tensors=_TENSORS,
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
    "phi3": Architecture(
        families=("phi3",),
        tensors=_with(
            attention_q=_QKV,
            attention_k=_QKV,
            attention_v=_QKV,
            mlp_gate=_GATE_UP,
            mlp_up=_GATE_UP,
        ),
        classes={"": "Phi3ForCausalLM"},
    ),
    "gemma": Architecture(
        families=("gemma",), tensors=_TENSORS, plus_one=True, classes={"": "GemmaForCausalLM"}
    ),
    "gemma2": Architecture(
        families=("gemma2",),
        tensors=_TENSORS,
        plus_one=True,
        classes={"": "Gemma2ForCausalLM"},
        spells=_gemma2,
    ),
    "gemma3": Architecture(
        families=("gemma3",),
        tensors=_TENSORS,
        plus_one=True,
        classes={"": "Gemma3ForCausalLM"},
        spells=_gemma3,
    ),
    "gemma4": Architecture(
        families=("gemma4",),
        tensors=_with(
            mlp_own_norm="blk.{i}.post_ffw_norm_1.weight",
            router_norm="blk.{i}.ffn_gate_inp.scale",
            router_gains="blk.{i}.ffn_down_exps.scale",
            experts_norm="blk.{i}.pre_ffw_norm_2.weight",
            experts_post_norm="blk.{i}.post_ffw_norm_2.weight",
            scale="blk.{i}.layer_output_scale.weight",
        )
        | _WITH_FUSED_EXPERTS,
        classes={"": "Gemma4ForCausalLM"},
        spells=_gemma4,
        may_have_experts=True,
        has_unlike_layers=True,
    ),
    "gpt-oss": Architecture(
        families=("gpt_oss",),
        tensors=_LATE_NAMES,
        classes={"": "GptOssForCausalLM"},
        says_of_rope={"truncate": False},
        may_have_experts=True,
    ),
    "granite": Architecture(
        families=("granite",),
        tensors=_TENSORS,
        woven=_WOVEN,
        classes={"": "GraniteForCausalLM"},
    ),
    "granitemoe": Architecture(
        families=("granitemoe", "granitemoeshared"),
        tensors=_TENSORS,
        woven=_WOVEN,
        classes={
            "": "GraniteMoeForCausalLM",
            "expert_shared_feed_forward_length": "GraniteMoeSharedForCausalLM",
        },
        may_have_experts=True,
    ),
    "granite_swa": Architecture(
        families=("granite_swa", "granitemoe_swa"),
        tensors=_with(shared_gate=_SHARED, shared_up=_SHARED) | _WITH_FUSED_EXPERTS,
        woven=_WOVEN,
    ),
    "smollm3": Architecture(
        families=("smollm3",),
        tensors=_TENSORS,
        woven=_WOVEN,
        classes={"": "SmolLM3ForCausalLM"},
    ),
    "glm4": Architecture(
        families=("glm4",),
        tensors=_with(mlp_gate=_GATE_UP, mlp_up=_GATE_UP),
        classes={"": "Glm4ForCausalLM"},
    ),
    "glm4moe": Architecture(
        families=("glm4_moe", "solar_open"),
        tensors=_LATE_NAMES,
        classes={"": "Glm4MoeForCausalLM"},
        may_have_experts=True,
    ),
    "dots1": Architecture(
        families=("dots1",),
        tensors=_TENSORS,
        classes={"": "Dots1ForCausalLM"},
        may_have_experts=True,
    ),
    "olmo": Architecture(
        families=("olmo",), tensors=_TENSORS, woven=_WOVEN[:2], classes={"": "OlmoForCausalLM"}
    ),
    "olmo2": Architecture(
        families=("olmo2", "olmo3"),
        tensors=_NORMS_BEHIND,
        classes={"": "Olmo2ForCausalLM", "attention.sliding_window": "Olmo3ForCausalLM"},
    ),
    "olmoe": Architecture(
        families=("olmoe",),
        tensors=_TENSORS,
        classes={"": "OlmoeForCausalLM"},
        says={"norm_topk_prob": False},
        may_have_experts=True,
    ),
    "command-r": Architecture(
        families=("cohere",), tensors=_COMMON_NORM, classes={"": "CohereForCausalLM"}
    ),
    "cohere2": Architecture(
        families=("cohere2",), tensors=_COMMON_NORM, classes={"": "Cohere2ForCausalLM"}
    ),
    "cohere2moe": Architecture(families=("cohere2_moe",), tensors=_COMMON_NORM),
    "seed_oss": Architecture(
        families=("seed_oss",), tensors=_LATE_NAMES, classes={"": "SeedOssForCausalLM"}
    ),
    "ernie4_5": Architecture(
        families=("ernie4_5",), tensors=_TENSORS, classes={"": "Ernie4_5ForCausalLM"}
    ),
    "ernie4_5-moe": Architecture(
        families=("ernie4_5_moe",),
        tensors=_TENSORS,
        classes={"": "Ernie4_5_MoeForCausalLM"},
        may_have_experts=True,
    ),
    "exaone4": Architecture(
        families=("exaone4",), tensors=_NORMS_BEHIND, classes={"": "Exaone4ForCausalLM"}
    ),
    "exaone-moe": Architecture(
        families=("exaone_moe",),
        tensors=_TENSORS,
        classes={"": "ExaoneMoeForCausalLM"},
        may_have_experts=True,
    ),
    "hunyuan-dense": Architecture(
        families=("hunyuan_v1_dense",),
        tensors=_TENSORS,
        classes={"": "HunYuanDenseV1ForCausalLM"},
    ),
    "hy_v3": Architecture(families=("hy_v3",), tensors=_TENSORS),
    "deepseek2": _LATENTS,
    "deepseek32": replace(_LATENTS, families=("deepseek_v32",)),
    "glm-dsa": replace(_LATENTS, families=("glm_moe_dsa",)),
    "minimax-m2": Architecture(families=("minimax_m2",), tensors=_TENSORS),
    "mellum": Architecture(families=("mellum",), tensors=_TENSORS),
    "afmoe": Architecture(families=("afmoe",), tensors=_TENSORS),
    "llama4": Architecture(families=("llama4",), tensors=_TENSORS),
    "mistral3": Architecture(families=("mistral",), tensors=_TENSORS, woven=_WOVEN),
    "nemotron": Architecture(
        families=("nemotron",),
        tensors=_TENSORS,
        plus_one=True,
        classes={"": "NemotronForCausalLM"},
    ),
    "arcee": Architecture(
        families=("arcee",), tensors=_TENSORS, woven=_WOVEN, classes={"": "ArceeForCausalLM"}
    ),
    "jais2": Architecture(families=("jais2",), tensors=_TENSORS),
    "starcoder2": Architecture(
        families=("starcoder2",), tensors=_TENSORS, classes={"": "Starcoder2ForCausalLM"}
    ),
    "stablelm": Architecture(
        families=("stablelm",), tensors=_TENSORS, classes={"": "StableLmForCausalLM"}
    ),
    "phi2": Architecture(
        families=("phi",),
        tensors=_with(mlp_norm="blk.{i}.attn_norm.weight", mlp_norm_bias="blk.{i}.attn_norm.bias"),
        classes={"": "PhiForCausalLM"},
    ),
}
