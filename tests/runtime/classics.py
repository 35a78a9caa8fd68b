"""Configurations of older families of decoders, and of such as differ from Llama in a detail: tiny
ones, each for a switch."""

from __future__ import annotations

from typing import Any

from transformers import (
    ApertusConfig,
    ArceeConfig,
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    CwmConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    HyperCLOVAXConfig,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    MinistralConfig,
    MptConfig,
    NemotronConfig,
    OlmoConfig,
    PersimmonConfig,
    PhiConfig,
    PhimoeConfig,
    PretrainedConfig,
    VaultGemmaConfig,
)

from . import tiny

__all__ = ["CLASSICS", "CLASSICS_PUBLISHED", "CLASSICS_REFUSED"]


def gpt2(kind: type[PretrainedConfig] = GPT2Config, **changes: Any) -> PretrainedConfig:
    return kind(**{**tiny.SIZES, **changes})


def gpt_neo(**changes: Any) -> PretrainedConfig:
    sizes = {**tiny.SIZES, "attention_types": [[["global", "local"], 1]], "window_size": 9}
    return GPTNeoConfig(**{**sizes, **changes})


def phimoe(**changes: Any) -> PretrainedConfig:
    """Scores are as near as those of trained models are, so that some count and some do not."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.7 * i for i in range(8)],
        "short_mscale": 1.2,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 128,
    }
    sizes = {"intermediate_size": 48, "num_local_experts": 6, "router_jitter_noise": 0.3}
    biases = {"attention_bias": True, "lm_head_bias": True, "rope_parameters": rope}
    return PhimoeConfig(**{**tiny.SIZES, **sizes, **biases, **changes})


EXPERTS: dict[str, Any] = {
    "intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
FOUR_LAYERS: dict[str, Any] = {**tiny.SIZES, "num_hidden_layers": 4, "sliding_window": 9}
CLASSICS: dict[str, PretrainedConfig] = {
    "apertus": ApertusConfig(**tiny.SIZES, rope_parameters={"rope_theta": 500.0}),
    "apertus, biases": ApertusConfig(**tiny.SIZES, attention_bias=True, tie_word_embeddings=True),
    "arcee": ArceeConfig(**tiny.SIZES),
    "arcee, biases": ArceeConfig(**tiny.SIZES, attention_bias=True, mlp_bias=True, head_dim=24),
    "gemma": GemmaConfig(**tiny.SIZES, head_dim=24),
    "gemma, biases": GemmaConfig(
        **tiny.SIZES, head_dim=24, attention_bias=True, tie_word_embeddings=False
    ),
    "gpt-2": gpt2(),
    "gpt-2, not scaled": gpt2(
        scale_attn_weights=False, n_inner=96, tie_word_embeddings=False, activation_function="relu"
    ),
    "gpt-bigcode": gpt2(GPTBigCodeConfig),
    "gpt-bigcode, multi-head": gpt2(GPTBigCodeConfig, multi_query=False, n_inner=96),
    "gpt-j": GPTJConfig(**tiny.SIZES, rotary_dim=8),
    "gpt-neo": gpt_neo(),
    "gpt-neo, unlike layers": gpt_neo(
        num_hidden_layers=3, attention_types=[[["local"], 2], [["global"], 1]], intermediate_size=96
    ),
    "jais 2": Jais2Config(**tiny.SIZES),
    "nemotron": NemotronConfig(**tiny.SIZES, head_dim=24),
    "nemotron, biases": NemotronConfig(
        **tiny.SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "persimmon": PersimmonConfig(**tiny.SIZES),
    "persimmon, no norms of heads": PersimmonConfig(
        **tiny.SIZES, qk_layernorm=False, tie_word_embeddings=True
    ),
    "phi": PhiConfig(**tiny.SIZES),
    "phi, norms of heads": PhiConfig(**tiny.SIZES, qk_layernorm=True),
    "biogpt": BioGptConfig(**tiny.SIZES),
    "biogpt, not scaled": BioGptConfig(
        **tiny.SIZES, scale_embedding=False, tie_word_embeddings=False
    ),
    "bloom": BloomConfig(**tiny.SIZES),
    "bloom, odd heads": BloomConfig(**{**tiny.SIZES, "num_attention_heads": 6, "hidden_size": 96}),
    "mpt": MptConfig(**tiny.SIZES),
    "mpt, odd heads": MptConfig(
        **{**tiny.SIZES, "num_attention_heads": 6, "hidden_size": 96},
        attn_config={"clip_qkv": 0.7},
        tie_word_embeddings=False,
    ),
    "codegen": CodeGenConfig(
        **{**tiny.SIZES, "num_attention_heads": 8, "hidden_size": 96}, rotary_dim=8
    ),
    "cwm": CwmConfig(**{**FOUR_LAYERS, "bos_token_id": 0}, head_dim=24),
    "granite moe shared": GraniteMoeSharedConfig(
        **{**tiny.SIZES, **EXPERTS}, shared_intermediate_size=72
    ),
    "granite moe, none shared": GraniteMoeSharedConfig(
        **{**tiny.SIZES, **EXPERTS}, shared_intermediate_size=0
    ),
    "helium": HeliumConfig(**tiny.SIZES, head_dim=16),
    "helium, biases": HeliumConfig(
        **tiny.SIZES, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "hyperclova x": HyperCLOVAXConfig(
        **tiny.SIZES, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=0.5
    ),
    "hyperclova x, norms before": HyperCLOVAXConfig(
        **tiny.SIZES, attention_multiplier=0.3, use_post_norm=False
    ),
    "internlm 3": InternLM3Config(**tiny.SIZES, head_dim=24),
    "internlm 3, biases": InternLM3Config(**tiny.SIZES, attention_bias=True, mlp_bias=True),
    "iquest-coder": IQuestCoderConfig(**tiny.SIZES, head_dim=24),
    "olmo": OlmoConfig(**tiny.SIZES),
    "olmo, a limit": OlmoConfig(**tiny.SIZES, clip_qkv=0.7, attention_bias=True),
    "ministral": MinistralConfig(
        **FOUR_LAYERS,
        head_dim=24,
        layer_types=["full_attention", *["sliding_attention"] * 3],
    ),
    "phi-moe": phimoe(),
    "phi-moe, no biases": phimoe(
        attention_bias=False, lm_head_bias=False, sliding_window=9, rope_parameters=None
    ),
    "vaultgemma": VaultGemmaConfig(
        **{**FOUR_LAYERS, "num_hidden_layers": 2}, head_dim=24, query_pre_attn_scalar=20
    ),
}

CLASSICS_REFUSED: dict[str, str] = {
    "apertus": "activations with weights",
    "apertus, biases": "activations with weights",
    "codegen": "projections stacked in blocks of heads",
    "bloom": "scores that sink with the distance and a norm of embeddings",
    "bloom, odd heads": "scores that sink with the distance",
    "mpt": "scores that sink with the distance",
    "mpt, odd heads": "scores that sink with the distance",
}
"""What cannot be cut over ranks, and what is said of it."""

CLASSICS_PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_ctx": 256,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 256,
    },
    "gpt-neo-125m": {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "activation_function": "gelu_new",
        "attention_layers": ["global", "local"],
        "attention_types": [[["global", "local"], 1]],
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-5,
        "num_heads": 4,
        "num_layers": 2,
        "window_size": 9,
    },
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_embd": 64,
        "n_head": 4,
        "n_inner": None,
        "n_layer": 2,
        "n_positions": 256,
        "rotary": True,
        "rotary_dim": 8,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "rope_scaling": None,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    },
    "gemma-2b": {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "attention_bias": False,
        "head_dim": 24,
        "hidden_act": "gelu",
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    },
    "minitron-4b": {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "attention_bias": False,
        "head_dim": 24,
        "hidden_act": "relu2",
        "mlp_bias": False,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    },
    "olmo-7b": {
        "architectures": ["OlmoForCausalLM"],
        "model_type": "olmo",
        "attention_bias": False,
        "clip_qkv": 0.5,
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "pad_token_id": 1,
        "rope_scaling": None,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    },
    "cwm": {
        "architectures": ["CwmForCausalLM"],
        "model_type": "cwm",
        "head_dim": 24,
        "layer_types": ["full_attention", "sliding_attention"],
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
        "rope_theta": 500.0,
        "sliding_window": 9,
        "tie_word_embeddings": False,
    },
    "bloom-7b1": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "hidden_size": 64,
        "layer_norm_epsilon": 1e-5,
        "n_head": 4,
        "n_inner": None,
        "n_layer": 2,
        "offset_alibi": 100,
        "pretraining_tp": 1,
        "seq_length": 256,
        "slow_but_exact": False,
    },
    "mpt-7b": {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "d_model": 64,
        "expansion_ratio": 4,
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 256,
        "n_heads": 4,
        "n_layers": 2,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
    },
    "starcoderbase": {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "multi_query": True,
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 160,
        "n_layer": 2,
        "n_positions": 256,
        "scale_attn_weights": True,
    },
    "apertus-8b": {
        "architectures": ["ApertusForCausalLM"],
        "model_type": "apertus",
        "attention_bias": False,
        "hidden_act": "xielu",
        "mlp_bias": False,
        "pad_token_id": 3,
        "post_norm": False,
        "qk_norm": True,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    },
    "helium-1-2b": {
        "architectures": ["HeliumForCausalLM"],
        "model_type": "helium",
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rms_norm_eps": 1e-8,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    },
}
"""config.json as these were published, in the spelling of their day."""
