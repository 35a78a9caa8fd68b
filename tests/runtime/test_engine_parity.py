"""The engine's logits and greedy tokens against transformers, for each switch of a model.

Tiny random models, computed in float32 by both. The engine runs with weights, KV cache and
activations spread over the tiers; transformers runs row by row.
"""

from __future__ import annotations

import json
import math
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AfmoeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AXK1Config,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconConfig,
    FlexOlmoConfig,
    FlintConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    Kolibri1Config,
    LagunaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    Step3p7TextConfig,
    YoutuConfig,
)
from transformers.models.gemma4_unified.configuration_gemma4_unified import (
    Gemma4UnifiedTextConfig,
)
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig

from freight.model.config import read_config
from freight.model.decoder import count_parameters

from . import tiny
from .classics import CLASSICS, CLASSICS_PUBLISHED

# Known to it as a part of a model that also sees, only.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

STEPS = 16
HALF = 8  # half the head width of the tiny model: the number of rotary frequencies

ROPES: dict[str, tuple[int, dict[str, Any]]] = {
    "linear": (256, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (24, {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (
        256,
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    ),
    "longrope": (
        96,
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 24,
            "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
            "long_factor": [2.0 + 0.7 * i for i in range(HALF)],
        },
    ),
    "llama3": (
        256,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    ),
}


def llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**{**tiny.SIZES, **changes})


def scaled(kind: str) -> PretrainedConfig:
    longest, parameters = ROPES[kind]
    rope = {"rope_theta": 500.0, **parameters}
    return llama(max_position_embeddings=longest, rope_parameters=rope)


def qwen2(**changes: Any) -> PretrainedConfig:
    return Qwen2Config(**{**tiny.SIZES, **changes})


def mistral(**changes: Any) -> PretrainedConfig:
    return MistralConfig(**{**tiny.SIZES, **changes})


def falcon(**changes: Any) -> PretrainedConfig:
    sizes = {**tiny.SIZES, "ffn_hidden_size": 160, "alibi": False}
    return FalconConfig(**{**sizes, **changes})


def gemma2(**changes: Any) -> PretrainedConfig:
    sizes = {**tiny.SIZES, "head_dim": 24, "sliding_window": 9, "query_pre_attn_scalar": 20}
    return Gemma2Config(**{**sizes, **changes})


def gpt_neox(**changes: Any) -> PretrainedConfig:
    return GPTNeoXConfig(**{**tiny.SIZES, "rotary_pct": 0.25, **changes})


def mixtral(**changes: Any) -> PretrainedConfig:
    return MixtralConfig(**{**tiny.SIZES, "num_local_experts": 4, **changes})


def opt(**changes: Any) -> PretrainedConfig:
    sizes = {**tiny.SIZES, "ffn_dim": 160, "word_embed_proj_dim": 64, "pad_token_id": 1}
    return OPTConfig(**{**sizes, **changes})


def phi3(**changes: Any) -> PretrainedConfig:
    return Phi3Config(**{**tiny.SIZES, "pad_token_id": 1, **changes})


def qwen3(**changes: Any) -> PretrainedConfig:
    return Qwen3Config(**{**tiny.SIZES, "head_dim": 24, **changes})


def qwen3_moe(**changes: Any) -> PretrainedConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    return Qwen3MoeConfig(**{**tiny.SIZES, "head_dim": 24, **sizes, **changes})


def cohere(**changes: Any) -> PretrainedConfig:
    return CohereConfig(**{**tiny.SIZES, "pad_token_id": 1, "logit_scale": 0.25, **changes})


def deepseek(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    latents = {
        "kv_lora_rank": 32,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "num_key_value_heads": 4,
    }
    experts = {
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    }
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    }
    sizes = {**tiny.SIZES, "num_hidden_layers": 3, "pad_token_id": 1, "rope_parameters": yarn}
    return kind(**{**sizes, **latents, **experts, **changes})


def minicpm3(**changes: Any) -> PretrainedConfig:
    latents = {
        "kv_lora_rank": 32,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "num_key_value_heads": 4,
    }
    factors = {"scale_emb": 3.0, "scale_depth": 0.9, "dim_model_base": 24}
    sizes = {**tiny.SIZES, "num_hidden_layers": 3, "pad_token_id": 1}
    return MiniCPM3Config(**{**sizes, **latents, **factors, **changes})


def four_layers(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """A config of a family whose layers are of two kinds, one in four."""
    return kind(**{**tiny.SIZES, "num_hidden_layers": 4, "pad_token_id": 1, **changes})


def gemma3(**changes: Any) -> PretrainedConfig:
    sizes = {"head_dim": 24, "sliding_window": 9, "query_pre_attn_scalar": 20}
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = {"full_attention": scaled, "sliding_attention": {"rope_type": "default"}}
    given = {"rope_parameters": ropes, "sliding_window_pattern": 2}
    return four_layers(Gemma3TextConfig, **{**sizes, **given, **changes})


def glm4_moe(**changes: Any) -> PretrainedConfig:
    sizes = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    more = {"head_dim": 24, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
    return Glm4MoeConfig(**{**tiny.SIZES, **sizes, **more, "pad_token_id": 1, **changes})


def gpt_oss(**changes: Any) -> PretrainedConfig:
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    }
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48}
    more = {"head_dim": 24, "sliding_window": 9, "rope_parameters": yarn}
    return GptOssConfig(**{**tiny.SIZES, **sizes, **more, **changes})


def mimo(**changes: Any) -> PretrainedConfig:
    """The first of four layers sees all."""
    sizes = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    more = {"head_dim": 24, "v_head_dim": 16, "sliding_window": 9}
    return four_layers(MiMoV2FlashConfig, **{**sizes, **more, **changes})


def laguna(**changes: Any) -> PretrainedConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    more = {"shared_expert_intermediate_size": 40, "head_dim": 24, "sliding_window": 9}
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    return four_layers(LagunaConfig, **{**sizes, **more, **kinds, **changes})


def step(**changes: Any) -> PretrainedConfig:
    """Only as a part of a model that also sees. With gains near two roundings grow from layer to
    layer."""
    sizes = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    more = {"share_expert_dim": 40, "head_dim": 24, "sliding_window": 9}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    given = {"num_hidden_layers": 3, "layer_types": kinds, "pad_token_id": 1}
    return Step3p7TextConfig(**{**tiny.SIZES, **sizes, **more, **given, **changes})


GRANITE_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
INDEXER: dict[str, Any] = {"index_topk": 72, "index_head_dim": 24, "index_n_heads": 3}
"""Chooses as many keys as the longest row has."""
STRETCHED: dict[str, Any] = {
    "rope_type": "dynamic",
    "alpha": 50.0,
    "factor": 1.0,
    "rope_theta": 500.0,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
}


def granite(**changes: Any) -> PretrainedConfig:
    return GraniteConfig(**{**tiny.SIZES, **GRANITE_FACTORS, **changes})


def granite_swash(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return four_layers(kind, **{**GRANITE_FACTORS, "sliding_window": 9, **changes})


def llama4(**changes: Any) -> PretrainedConfig:
    """The last of four layers has no positions."""
    experts = {"num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size": 48}
    more = {"num_hidden_layers": 4, "head_dim": 24, "intermediate_size_mlp": 160}
    config = {**tiny.SIZES, **experts, **more, "attention_chunk_size": 256, **changes}
    return Llama4TextConfig(**config, pad_token_id=0)


def ministral3(**changes: Any) -> PretrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.5,
        "original_max_position_embeddings": 12,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    return Ministral3Config(**{**tiny.SIZES, "head_dim": 24, "rope_parameters": rope, **changes})


def mistral4(**changes: Any) -> PretrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 2.5,
        "original_max_position_embeddings": 12,
        "mscale": 1.0,
        "mscale_all_dim": 0.9,
        "llama_4_scaling_beta": 0.1,
    }
    return deepseek(Mistral4Config, rope_parameters=rope, **changes)


def hunyuan3(**changes: Any) -> PretrainedConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    return HYV3Config(**{**tiny.SIZES, **sizes, "head_dim": 24, **changes})


def mellum(**changes: Any) -> PretrainedConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    more = {"head_dim": 24, "sliding_window": 9, "layer_types": kinds}
    return four_layers(MellumConfig, **{**sizes, **more, **changes})


def flint(**changes: Any) -> PretrainedConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    more = {"head_dim": 24, "sliding_window": 9, "shared_expert_intermediate_size": 72}
    return four_layers(FlintConfig, **{**sizes, **more, **changes})


def cohere2_moe(**changes: Any) -> PretrainedConfig:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48}
    more = {"head_dim": 24, "sliding_window": 9, "num_shared_experts": 2, "logit_scale": 0.25}
    plain = {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 160}
    return four_layers(
        Cohere2MoeConfig, **{**experts, **more, **plain, "sliding_window_pattern": 2, **changes}
    )


def kolibri(**changes: Any) -> PretrainedConfig:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    more = {"head_dim": 24, "shared_expert_intermediate_size": 72, "sliding_window": 9}
    sizes = {name: size for name, size in tiny.SIZES.items() if name != "intermediate_size"}
    return Kolibri1Config(**{**sizes, **experts, **more, "num_hidden_layers": 5, **changes})


def minimax_m3(**changes: Any) -> PretrainedConfig:
    """Of the last layer's keys an indexer chooses five blocks of 16: as many as a row has."""
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48}
    widths = {"dense_intermediate_size": 160, "shared_intermediate_size": 72, "head_dim": 24}
    kinds = {
        "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_hidden_layers": 3,
    }
    blocks = {"index_block_size": 16, "index_topk_blocks": 5, "index_n_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    more = {"index_head_dim": 24, "swiglu_limit": 0.5, "rope_parameters": rope, "pad_token_id": 1}
    return MiniMaxM3VLTextConfig(
        **{**tiny.SIZES, **experts, **widths, **kinds, **blocks, **more, **changes}
    )


def afmoe(**changes: Any) -> PretrainedConfig:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    more = {"head_dim": 24, "sliding_window": 9, "mup_enabled": True, "route_scale": 1.5}
    return four_layers(AfmoeConfig, **{**experts, **more, **changes})


# Every other layer sees all, with fewer and wider heads.
GEMMA4: dict[str, Any] = {
    **tiny.SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 24,
    "global_head_dim": 40,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 9,
    "pad_token_id": 0,
}
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
}
# The last three of six attend the keys of the second and the third.
GEMMA4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": tiny.SIZES["vocab_size"],
    "attention_k_eq_v": False,
}


def gemma4(**changes: Any) -> PretrainedConfig:
    return Gemma4TextConfig(**{**GEMMA4, "hidden_size_per_layer_input": 0, **changes})


def olmo3(**changes: Any) -> PretrainedConfig:
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    }
    ropes = {"full_attention": yarn, "sliding_attention": {"rope_theta": 500.0}}
    return four_layers(Olmo3Config, sliding_window=9, rope_parameters=ropes, **changes)


FAMILIES: dict[str, PretrainedConfig] = {
    "cohere": cohere(),
    "cohere, norms of heads": cohere(use_qk_norm=True, tie_word_embeddings=False),
    "cohere2": four_layers(Cohere2Config, sliding_window=9, logit_scale=0.25),
    "kolibri": kolibri(),
    "kolibri, shares that sum to one": kolibri(norm_topk_prob=True, num_hidden_layers=2),
    "command a+": cohere2_moe(),
    "command a+, sigmoids": cohere2_moe(
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        num_shared_experts=0,
        first_k_dense_replace=2,
        prefix_dense_sliding_window_pattern=2,
        rms_norm_eps=1e-5,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "command a+, sums": cohere2_moe(
        shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid",
        first_k_dense_replace=0,
    ),
    "deepseek-v2": deepseek(
        DeepseekV2Config, topk_method="group_limited_greedy", n_group=3, topk_group=2
    ),
    "deepseek-v2-lite": deepseek(DeepseekV2Config, q_lora_rank=None),
    "deepseek-v3": deepseek(DeepseekV3Config, n_group=3, topk_group=2),
    "deepseek-v3, biases": deepseek(
        DeepseekV3Config, n_group=1, topk_group=1, attention_bias=True, rope_interleave=False
    ),
    "deepseek-v3.2": deepseek(DeepseekV32Config, n_group=3, topk_group=2, **INDEXER),
    "glm-5": deepseek(
        GlmMoeDsaConfig, attention_bias=True, rope_parameters={"rope_theta": 500.0}, **INDEXER
    ),
    "hy 4": deepseek(HYV4Config, swiglu_limit=0.5, **INDEXER),
    "hy 4, biases": deepseek(
        HYV4Config,
        swiglu_limit=1e9,
        hc_mult=3,
        hc_magnitude=1.5,
        hc_eps=1e-3,
        n_group=3,
        topk_group=2,
        attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters={"rope_theta": 500.0},
        **INDEXER,
    ),
    "mistral 4": mistral4(),
    "mistral 4, groups": mistral4(
        first_k_dense_replace=0, n_group=3, topk_group=2, q_lora_rank=None, rope_interleave=False
    ),
    "youtu": deepseek(YoutuConfig),
    "glm-4.7 flash": deepseek(Glm4MoeLiteConfig, rope_parameters=None),
    "ernie 4.5": Ernie4_5Config(**tiny.SIZES, head_dim=24, use_bias=True),
    "exaone 4": four_layers(Exaone4Config, sliding_window=9),
    "exaone 4, no windows": four_layers(
        Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 4
    ),
    "gemma3": gemma3(),
    "gemma3, capped logits": gemma3(final_logit_softcapping=5.0),
    "gemma4": gemma4(),
    "gemma4, capped logits": gemma4(
        final_logit_softcapping=5.0, attention_k_eq_v=False, attention_bias=True, global_head_dim=64
    ),
    "gemma4, experts": gemma4(**GEMMA4_EXPERTS),
    "gemma4, unified": Gemma4UnifiedTextConfig(**GEMMA4),
    "gemma4, inputs of layers": gemma4(
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=tiny.SIZES["vocab_size"]
    ),
    "gemma4, keys of others": gemma4(**GEMMA4_SMALL),
    "gemma4, wider behind": gemma4(**GEMMA4_SMALL, use_double_wide_mlp=True, sliding_window=5),
    "glm": GlmConfig(**tiny.SIZES, head_dim=24, pad_token_id=1),
    "glm4": Glm4Config(**tiny.SIZES, head_dim=24, pad_token_id=1),
    "glm4-moe": glm4_moe(),
    "glm4-moe, groups": glm4_moe(
        n_group=3, topk_group=2, use_qk_norm=True, attention_bias=True, first_k_dense_replace=0
    ),
    "hunyuan": HunYuanDenseV1Config(**tiny.SIZES, head_dim=24, pad_token_id=1, attention_bias=True),
    "hunyuan, stretched": HunYuanDenseV1Config(
        **tiny.SIZES, head_dim=24, pad_token_id=1, rope_parameters=STRETCHED
    ),
    "hunyuan 3": hunyuan3(),
    "hunyuan 3, plain layers": hunyuan3(
        num_hidden_layers=3,
        mlp_layer_types=["sparse", "dense", "sparse"],
        num_shared_experts=2,
        attention_bias=True,
    ),
    "hunyuan moe": HunYuanMoEV1Config(
        **{**tiny.SIZES, "intermediate_size": 48},
        head_dim=24,
        num_experts=6,
        moe_topk=3,
        pad_token_id=1,
        rope_parameters=STRETCHED,
    ),
    "k-exaone": four_layers(
        ExaoneMoeConfig,
        sliding_window=9,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_group=3,
        topk_group=2,
    ),
    "solar open": SolarOpenConfig(
        **tiny.SIZES, **EXPERTS, head_dim=24, routed_scaling_factor=1.5, attention_bias=True
    ),
    "dots.llm1": Dots1Config(
        **tiny.SIZES, **EXPERTS, n_group=3, topk_group=2, first_k_dense_replace=1
    ),
    "dots.llm1, windows": Dots1Config(
        **tiny.SIZES,
        **{**EXPERTS, "n_shared_experts": 1},
        sliding_window=9,
        max_window_layers=1,
        norm_topk_prob=True,
        attention_bias=True,
    ),
    "ernie 4.5 moe": Ernie4_5_MoeConfig(
        **{**tiny.SIZES, "num_hidden_layers": 3},
        moe_intermediate_size=48,
        moe_num_experts=6,
        moe_k=3,
    ),
    "granite swash": granite_swash(GraniteSWAConfig, layer_rope_theta=[0, 500.0, 500.0, 500.0]),
    "granite swash, two bases": granite_swash(
        GraniteSWAConfig,
        layer_rope_theta=[1e5, 500.0, 0, 500.0],
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "granite swash moe": granite_swash(
        GraniteMoeSWAConfig,
        intermediate_size=48,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=72,
    ),
    "granite swash moe, alone": granite_swash(
        GraniteMoeSWAConfig,
        intermediate_size=48,
        num_local_experts=6,
        num_experts_per_tok=3,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "granite moe": GraniteMoeConfig(
        **{**tiny.SIZES, **GRANITE_FACTORS, "intermediate_size": 48},
        num_local_experts=6,
        num_experts_per_tok=3,
    ),
    "gpt-oss": gpt_oss(),
    "gpt-oss, all in sight": gpt_oss(sliding_window=256, swiglu_limit=0.5),
    "mimo": mimo(),
    "mimo, other layers": mimo(
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["sparse", "dense", "dense", "sparse"],
        attention_value_scale=None,
        attention_bias=True,
        v_head_dim=24,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "granite": granite(),
    "granite, biases": granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama4": llama4(),
    "llama4, plain layers between": llama4(
        interleave_moe_layer_step=2, use_qk_norm=False, num_experts_per_tok=2, attention_bias=True
    ),
    "laguna": laguna(num_attention_heads_per_layer=[4, 6, 4, 6], moe_routed_scaling_factor=1.5),
    "laguna, gates as wide as heads": laguna(
        gating="per-element", attention_bias=True, mlp_layer_types=["sparse", "dense"] * 2
    ),
    "afmoe": afmoe(),
    "afmoe, mostly plain layers": afmoe(
        num_dense_layers=3, num_shared_experts=1, mup_enabled=False, attention_bias=True
    ),
    "flint": flint(num_hidden_layers=5),
    "flint, all with experts": flint(
        mlp_only_layers=[], norm_topk_prob=False, attention_bias=True, sliding_window=64
    ),
    "mellum": mellum(),
    "mellum, plain layers": mellum(
        mlp_layer_types=["sparse", "dense", "sparse", "dense"], attention_bias=True
    ),
    "ministral 3": ministral3(),
    "minimax m3": minimax_m3(),
    "minimax m3, all rotated": minimax_m3(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        mlp_layer_types=["sparse", "dense", "sparse"],
        routed_scaling_factor=0.7,
        swiglu_alpha=1.2,
    ),
    "minimax m2": MiniMaxM2Config(
        **{**tiny.SIZES, "head_dim": 24, "intermediate_size": 48},
        num_local_experts=6,
        num_experts_per_tok=3,
        rotary_dim=12,
    ),
    "olmo2": Olmo2Config(**tiny.SIZES, attention_bias=True),
    "olmo3": olmo3(),
    "olmoe": OlmoeConfig(
        **{**tiny.SIZES, "intermediate_size": 48}, num_experts=6, num_experts_per_tok=3
    ),
    "flex-olmo": FlexOlmoConfig(
        **{**tiny.SIZES, "intermediate_size": 48, "pad_token_id": 1},
        num_experts=6,
        num_experts_per_tok=3,
    ),
    "flex-olmo, normalised": FlexOlmoConfig(
        **{**tiny.SIZES, "intermediate_size": 48, "pad_token_id": 1},
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        attention_bias=True,
    ),
    "minicpm3": minicpm3(),
    "minicpm3, queries at once": minicpm3(q_lora_rank=None, tie_word_embeddings=False),
    "qwen2-moe": Qwen2MoeConfig(
        **{**tiny.SIZES, "num_hidden_layers": 3},
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=72,
        mlp_only_layers=[1],
    ),
    "seed-oss": SeedOssConfig(**tiny.SIZES, head_dim=24, attention_out_bias=True),
    "smollm3": four_layers(SmolLM3Config),
    "smollm3, windows": four_layers(SmolLM3Config, use_sliding_window=True, sliding_window=9),
    "stablelm": StableLmConfig(**tiny.SIZES, use_qkv_bias=True),
    "starcoder2": Starcoder2Config(**tiny.SIZES),
    "starcoder2, windows": Starcoder2Config(
        **tiny.SIZES, sliding_window=9, use_bias=False, tie_word_embeddings=False
    ),
    "falcon 7b": falcon(),
    "falcon 7b, biases": falcon(bias=True, tie_word_embeddings=False),
    "falcon 40b": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon 11b": falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon, multi-head": falcon(multi_query=False),
    "falcon, serial": falcon(parallel_attn=False),
    "gemma2": gemma2(),
    "gemma2, uncapped": gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "gpt-neox": gpt_neox(),
    "gpt-neox, serial": gpt_neox(use_parallel_residual=False, attention_bias=False),
    "mixtral": mixtral(),
    "mixtral, window": mixtral(sliding_window=7, num_experts_per_tok=1),
    "opt": opt(),
    "opt, norms after": opt(do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt, no biases": opt(enable_bias=False, tie_word_embeddings=False),
    "opt, no last norm": opt(_remove_final_layer_norm=True, activation_function="gelu"),
    "phi3": phi3(),
    "phi3, partial": phi3(
        sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "qwen3": qwen3(),
    "qwen3, window layers": qwen3(
        use_sliding_window=True, sliding_window=9, max_window_layers=1, attention_bias=True
    ),
    "qwen3-moe": qwen3_moe(),
    "qwen3-moe, mixed": qwen3_moe(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=True
    ),
}

CONFIGS: dict[str, PretrainedConfig] = {
    **FAMILIES,
    **CLASSICS,
    "llama": llama(),
    "multi-query": llama(num_key_value_heads=1),
    "multi-head": llama(num_key_value_heads=4),
    "tied": llama(tie_word_embeddings=True),
    "attention bias": llama(attention_bias=True),
    "mlp bias": llama(mlp_bias=True),
    "wide heads": llama(head_dim=24),
    "gelu": llama(hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-3),
    "odd sizes": llama(hidden_size=60, intermediate_size=101, vocab_size=307, head_dim=18),
    **{kind: scaled(kind) for kind in ROPES},
    "mistral": mistral(sliding_window=None),
    "mistral, window": mistral(sliding_window=7),
    "qwen2": qwen2(),
    "qwen2, window layers": qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1),
}


PUBLISHED_SIZES: dict[str, Any] = {
    **{key: value for key, value in tiny.SIZES.items() if not key.endswith("token_id")},
    "bos_token_id": 0,
    "eos_token_id": 319,
    "torch_dtype": "float32",
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "alibi": False,
    "bias": False,
    "layer_norm_epsilon": 1e-5,
    "multi_query": True,
    "parallel_attn": True,
}
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 24,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 20,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 8,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 4,
    "pad_token_id": 0,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 16,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "pythia": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 500,
        "rotary_pct": 0.5,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
    },
    "falcon-7b": {
        **FALCON,
        "new_decoder_architecture": False,
    },
    "falcon-40b": {
        **FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "opt-350m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": False,
        "_remove_final_layer_norm": False,
        "ffn_dim": 160,
        "pad_token_id": 1,
        "word_embed_proj_dim": 32,
    },
    "phi-3-mini-128k": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "hidden_act": "silu",
        "original_max_position_embeddings": 24,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "long_factor": [2.0 + 0.7 * i for i in range(HALF)],
            "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 20,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 24,
        "hidden_act": "silu",
        "max_window_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 24,
        "hidden_act": "silu",
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "hy-4": {
        "architectures": ["HYV4ForCausalLM"],
        "pad_token_id": 1,
        "model_type": "hy_v4",
        "hc_eps": 1e-6,
        "hc_magnitude": 2.0,
        "hc_mult": 4,
        "index_head_dim": 24,
        "index_n_heads": 3,
        "index_topk": 72,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "swiglu_limit": 0.5,
        "v_head_dim": 24,
    },
    "gemma-2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 3.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 5.0,
        "head_dim": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 20,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 9,
        "sliding_window_size": 9,
    },
}
"""config.json as models of these families were published, in the spelling of their day."""
PUBLISHED |= {
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 20,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 100,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
    },
    "olmo-3-7b": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 9,
        "tie_word_embeddings": False,
    },
    "mimo-v2-flash": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_bias": False,
        "attention_chunk_size": 8,
        "attention_value_scale": 0.707,
        "head_dim": 24,
        "hidden_act": "silu",
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "moe_intermediate_size": 48,
        "moe_layer_freq": [0, 1, 1, 1],
        "n_group": 1,
        "n_routed_experts": 6,
        "n_shared_experts": None,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 8,
        "sliding_window_size": 8,
        "swa_head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 16,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 16,
    },
    "gemma-4-26b-a4b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 5.0,
        "global_head_dim": 40,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 9,
        "tie_word_embeddings": True,
        "top_k_experts": 3,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 320,
    },
    "granite-3.3": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.0625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "logits_scaling": 8.0,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "num_hidden_layers": 4,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "glm-4-0414": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": False,
        "head_dim": 24,
        "hidden_act": "silu",
        "pad_token_id": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "command-r7b": {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "attention_bias": False,
        "cache_implementation": "hybrid",
        "head_dim": 16,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "num_hidden_layers": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "pad_token_id": 0,
        "position_embedding_type": "rope_gptj",
        "rope_scaling": None,
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 9,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
    },
    "trinity-mini": {
        "architectures": ["AfmoeForCausalLM"],
        "model_type": "afmoe",
        "attention_dropout": 0.0,
        "global_attn_every_n_layers": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "moe_intermediate_size": 48,
        "mup_enabled": True,
        "n_group": 1,
        "num_dense_layers": 2,
        "num_expert_groups": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "num_limited_groups": 1,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000,
        "route_norm": True,
        "route_scale": 2.826,
        "score_func": "sigmoid",
        "sliding_window": 9,
        "tie_word_embeddings": False,
        "topk_group": 1,
    },
    "glm-5": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "index_head_dim": 24,
        "index_n_heads": 3,
        "index_topk": 72,
        "indexer_rope_interleave": True,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 48,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 1,
        "q_lora_rank": 40,
        "qk_head_dim": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 20,
    },
    "nemotron-nano-9b-v2": {
        **NEMOTRON,
        "hybrid_override_pattern": "M-M*",
        "num_hidden_layers": 4,
    },
    "nemotron-3-nano-30b": {
        **NEMOTRON,
        "hybrid_override_pattern": "MEM*E",
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 5,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "mlp_type": "default",
        "norm_epsilon": 1e-5,
        "norm_type": "layer_norm",
        "rope_theta": 999999.4420358813,
        "sliding_window": 9,
        "use_bias": True,
    },
    **CLASSICS_PUBLISHED,
}


ATOL = 1e-4
LARGER = {"gemma4, wider behind": 4e-4}
"""Of a model whose own float32 logits are 2e-4 from its float64 ones (AVX-512)."""


def compare(
    directory: Path,
    prompts: list[list[int]],
    answers: list[tiny.Answer],
    *,
    atol: float = ATOL,
    **options: Any,
) -> None:
    if read_config(directory).sharing is not None:  # keys that several layers attend stay near
        options = tiny.with_keys_near(options)
    with tiny.engine(directory, prompts, STEPS, **options) as engine:
        captured = tiny.capture_logits(engine)
        found = tiny.run(engine, prompts, STEPS)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mine = torch.stack([captured[row, len(prompt) + step] for step in range(STEPS)])
        torch.testing.assert_close(mine, answer.logits, rtol=0, atol=atol)
    assert found == tiny.tokens(answers)
    assert len(captured) == STEPS * len(prompts)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, config=CONFIGS[name])
    kept = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    kept = {name for name in kept if "act_fn" not in name}  # constants of Apertus
    read = (own for name, own in model.named_parameters() if ".indexer." not in name)
    expected = sum(parameter.numel() for parameter in read)
    expected += sum(model.get_buffer(name).numel() for name in kept)
    assert count_parameters(read_config(tmp_path)) == expected


@pytest.mark.parametrize(
    ("name", "options"), [*zip(CONFIGS, cycle([tiny.ON_SIM, tiny.ON_CPU]))], ids=[*CONFIGS]
)
def test_switch(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = tiny.make_model(tmp_path, config=config)
    prompts = tiny.prompts(4, 40, vocab=config.vocab_size)
    atol = LARGER.get(name, ATOL)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), atol=atol, **options)


def publish(name: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """The model as transformers understands that config.json, which stays as it was written."""
    text = json.dumps({**PUBLISHED_SIZES, **PUBLISHED[name], **changes})
    (directory / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(directory)
    config.eos_token_id = None
    model = tiny.make_model(directory, config=config)
    (directory / "config.json").write_text(text)
    return model


@pytest.mark.parametrize(
    ("name", "options"), [*zip(PUBLISHED, cycle([tiny.ON_CPU, tiny.ON_SIM]))], ids=[*PUBLISHED]
)
def test_as_it_was_published(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = publish(name, tmp_path)
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **options)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pythia", {"rotary_pct": 0.25}),
        ("pythia", {"rotary_emb_base": 10000}),
        ("phi-3-mini-128k", {"rope_scaling": None}),
        ("phi-3-mini-128k", {"sliding_window": None}),
        ("mixtral-8x7b", {"rope_theta": 100.0}),
        ("mixtral-8x7b", {"num_experts_per_tok": 1}),
        ("qwen3-30b-a3b", {"norm_topk_prob": False}),
        ("gemma-2", {"attn_logit_softcapping": None}),
        ("gemma-2", {"query_pre_attn_scalar": 24}),
        ("gemma-2", {"sliding_window": 4096}),
        ("opt-350m", {"activation_function": "gelu"}),
        ("gemma-3-1b", {"rope_local_base_freq": 10000}),
        ("gemma-3-1b", {"rope_scaling": None}),
        ("gemma-3-1b", {"sliding_window_pattern": 4}),
        ("mimo-v2-flash", {"attention_value_scale": None}),
        ("mimo-v2-flash", {"sliding_window_size": 4}),
        ("mimo-v2-flash", {"routed_scaling_factor": 2.0}),
        ("gemma-4-26b-a4b", {"final_logit_softcapping": None}),
        ("gemma-4-26b-a4b", {"top_k_experts": 2}),
        ("olmo-3-7b", {"rope_scaling": None}),
        ("granite-3.3", {"residual_multiplier": 1.0}),
        ("granite-3.3", {"attention_multiplier": 0.25}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
        ("glm-4-0414", {"partial_rotary_factor": 1.0}),
        ("command-r7b", {"sliding_window_pattern": 2}),
        ("trinity-mini", {"global_attn_every_n_layers": 4}),
        ("trinity-mini", {"mup_enabled": False}),
        ("trinity-mini", {"route_scale": 1.0}),
        ("glm-5", {"routed_scaling_factor": 1.0}),
        ("nemotron-nano-9b-v2", {"hybrid_override_pattern": "MM-*"}),
        ("nemotron-nano-9b-v2", {"mlp_hidden_act": "relu"}),
        ("nemotron-3-nano-30b", {"routed_scaling_factor": 1.0}),
        ("nemotron-3-nano-30b", {"norm_topk_prob": False}),
        ("gpt-neo-125m", {"window_size": 4}),
        ("gpt-j-6b", {"rotary_dim": 16}),
        ("phi-2", {"partial_rotary_factor": 1.0}),
        ("minitron-4b", {"partial_rotary_factor": 1.0}),
        ("olmo-7b", {"clip_qkv": None}),
        ("apertus-8b", {"rope_scaling": None}),
    ],
    ids=str,
)
def test_what_was_published_matters(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """With another value transformers computes other logits: reading it wrongly would be seen."""
    prompt = tiny.prompts(1, 40)
    found = [tiny.reference(publish(name, tmp_path, **own), prompt, 8)[0] for own in ({}, change)]
    assert (found[0].logits[0] - found[1].logits[0]).abs().max() > 1e-3


def vision(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return {**sizes, "num_attention_heads": 2, "image_size": 28, "patch_size": 14, **changes}


MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (gemma3(), {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}),
        (
            gemma4(),
            {
                "architectures": ["Gemma4ForConditionalGeneration"],
                "model_type": "gemma4",
                "vision_config": {"position_embedding_size": 64, "head_dim": 16},
            },
        ),
        (
            gemma4(**GEMMA4_SMALL),
            {
                "architectures": ["Gemma4ForConditionalGeneration"],
                "model_type": "gemma4",
                "vision_config": {"position_embedding_size": 64, "head_dim": 16},
            },
        ),
        (
            mistral(sliding_window=None, head_dim=24),
            {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
        ),
        (
            ministral3(),
            {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
        ),
        (
            mistral4(),
            {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
        ),
        (
            four_layers(Exaone4Config, sliding_window=9),
            {
                "architectures": ["Exaone4_5_ForConditionalGeneration"],
                "model_type": "exaone4_5",
                "vision_config": {**QWEN_VISION, "num_heads": 2, "num_key_value_heads": 1},
            },
        ),
        (
            step(
                num_sliding_attention_heads=6,
                moe_router_scaling_factor=1.5,
                mlp_layer_types=["dense", "sparse", "sparse"],
                swiglu_limits=[None, 0.0, 0.4],
                swiglu_limits_shared=[0.5, 0.4, 0.0],
            ),
            {
                "architectures": ["Step3p7ForConditionalGeneration"],
                "model_type": "step3p7",
                "vision_config": {"model_type": "step3p5_vision"},
            },
        ),
        (
            minimax_m3(),
            {
                "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
                "model_type": "minimax_m3_vl",
                "projector_hidden_size": 32,
            },
        ),
        (
            llama4(),
            {
                "architectures": ["Llama4ForConditionalGeneration"],
                "model_type": "llama4",
                "vision_config": {
                    "vision_output_dim": 32,
                    "projector_input_dim": 32,
                    "projector_output_dim": 32,
                },
            },
        ),
        (
            Qwen2VLTextConfig(**tiny.SIZES, rope_parameters=MROPE),
            {
                "architectures": ["Qwen2VLForConditionalGeneration"],
                "model_type": "qwen2_vl",
                "vision_config": {"depth": 1, "num_heads": 2, "embed_dim": 32},
            },
        ),
        (
            Qwen2_5_VLTextConfig(**tiny.SIZES, rope_parameters=MROPE),
            {
                "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "model_type": "qwen2_5_vl",
                "vision_config": QWEN_VISION,
            },
        ),
        (
            Qwen3VLMoeTextConfig(
                **tiny.SIZES,
                head_dim=16,
                rope_parameters=MROPE,
                num_experts=6,
                num_experts_per_tok=3,
                moe_intermediate_size=48,
                tie_word_embeddings=False,
            ),
            {
                "architectures": ["Qwen3VLMoeForConditionalGeneration"],
                "model_type": "qwen3_vl_moe",
                "vision_config": QWEN_VISION,
                "tie_word_embeddings": False,
            },
        ),
        (
            Qwen3VLTextConfig(**tiny.SIZES, head_dim=16, rope_parameters=MROPE),
            {
                "architectures": ["Qwen3VLForConditionalGeneration"],
                "model_type": "qwen3_vl",
                "vision_config": QWEN_VISION,
            },
        ),
    ],
    ids=[
        "gemma3",
        "gemma4",
        "gemma4, keys of others",
        "mistral3",
        "ministral3",
        "mistral4",
        "exaone4.5",
        "step 3.7",
        "minimax m3",
        "llama4",
        "qwen2-vl",
        "qwen2.5-vl",
        "qwen3-vl-moe",
        "qwen3-vl",
    ],
)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # of what sees
def test_of_a_model_that_also_sees_the_part_that_reads(
    text: PretrainedConfig, whole: dict[str, Any], tmp_path: Path
) -> None:
    seeing = vision(**whole.get("vision_config", {}))
    raw = {**whole, "text_config": text.to_dict(), "vision_config": seeing}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)
    model = tiny.make_model(tmp_path, config=config)
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **tiny.ON_CPU)


STEP_3_5: dict[str, Any] = {
    **{key: value for key, value in PUBLISHED_SIZES.items() if key != "num_key_value_heads"},
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 24,
        "true_head_dim": 24,
    },
    "head_dim": 24,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "moe_intermediate_size": 48,
    "moe_layers_enum": "1,2",
    "moe_num_experts": 6,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 1.5,
    "moe_top_k": 3,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 2,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "rope_theta": [5000.0, 500.0, 5000.0, 500.0],
    "share_expert_dim": 40,
    "sliding_window": 9,
    "swiglu_limits": [0.0, 0.0, 0.4, 0.0],
    "swiglu_limits_shared": [0.0, 0.5, 0.0, 0.0],
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "use_rope_layers": [],
    "yarn_only_types": ["full_attention"],
}


def test_of_step_3_5_the_decoder_alone_as_it_was_published(tmp_path: Path) -> None:
    """Lists go on for a layer that guesses, which is not there; transformers reads it as a part."""
    text = {**STEP_3_5, "model_type": "step3p5"}
    whole = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7"}
    parts = {"text_config": text, "vision_config": vision(model_type="step3p5_vision")}
    (tmp_path / "config.json").write_text(json.dumps({**whole, **parts}))
    model = tiny.make_model(tmp_path, config=AutoConfig.from_pretrained(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("model.language_model.", "model.") for name in tensors}
    tensors = {names[name]: own for name, own in tensors.items() if "vision" not in name}
    assert "model.layers.1.moe.gate_proj.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    alone = {**text, "architectures": ["Step3p5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(alone))
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **tiny.ON_SIM)


def test_of_kimi_k2_5_the_part_that_reads(tmp_path: Path) -> None:
    """As it is published: the decoder is one part of several, by the names of its tensors too."""
    text = deepseek(DeepseekV3Config, n_group=1, topk_group=1)
    model = tiny.make_model(tmp_path, config=text)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    raw = {**whole, "text_config": {**text.to_dict(), "model_type": "kimi_k2"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **tiny.ON_CPU)


@pytest.mark.parametrize("where", [tiny.ON_CPU, tiny.ON_SIM], ids=["cpu", "sim"])
def test_a_x_k1_corrects_no_routes(where: dict[str, Any], tmp_path: Path) -> None:
    """As it is published; what its experts make has a norm, which a plain layer has for nothing."""
    model = tiny.make_model(tmp_path, config=deepseek(AXK1Config, n_group=3, topk_group=2))
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.zero_()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: own for name, own in tensors.items() if "correction" not in name}
    norm = "model.layers.{}.post_mlp_layernorm.weight"
    assert norm.format(1) in tensors and norm.format(0) not in tensors
    tensors[norm.format(0)] = torch.full((64,), 7.0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_config(tmp_path).family == "axk1"
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **where)
    tensors = {name.replace(".post_mlp", ".mlp.post_mlp"): own for name, own in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **where)


def test_of_gpt_2_the_names_that_it_was_published_with(tmp_path: Path) -> None:
    """They have no prefix, and masks lie beside the weights."""
    model = publish("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): own for name, own in tensors.items()}
    assert "h.0.attn.c_attn.weight" in tensors
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256).tril() for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **tiny.ON_SIM)


def test_internlm_2_is_llama_by_other_names(tmp_path: Path) -> None:
    """Of each key/value head the queries, the key and the value are one after the other."""
    model = tiny.make_model(tmp_path, config=llama())
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(2):
        own = f"model.layers.{i}.self_attn"
        parts = [tensors.pop(f"{own}.{name}_proj.weight").view(2, -1, 64) for name in "qkv"]
        stacked = torch.cat(parts, dim=1).reshape(-1, 64).contiguous()
        tensors[f"model.layers.{i}.attention.wqkv.weight"] = stacked
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    text = json.dumps({**PUBLISHED_SIZES, **raw, "rope_theta": 10_000.0})
    (tmp_path / "config.json").write_text(text)
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **tiny.ON_CPU)


def test_minicpm(tmp_path: Path) -> None:
    """Granite's factors by other names, and scores that are scaled as usual."""
    own = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5}
    own |= {"attention_multiplier": 0.25, "logits_scaling": 64 / 24}
    kind = GraniteConfig(**{**tiny.SIZES, **own, "tie_word_embeddings": True})
    model = tiny.make_model(tmp_path, config=kind)
    raw = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "num_experts": 0}
    raw |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 24, "rope_theta": 10_000.0}
    raw |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    text = json.dumps({**tiny.SIZES, **raw})
    (tmp_path / "config.json").write_text(text)
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **tiny.ON_CPU)


@pytest.mark.parametrize("name", ["llm_config", "text_config"])
def test_of_nemotron_vl_the_part_that_reads(name: str, tmp_path: Path) -> None:
    text = publish("nemotron-3-nano-30b", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["NemotronH_Nano_VL_V2"], "vit_hidden_size": 32, name: own}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(text, prompts, STEPS), **tiny.ON_CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_checkpoint_in_half_precision(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, dtype=dtype, tie_word_embeddings=tied, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = tiny.prompts(4, 20)
    answers = tiny.reference(model, prompts, STEPS)
    compare(tmp_path, prompts, answers, **tiny.ON_CPU)
    compare(tmp_path, prompts, answers, **tiny.ON_SIM)


IN_HALVES = [
    "multi-head",
    "opt",
    "gemma2",
    "gemma3",
    "gemma4, experts",
    "mixtral",
    "glm4-moe, groups",
    "granite",
    "gpt-oss",
    "llama4",
    "gpt-2",
    "phi",
    "apertus",
    "olmo",
    "nemotron",
    "bloom",
    "mpt, odd heads",
]


@pytest.mark.parametrize("name", IN_HALVES)
def test_arithmetic_in_float16(name: str, tmp_path: Path) -> None:
    """On a device, from a checkpoint in bfloat16: each token is one that transformers, in float32,
    finds hardly worse than the best; but for one in a hundred where there are experts, of which two
    may be chosen about as gladly for it."""
    model = tiny.make_model(tmp_path, config=CONFIGS[name], dtype=torch.bfloat16)
    prompts = tiny.prompts(5, 20, vocab=300)
    with tiny.engine(tmp_path, prompts, STEPS, **{**tiny.ON_SIM, "dtype": "float16"}) as engine:
        found = tiny.run(engine, prompts, STEPS)
    num_worse = 0
    for prompt, new in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *new[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert len(new) == STEPS
        num_worse += int((logits.amax(dim=1) - chosen >= 0.02 * logits.std()).sum())
    has_experts = read_config(tmp_path).experts is not None
    assert num_worse <= has_experts * len(prompts) * STEPS // 100


def test_the_oracle_knows_the_difference(tmp_path: Path) -> None:
    """Windows and scaled ropes change these models' tokens: the cases above could fail."""
    prompts = tiny.prompts(4, 40)
    found = {}
    for name in ("llama", "mistral, window", "qwen2", "qwen2, window layers", *ROPES):
        model = tiny.make_model(tmp_path / name, config=CONFIGS[name])
        found[name] = tiny.tokens(tiny.reference(model, prompts, 8))
    distinct = {str(answer) for answer in found.values()}
    assert len(distinct) == len(found)
