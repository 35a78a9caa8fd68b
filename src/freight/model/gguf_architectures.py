"""llama.cpp's architectures of which files are read: the families that each serves, where it has
their tensors, what its converter changes, and what it takes for granted that a config.json would
say.

Plain data. A new architecture is an entry. What converters change is as in llama.cpp's
``conversion``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from freight.model.families import Either, Fused, Halves, OneOf
from freight.model.gguf_names import (
    COMMON_NORM,
    GATE_UP,
    LATE_NAMES,
    NORMS_BEHIND,
    SHARED,
    TENSORS,
    WOVEN,
    Architecture,
    with_places,
)
from freight.model.gguf_spellings import (
    columns,
    gemma2,
    gemma3,
    gemma4,
    minicpm,
    perhaps_unrotated,
    scans,
    states,
    step,
)

__all__ = ["ARCHITECTURES"]

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
        # Older files have them as they are.
        attention_kv_up=OneOf(
            first=Halves(turned="blk.{i}.attn_k_b.weight", rest="blk.{i}.attn_v_b.weight"),
            otherwise="blk.{i}.attn_kv_b.weight",
        ),
    ),
)
_CHOSEN_LATENTS: Final = replace(
    _LATENTS,
    tensors={
        **_LATENTS.tensors,
        "layers.{i}.attention.index_q": "blk.{i}.indexer.attn_q_b.weight",
        "layers.{i}.attention.index_k": "blk.{i}.indexer.attn_k.weight",
        "layers.{i}.attention.index_k_norm": "blk.{i}.indexer.k_norm.weight",
        "layers.{i}.attention.index_k_norm_bias": "blk.{i}.indexer.k_norm.bias",
        "layers.{i}.attention.index_weights": "blk.{i}.indexer.proj.weight",
    },
)
_SIGMOID: Final = 2
"""How experts are chosen, as a number of llama.cpp's."""


_WITH_STATES: Final = Architecture(
    families=("qwen3_5",),
    tensors=LATE_NAMES,
    plus_one=True,
    plain_norms=("recurrence.read_norm",),
    negated=("recurrence.decay",),
    deals_heads=True,
    classes={"": "Qwen3_5ForCausalLM"},
    spells=states,
)


_RATES: Final = Fused(tensor="blk.{i}.ssm_ba.weight", of=("recurrence.b", "recurrence.a"))
_JOINED: Final = Fused(tensor="blk.{i}.ssm_in.weight", of=("recurrence.mixed", "recurrence.gate"))
# As those of its kin, but for rates; in older files all that a key head has is in one tensor.
_WITH_JOINED_HEADS: Final = replace(
    _WITH_STATES,
    families=("qwen3_5_moe",),
    tensors={
        **LATE_NAMES,
        "layers.{i}.recurrence.a": _RATES,
        "layers.{i}.recurrence.b": _RATES,
        "layers.{i}.recurrence.mixed": OneOf(first="blk.{i}.attn_qkv.weight", otherwise=_JOINED),
        "layers.{i}.recurrence.gate": OneOf(first="blk.{i}.attn_gate.weight", otherwise=_JOINED),
    },
    deals_heads=False,
    joins_heads=True,
    classes={"": "Qwen3_5MoeForCausalLM"},
    describes_itself=True,
    may_have_experts=True,
)


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
    spells=scans,
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
    spells=columns,
    has_unlike_layers=True,
)

# Of models that also see, the part that reads.
_QWEN2: Final = Architecture(families=("qwen2",), tensors=TENSORS, classes={"": "Qwen2ForCausalLM"})
_QWEN3: Final = replace(_QWEN2, families=("qwen3",), classes={"": "Qwen3ForCausalLM"})
_QWEN3_MOE: Final = replace(
    _QWEN3,
    families=("qwen3_moe", "qwen3_vl_moe"),
    classes={"": "Qwen3MoeForCausalLM"},
    may_have_experts=True,
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        families=("llama", "mistral", "mixtral", "internlm3", "iquestcoder"),
        tensors=TENSORS,
        woven=WOVEN,
        classes={"": "LlamaForCausalLM", "expert_count": "MixtralForCausalLM"},
        may_have_experts=True,
    ),
    **dict.fromkeys(("qwen2", "qwen2vl"), _QWEN2),
    "qwen2moe": Architecture(
        families=("qwen2_moe",),
        tensors=TENSORS,
        classes={"": "Qwen2MoeForCausalLM"},
        says={"norm_topk_prob": False},
        may_have_experts=True,
    ),
    **dict.fromkeys(("qwen3", "qwen3vl"), _QWEN3),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _QWEN3_MOE),
    "qwen3next": _WITH_JOINED_HEADS,
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
        tensors=with_places(mlp_gate=GATE_UP, mlp_up=GATE_UP),
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
        says={"sliding_window": 4096},
        spells=gemma2,
    ),
    "gemma3": Architecture(
        families=("gemma3",),
        tensors=TENSORS,
        plus_one=True,
        classes={"": "Gemma3ForCausalLM"},
        spells=gemma3,
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
            inputs_gate="blk.{i}.inp_gate.weight",
            inputs_out="blk.{i}.proj.weight",
            inputs_norm="blk.{i}.post_norm.weight",
        )
        | {
            "embedding.inputs": "per_layer_token_embd.weight",
            "embedding.inputs_of": "per_layer_model_proj.weight",
            "embedding.inputs_norm": "per_layer_proj_norm.weight",
        },
        classes={"": "Gemma4ForCausalLM"},
        spells=gemma4,
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
        families=("granite", "granitemoehybrid"),
        tensors=TENSORS,
        woven=WOVEN,
        spells=perhaps_unrotated,
        classes={"": "GraniteForCausalLM"},
    ),
    "minicpm": Architecture(
        families=("minicpm",),
        tensors=TENSORS,
        woven=WOVEN,
        spells=minicpm,
        classes={"": "MiniCPMForCausalLM"},
    ),
    "granitemoe": Architecture(
        families=("granitemoe", "granitemoeshared", "granitemoehybrid"),
        tensors=TENSORS,
        woven=WOVEN,
        classes={
            "": "GraniteMoeForCausalLM",
            "expert_shared_feed_forward_length": "GraniteMoeSharedForCausalLM",
        },
        may_have_experts=True,
        spells=perhaps_unrotated,
    ),
    "granite_swa": Architecture(
        families=("granite_swa", "granitemoe_swa"),
        tensors=with_places(shared_gate=SHARED, shared_up=SHARED),
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
        refuses=("rope.dimension_sections",),
        classes={"": "Glm4ForCausalLM"},
    ),
    "glm4moe": Architecture(
        families=("glm4_moe", "solar_open"),
        tensors=LATE_NAMES,
        classes={"": "Glm4MoeForCausalLM"},
        says={"norm_topk_prob": False},
        demands={"expert_gating_func": _SIGMOID},
        may_have_experts=True,
    ),
    "dots1": Architecture(
        families=("dots1",),
        tensors=TENSORS,
        classes={"": "Dots1ForCausalLM"},
        says={"norm_topk_prob": False},
        demands={"expert_gating_func": _SIGMOID},
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
        says={"norm_topk_prob": False},
        demands={"expert_gating_func": _SIGMOID},
        may_have_experts=True,
    ),
    "hunyuan-dense": Architecture(
        families=("hunyuan_v1_dense",),
        tensors=TENSORS,
        classes={"": "HunYuanDenseV1ForCausalLM"},
    ),
    "hy_v3": Architecture(families=("hy_v3",), tensors=TENSORS),
    "laguna": Architecture(families=("laguna",), tensors=TENSORS),
    "step35": Architecture(
        families=("step3p5",),
        tensors=TENSORS,
        plus_one=True,
        says_of_rope={"partial_rotary_factor": 0.5},
        demands={"expert_gating_func": _SIGMOID},
        classes={"": "Step3p5ForCausalLM"},
        spells=step,
        may_have_experts=True,
        has_unlike_layers=True,
    ),
    "deepseek2": _LATENTS,
    "deepseek32": replace(_CHOSEN_LATENTS, families=("deepseek_v32",)),
    "glm-dsa": replace(_CHOSEN_LATENTS, families=("glm_moe_dsa",)),
    "minimax-m2": Architecture(families=("minimax_m2",), tensors=TENSORS),
    "mellum": Architecture(families=("mellum",), tensors=TENSORS),
    "afmoe": Architecture(families=("afmoe",), tensors=TENSORS),
    "llama4": Architecture(families=("llama4",), tensors=TENSORS),
    "mistral3": Architecture(families=("mistral",), tensors=TENSORS, woven=WOVEN),
    "nemotron": Architecture(
        families=("nemotron",),
        tensors=TENSORS,
        plus_one=True,
        # What the file says is a share of the hidden size, cut to a whole number.
        says_of_rope={"partial_rotary_factor": 0.5},
        classes={"": "NemotronForCausalLM"},
    ),
    "arcee": Architecture(
        families=("arcee",), tensors=TENSORS, woven=WOVEN, classes={"": "ArceeForCausalLM"}
    ),
    "jais2": Architecture(families=("jais2",), tensors=TENSORS),
    "starcoder2": Architecture(
        families=("starcoder2",),
        tensors=TENSORS,
        classes={"": "Starcoder2ForCausalLM"},
        says={"sliding_window": 4096},
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
