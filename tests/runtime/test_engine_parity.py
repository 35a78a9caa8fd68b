"""The engine's logits and greedy tokens against transformers, for each switch of a model.

Tiny random models, computed in float32 by both. The engine runs with weights, KV cache and
activations spread over the tiers; transformers runs row by row.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

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


CONFIGS: dict[str, PretrainedConfig] = {
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


@pytest.mark.parametrize(
    ("name", "options"), [*zip(CONFIGS, cycle([tiny.ON_SIM, tiny.ON_CPU]))], ids=[*CONFIGS]
)
def test_switch(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = tiny.make_model(tmp_path, config=config)
    prompts = tiny.prompts(4, 40, vocab=config.vocab_size)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_checkpoint_in_half_precision(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, dtype=dtype, tie_word_embeddings=tied, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = tiny.prompts(4, 20)
    answers = tiny.reference(model, prompts, STEPS)
    compare(tmp_path, prompts, answers, **tiny.ON_CPU)
    compare(tmp_path, prompts, answers, **tiny.ON_SIM)


def test_the_oracle_knows_the_difference(tmp_path: Path) -> None:
    """Windows and scaled ropes change these models' tokens: the cases above could fail."""
    prompts = tiny.prompts(4, 40)
    found = {}
    for name in ("llama", "mistral, window", "qwen2", "qwen2, window layers", *ROPES):
        model = tiny.make_model(tmp_path / name, config=CONFIGS[name])
        found[name] = tiny.tokens(tiny.reference(model, prompts, 8))
    distinct = {str(answer) for answer in found.values()}
    assert len(distinct) == len(found)
