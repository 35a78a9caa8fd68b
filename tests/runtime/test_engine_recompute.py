"""Keys and values that are computed again of what came into attention: the answers of transformers.

For each way in which a model makes its keys; rows on all tiers, half or all of the layers. Bytes
over the links are those of the narrower pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from freight.errors import InputError
from freight.plan.policy import Policy

from . import tiny

STEPS = 8
PROMPTS = tiny.prompts(7, 60)
SIZES = {**tiny.SIZES, "num_key_value_heads": 4, "num_hidden_layers": 4}
OTHER = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}

MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "opt": OPTConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        ffn_dim=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
        do_layer_norm_before=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    ),
    "opt, norms behind": OPTConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        ffn_dim=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    ),
    "gpt-neox, parallel": GPTNeoXConfig(**OTHER, use_parallel_residual=True, rotary_pct=0.25),
    "gpt-neox": GPTNeoXConfig(**OTHER, use_parallel_residual=False),
    "falcon, two norms": FalconConfig(
        **OTHER, num_kv_heads=4, new_decoder_architecture=True, bias=False
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**{**SIZES, "head_dim": 32}),
    "phi3": Phi3Config(**{**SIZES, "pad_token_id": 0}),
    "gemma2": Gemma2Config(**{**SIZES, "head_dim": 32, "sliding_window": 24}),
}

ON_SIM: dict[str, Any] = {
    **tiny.ON_SIM,
    "kv_percent": (30.0, 40.0, 30.0),
    "cpu_attention_percent": 0.0,
}


def answers(directory: Path, **options: Any) -> tuple[list[list[int]], dict[str, int]]:
    with tiny.engine(directory, PROMPTS, STEPS, **options) as engine:
        loaded = dict(engine.traffic.moved)
        found = tiny.run(engine, PROMPTS, STEPS)
        moved = {link: size - loaded.get(link, 0) for link, size in engine.traffic.moved.items()}
        return found, moved


@pytest.mark.parametrize("name", MODELS)
def test_the_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, config=MODELS[name])
    expected = [own.token_ids for own in tiny.reference(model, PROMPTS, STEPS)]
    for options in (ON_SIM, tiny.ON_CPU):
        for share in (50.0, 100.0):
            found, _ = answers(tmp_path, **options, recompute_percent=share)
            assert found == expected
