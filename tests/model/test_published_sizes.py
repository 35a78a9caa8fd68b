"""Parameters of models by their published config.json, against the numbers that were published."""

from __future__ import annotations

from typing import Any

import pytest

from freight.errors import ModelError
from freight.model.config import parse_config
from freight.model.decoder import count_parameters

GPT2: dict[str, Any] = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50_257}
GPTJ: dict[str, Any] = {"n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50_400}
GPT_NEO: dict[str, Any] = {
    "attention_types": [[["global", "local"], 12]],
    "hidden_size": 2048,
    "num_heads": 16,
    "num_layers": 24,
    "vocab_size": 50_257,
}
PHI2: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 51_200,
}
GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "vocab_size": 256_000,
}
STARCODER: dict[str, Any] = {
    "n_embd": 6144,
    "n_head": 48,
    "n_inner": 24_576,
    "n_layer": 40,
    "n_positions": 8192,
    "vocab_size": 49_152,
}

OLMO: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 50_304,
}
INTERNLM: dict[str, Any] = {
    **OLMO,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "vocab_size": 92_544,
}
INTERNLM3: dict[str, Any] = {
    **OLMO,
    "head_dim": 128,
    "intermediate_size": 10_240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "vocab_size": 128_512,
}
PHI_MOE: dict[str, Any] = {
    "attention_bias": True,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_064,
}
ROPE: dict[str, Any] = {"type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3}
VAULT: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "vocab_size": 256_000,
}
BIOGPT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 42_384,
}

BLOOM: dict[str, Any] = {"hidden_size": 14_336, "n_layer": 70, "n_head": 112, "vocab_size": 250_880}
MPT: dict[str, Any] = {
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None},
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "vocab_size": 50_432,
}

MINICPM: dict[str, Any] = {
    "dim_model_base": 256,
    "hidden_size": 2304,
    "intermediate_size": 5760,
    "max_position_embeddings": 4096,
    "num_attention_heads": 36,
    "num_hidden_layers": 40,
    "num_key_value_heads": 36,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "vocab_size": 122_753,
}

PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt2": ("gpt2", GPT2, 124_439_808),
    "gpt2-xl": ("gpt2", {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),
    "gpt-j-6b": ("gptj", {**GPTJ, "rotary_dim": 64}, 6_050_882_784),
    "gpt-neo-1.3b": ("gpt_neo", GPT_NEO, 1_315_575_808),
    "phi-2": ("phi", PHI2, 2_779_683_840),
    "gemma-7b": ("gemma", GEMMA, 8_537_680_896),
    "bloom": ("bloom", BLOOM, 176_247_271_424),
    "mpt-7b": ("mpt", MPT, 6_649_286_656),
    "biogpt": ("biogpt", BIOGPT, 346_763_264),
    "internlm2-7b": ("internlm2", INTERNLM, 7_737_708_544),
    "internlm3-8b": ("internlm3", INTERNLM3, 8_804_241_408),
    "phi-3.5-moe": ("phimoe", PHI_MOE, 41_873_153_344),
    "olmo-7b": ("olmo", OLMO, 6_888_095_744),
    "vaultgemma-1b": ("vaultgemma", VAULT, 1_038_741_120),
    "starcoder": ("gpt_bigcode", STARCODER, 15_517_456_384),
    "minicpm-2b": ("minicpm", MINICPM, 2_724_880_896),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_were_published(name: str) -> None:
    kind, raw, parameters = PUBLISHED[name]
    assert count_parameters(parse_config({"model_type": kind, **raw})) == parameters


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("minicpm-2b", {"num_experts": 8}, "num_experts is 8, only 0"),
        ("minicpm-2b", {"scale_depth": "deep"}, "scale_depth is 'deep'"),
        ("minicpm-2b", {"dim_model_base": None}, "dim_model_base"),
        ("gpt2", {"n_embd": "768"}, "n_embd is '768'"),
        ("gpt-j-6b", {"rotary_dim": None}, "0 elements of a head"),
        ("gpt-neo-1.3b", {"attention_types": [[["global", "near"], 12]]}, "layer_types is"),
        ("gpt-neo-1.3b", {"attention_types": [[["global"], 1 << 40]]}, "layer_types is"),
        ("gpt-neo-1.3b", {"attention_types": [[["local"], 3]]}, "3 attention windows"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "only False is supported"),
        ("bloom", {"seq_length": 1 << 20}, "positions are more than keys carry"),
        ("mpt-7b", {"attn_config": {"alibi": False}}, "alibi is False"),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, "qk_ln is True"),
        ("mpt-7b", {"no_bias": False}, "no_bias is False"),
        ("olmo-7b", {"clip_qkv": 0.0}, "qkv_limit is 0.0"),
        ("phi-3.5-moe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("phi-3.5-moe", {"rope_scaling": ROPE}, "factors_differ is True"),
        ("phi-3.5-moe", {"router_jitter_noise": 0.0}, "a margin above 0"),
        ("phi-2", {"qk_layernorm": "yes"}, "qk_layernorm is 'yes'"),
    ],
    ids=str,
)
def test_what_is_not_described_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    kind, raw, _ = PUBLISHED[name]
    with pytest.raises(ModelError, match=words):
        parse_config({"model_type": kind, **raw, **change})


def test_rows_of_minicpm_end_where_it_would_choose_keys() -> None:
    raw = {"model_type": "minicpm", **MINICPM, "max_position_embeddings": 32_768}
    assert parse_config(raw).max_positions == 32_768
    assert parse_config({**raw, "sparse_config": {"kernel_size": 32}}).max_positions == 8192
    assert parse_config({**raw, "sparse_config": {"dense_len": 4096}}).max_positions == 4096
    with pytest.raises(ModelError, match="max_position_embeddings is 'long'"):
        parse_config({**raw, "sparse_config": {"dense_len": "long"}})


def test_heads_are_whole_blocks() -> None:
    raw = {"model_type": "codegen", "n_embd": 64, "n_layer": 2, "rotary_dim": 8, "vocab_size": 96}
    assert parse_config({**raw, "n_head": 4}).qkv_blocks == 4
    with pytest.raises(ModelError, match="2 heads are not 4 equal blocks"):
        parse_config({**raw, "n_head": 2})


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("gemma3_text", "gemma3"),
        ("llama4_text", "llama4"),
        ("ministral", "mistral"),
        ("ministral3", "mistral"),
        ("qwen2_vl_text", "qwen2"),
        ("qwen2_5_vl_text", "qwen2"),
        ("qwen3_5_text", "qwen3_5"),
        ("qwen3_5_moe_text", "qwen3_5_moe"),
        ("qwen3_vl_text", "qwen3"),
        ("qwen3_vl_moe_text", "qwen3_vl_moe"),
    ],
)
def test_decoders_alone_are_known_by_their_type(kind: str, family: str) -> None:
    """Without an architecture, as a part of a model is saved."""
    raw = {**OLMO, "model_type": kind, "num_key_value_heads": 8, "num_experts": 8}
    assert parse_config(raw).family == family
