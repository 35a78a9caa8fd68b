"""Keys and values that are computed again of what came into attention: the answers of transformers.

For each way in which a model makes its keys; rows on all tiers, half or all of the layers. Bytes
over the links are those of the narrower pages.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from freight.errors import InputError
from freight.model.config import read_config
from freight.model.decoder import build_programme
from freight.plan.policy import Policy, Split
from freight.plan.recomputation import why_not_recomputed

from . import tiny
from .test_engine_parity import cohere, gemma3, gemma4

STEPS = 8
PROMPTS = tiny.prompts(7, 60)
SIZES = {**tiny.SIZES, "num_key_value_heads": 4, "num_hidden_layers": 4}
OTHER = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
OPT: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "ffn_dim": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "opt": OPTConfig(**OPT, word_embed_proj_dim=64, do_layer_norm_before=True),
    "opt, norms behind": OPTConfig(**OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
    "gpt-neox, parallel": GPTNeoXConfig(**OTHER, use_parallel_residual=True, rotary_pct=0.25),
    "gpt-neox": GPTNeoXConfig(**OTHER, use_parallel_residual=False),
    "falcon, two norms": FalconConfig(
        **OTHER, num_kv_heads=4, new_decoder_architecture=True, bias=False
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**{**SIZES, "head_dim": 32}),
    "phi3": Phi3Config(**{**SIZES, "pad_token_id": 0}),
    "gemma2": Gemma2Config(**{**SIZES, "head_dim": 32, "sliding_window": 24}),
    "gemma3": gemma3(**{**SIZES, "head_dim": 32, "sliding_window": 24, "num_hidden_layers": 3}),
    "gemma4": gemma4(sliding_window=24, attention_k_eq_v=False),
    "gemma4, keys as values": gemma4(sliding_window=24),
    "olmo2": Olmo2Config(**SIZES),
    "gpt-2": GPT2Config(**OTHER),
    "olmo": OlmoConfig(**SIZES, clip_qkv=0.7),
    "bloom": BloomConfig(**OTHER),
    "command r": cohere(**SIZES, use_qk_norm=True),
}

ON_SIM: dict[str, Any] = {
    **tiny.ON_SIM,
    "kv_percent": (30.0, 40.0, 30.0),
    "cpu_attention_percent": 0.0,
}


def answers(directory: Path, **options: Any) -> tuple[list[list[int]], Counter[str]]:
    """Tokens, and bytes over each link."""
    with tiny.engine(directory, PROMPTS, STEPS, **options) as engine:
        loaded = Counter(engine.traffic.moved)
        found = tiny.run(engine, PROMPTS, STEPS)
        return found, Counter(engine.traffic.moved) - loaded


@pytest.mark.parametrize("name", MODELS)
def test_the_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, config=MODELS[name])
    expected = [own.token_ids for own in tiny.reference(model, PROMPTS, STEPS)]
    for options in (ON_SIM, tiny.ON_CPU):
        for share in (50.0, 100.0):
            found, _ = answers(tmp_path, **options, recompute_percent=share)
            assert found == expected


def test_half_as_many_bytes_cross_the_links(tmp_path: Path) -> None:
    """Keys and values are twice as wide as what they are made of: so are their pages."""
    tiny.make_model(tmp_path, config=MODELS["llama"])
    options = {**ON_SIM, "kv_percent": (0.0, 60.0, 40.0), "activations_percent": (100.0, 0.0, 0.0)}
    _, near = answers(tmp_path, **{**options, "kv_percent": (100.0, 0.0, 0.0)})
    kept, half, all_layers = (
        answers(tmp_path, **options, recompute_percent=share)[1] for share in (0.0, 50.0, 100.0)
    )
    for link in ("host to device", "device to host", "disk read", "disk write"):
        own = kept[link] - near[link]
        assert own > 0
        assert half[link] - near[link] == own * 3 / 4
        assert all_layers[link] - near[link] == own / 2


def test_memory_for_rows_elsewhere_is_halved(tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=MODELS["llama"])
    options = {**ON_SIM, "kv_percent": (0.0, 100.0, 0.0)}
    usage = []
    for share in (0.0, 100.0):
        with tiny.engine(tmp_path, PROMPTS, STEPS, **options, recompute_percent=share) as engine:
            usage.append(engine.plan.geometry.usage)
            told = ", keys elsewhere computed again in 100% of the layers"
            assert (told in engine.summary()) == (share > 0)
    assert usage[1]["cpu"]["KV cache"] * 2 == usage[0]["cpu"]["KV cache"] > 0
    assert usage[1]["gpu"]["KV slots"] * 2 == usage[0]["gpu"]["KV slots"] > 0
    assert usage[1]["gpu"]["recomputed KV"] > usage[0]["gpu"]["recomputed KV"] == 0


@pytest.mark.parametrize("num_layers", [1, 2, 5, 24])
@pytest.mark.parametrize("percent", [0, 10, 33, 50, 100])
def test_layers_are_spread_evenly(num_layers: int, percent: int) -> None:
    policy = Policy(
        compute_tier="gpu",
        weights=Split(gpu=1.0),
        kv=Split(cpu=1.0),
        activations=Split(gpu=1.0),
        micro_batch_size=1,
        num_micro_batches=1,
        max_batch_tokens=8,
        recomputed=percent / 100,
    )
    chosen = policy.recomputes(num_layers)
    assert len(chosen) == num_layers
    assert sum(chosen) == round(percent / 100 * num_layers)
    for end in range(num_layers + 1):
        assert abs(sum(chosen[:end]) - end * sum(chosen) / num_layers) < 1


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (MODELS["llama"], {"cpu_attention_percent": 50.0}, "attended on the CPU"),
        (MODELS["llama"], {"kv_bits": 4}, "compressed"),
        (LlamaConfig(**tiny.SIZES), {}, "would save nothing"),
        (
            LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            {},
            "rotary angles",
        ),
        (MODELS["llama"], {"recompute_percent": 101.0}, "--recompute-kv 101"),
    ],
)
def test_what_cannot_be_is_refused(
    config: PretrainedConfig, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny.make_model(tmp_path, config=config)
    asked = {**ON_SIM, "recompute_percent": 100.0, **options}
    with pytest.raises(InputError, match=words):
        answers(tmp_path, **asked)


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_made_of_the_residual_stream_alone(name: str, tmp_path: Path) -> None:
    MODELS[name].save_pretrained(tmp_path)
    config = read_config(tmp_path)
    programme = build_programme(config)
    assert why_not_recomputed(config, programme) is None
    for unit in programme.units:
        if unit.kind == "attention":
            own = unit.keys()
            assert own is not None
            assert set(own.weights) < set(unit.weights)
