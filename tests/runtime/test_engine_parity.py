"""The engine's logits and greedy tokens against transformers, for each switch of a model.

Tiny random models, computed in float32 by both. The engine runs with weights, KV cache and
activations spread over the tiers; transformers runs row by row.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from freight.model.config import read_config
from freight.model.decoder import count_parameters

from . import tiny

STEPS = 32
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


FAMILIES: dict[str, PretrainedConfig] = {
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


def compare(
    directory: Path, prompts: list[list[int]], answers: list[tiny.Answer], **options: Any
) -> None:
    with tiny.engine(directory, prompts, STEPS, **options) as engine:
        captured = tiny.capture_logits(engine)
        found = tiny.run(engine, prompts, STEPS)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mine = torch.stack([captured[row, len(prompt) + step] for step in range(STEPS)])
        torch.testing.assert_close(mine, answer.logits, rtol=0, atol=1e-4)
    assert found == tiny.tokens(answers)
    assert len(captured) == STEPS * len(prompts)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, config=CONFIGS[name])
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(read_config(tmp_path)) == expected


@pytest.mark.parametrize(
    ("name", "options"), [*zip(CONFIGS, cycle([tiny.ON_SIM, tiny.ON_CPU]))], ids=[*CONFIGS]
)
def test_switch(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = tiny.make_model(tmp_path, config=config)
    prompts = tiny.prompts(4, 40, vocab=config.vocab_size)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **options)


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
    ],
    ids=str,
)
def test_what_was_published_matters(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """With another value transformers computes other logits: reading it wrongly would be seen."""
    prompt = tiny.prompts(1, 40)
    found = [tiny.reference(publish(name, tmp_path, **own), prompt, 8)[0] for own in ({}, change)]
    assert (found[0].logits[0] - found[1].logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_checkpoint_in_half_precision(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, dtype=dtype, tie_word_embeddings=tied, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = tiny.prompts(4, 20)
    answers = tiny.reference(model, prompts, STEPS)
    compare(tmp_path, prompts, answers, **tiny.ON_CPU)
    compare(tmp_path, prompts, answers, **tiny.ON_SIM)


@pytest.mark.parametrize("name", ["multi-head", "opt", "gemma2", "mixtral"])
def test_arithmetic_in_float16(name: str, tmp_path: Path) -> None:
    """On a device, from a checkpoint in bfloat16: each token is one that transformers, in float32,
    finds hardly worse than the best."""
    model = tiny.make_model(tmp_path, config=CONFIGS[name], dtype=torch.bfloat16)
    prompts = tiny.prompts(5, 20, vocab=300)
    with tiny.engine(tmp_path, prompts, STEPS, **{**tiny.ON_SIM, "dtype": "float16"}) as engine:
        found = tiny.run(engine, prompts, STEPS)
    for prompt, new in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *new[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert len(new) == STEPS
        assert (logits.amax(dim=1) - chosen).max() < 0.02 * logits.std()


def test_the_oracle_knows_the_difference(tmp_path: Path) -> None:
    """Windows and scaled ropes change these models' tokens: the cases above could fail."""
    prompts = tiny.prompts(4, 40)
    found = {}
    for name in ("llama", "mistral, window", "qwen2", "qwen2, window layers", *ROPES):
        model = tiny.make_model(tmp_path / name, config=CONFIGS[name])
        found[name] = tiny.tokens(tiny.reference(model, prompts, 8))
    distinct = {str(answer) for answer in found.values()}
    assert len(distinct) == len(found)
