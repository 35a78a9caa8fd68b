"""Embeddings and scores of labels against transformers, row by row, in float32.

Tiny random models; the engine runs with weights, keys and activations spread over the tiers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.tiny import ON_CPU, ON_SIM, SIZES, VOCAB
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OlmoConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from freight.errors import ModelError
from freight.plan.workload import Workload
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Prefix, Request, SamplingParams

LENGTHS = (1, 2, 7, 30, 31, 64, 200, 256)
"""The longest have all positions that there are: nothing is to follow them."""
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gemma 2, capped logits": Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=3.0),
    "gemma 3": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=16),
    "falcon": FalconConfig(**SIZES, alibi=False),
    "opt": OPTConfig(**SIZES, ffn_dim=160, word_embed_proj_dim=64),
    "gpt 2, names of its own": GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256
    ),
    "olmo, norms without gains": OlmoConfig(**SIZES),
    "deepseek v3, latents": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
    "qwen 3 next, states": Qwen3NextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}


def make_rows(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [[int(own) for own in generator.integers(3, VOCAB, count)] for count in lengths]


def make_model(kind: Any, config: PretrainedConfig, directory: Path, **changes: Any) -> Any:
    own = type(config)(**{**config.to_dict(), "pad_token_id": 0, **changes})
    torch.manual_seed(11)
    model = kind.from_config(own, dtype=torch.float32).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(3.0) if weights.dim() > 1 else weights.add_(0.1)
    model.save_pretrained(directory)
    return model


def wanted(model: Any, rows: list[list[int]]) -> list[np.ndarray]:
    found = []
    for row in rows:
        with torch.no_grad():
            made = model(torch.tensor([row]), use_cache=False)
        own = made.logits[0] if hasattr(made, "logits") else made.last_hidden_state[0, -1]
        found.append(own.numpy())
    return found


def read(
    directory: Path,
    rows: list[list[int]],
    options: dict[str, Any],
    prefixes: list[Prefix | None] | None = None,
) -> list[np.ndarray]:
    lengths = [len(row) for row in rows]
    workload = Workload(
        num_rows=len(rows),
        max_prompt_tokens=max(lengths),
        max_new_tokens=1,
        max_total_tokens=max(lengths) + 1,
        total_prompt_tokens=sum(lengths),
        total_new_tokens=len(rows),
        lengths=tuple((1, own, 1) for own in lengths),
    )
    engine = build_engine(
        directory, options=EngineOptions(**{"dtype": "float32", **options}), workload=workload
    )
    requests = [
        Request(
            index=index,
            prompt_ids=row,
            params=SamplingParams(max_tokens=1),
            prefix=None if prefixes is None else prefixes[index],
        )
        for index, row in enumerate(rows)
    ]
    try:
        made = {own.index: own for own in engine.run(iter(requests))}
    finally:
        engine.close()
    assert sorted(made) == [*range(len(rows))]
    assert all(own.num_new_tokens == 0 and own.text == "" for own in made.values())
    vectors = [made[index].vector for index in range(len(rows))]
    assert all(own is not None and own.dtype == np.float32 for own in vectors)
    return [own for own in vectors if own is not None]


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5 * float(abs(other).max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings(name: str, tmp_path: Path) -> None:
    model, rows = make_model(AutoModel, CONFIGS[name], tmp_path), make_rows()
    expected = wanted(model, rows)
    assert_close(read(tmp_path, rows, {**ON_CPU, "disk_dir": tmp_path}), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_labels(name: str, tmp_path: Path) -> None:
    kind = AutoModelForSequenceClassification
    model, rows = make_model(kind, CONFIGS[name], tmp_path, num_labels=5), make_rows()
    expected = wanted(model, rows)
    found = read(tmp_path, rows, {**ON_CPU, "disk_dir": tmp_path})
    assert [len(own) for own in found] == [5] * len(rows)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
@pytest.mark.parametrize(
    "options",
    [
        {**ON_SIM, "gpu_memory_bytes": 64 << 20},
        {"device": "cpu", "admission": "refill", "batch_tokens": 24, "micro_batch_size": 3},
        {"device": "cpu", "admission": "diagonal", "num_micro_batches": 3, "micro_batch_size": 2},
        {"device": "cpu", "admission": "row", "verify": True},
    ],
    ids=["simulated device", "refill in chunks", "diagonal", "rows verified"],
)
def test_no_policy_changes_them(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model, rows = make_model(kind, CONFIGS["qwen3"], tmp_path), make_rows()
    expected = wanted(model, rows)
    assert_close(read(tmp_path, rows, {**options, "disk_dir": tmp_path}), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        {**ON_SIM, "gpu_memory_bytes": 64 << 20, "weights_percent": (20.0, 30.0, 50.0)},
        {"device": "cpu", "weight_bits": 8},
        {"device": "cpu", "lossless": True},
        {"device": "cpu", "compute": "int8"},
    ],
    ids=["in memory", "simulated device", "8 bits", "short exponents", "integer products"],
)
def test_what_is_read_is_made_in_float32(options: dict[str, Any], tmp_path: Path) -> None:
    """Rewards that differ by less than bfloat16 tells apart come out different."""
    kind = AutoModelForSequenceClassification
    model, rows = make_model(kind, CONFIGS["qwen3"], tmp_path, num_labels=1), make_rows()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    options = {**options, "dtype": "bfloat16", "disk_dir": tmp_path, "verify": True}
    options["compressed_dir"] = tmp_path / "kept"
    streams = read(tmp_path, rows, {**options, "task": "embed"})
    rewards = np.concatenate(read(tmp_path, rows, options))
    for made in (np.concatenate(streams), rewards):
        assert (torch.from_numpy(made).bfloat16().float().numpy() != made).mean() > 0.9
    factors = model.score.weight.detach().float().numpy()[0].astype(np.float64)
    expected = np.array([own.astype(np.float64) @ factors for own in streams])
    bound = 1e-5 if options.keys().isdisjoint({"weight_bits", "compute"}) else 2e-2
    np.testing.assert_allclose(rewards, expected, rtol=bound, atol=bound * abs(expected).max())


def test_rows_that_begin_alike(tmp_path: Path) -> None:
    model = make_model(AutoModel, CONFIGS["llama"], tmp_path)
    first, *others = make_rows((40, 3, 9, 17, 1))
    rows = [first + own for own in others] * 3
    shared = [Prefix(key=0, num_tokens=40) for _ in rows]
    expected = wanted(model, rows)
    assert_close(read(tmp_path, rows, {"device": "cpu"}, shared), expected)


def rewrite(directory: Path, **changes: Any) -> None:
    """A config.json with some keys changed, or where they are None, without them."""
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: own for key, own in raw.items() if own is not None}))


def test_labels_that_the_matrix_has_no_rows_for(tmp_path: Path) -> None:
    make_model(AutoModelForSequenceClassification, CONFIGS["qwen3"], tmp_path, num_labels=3)
    rewrite(tmp_path, id2label={str(number): str(number) for number in range(4)})
    with pytest.raises(ModelError, match=r"expected \[4, 64\] for 4 labels by id2label or num_l"):
        read(tmp_path, make_rows((5,)), {"device": "cpu"})


def test_a_model_without_a_head_that_names_no_architecture(tmp_path: Path) -> None:
    """As a bare model's config.json may be written: what to do is said, and does it."""
    model, rows = make_model(AutoModel, CONFIGS["qwen3"], tmp_path), make_rows((5, 9))
    rewrite(tmp_path, architectures=None)
    with pytest.raises(ModelError) as caught:
        read(tmp_path, rows, {"device": "cpu"})
    assert "lm_head.weight is missing" in caught.value.limit
    assert "task embed" in caught.value.advice
    expected = wanted(model, rows)
    assert_close(read(tmp_path, rows, {"device": "cpu", "task": "embed"}), expected)
    assert '"architectures": ["Qwen3Model"]' in caught.value.advice
    rewrite(tmp_path, architectures=["Qwen3Model"])
    assert_close(read(tmp_path, rows, {"device": "cpu"}), expected)


def test_a_model_that_generates_may_embed(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, rows = make_model(AutoModelForCausalLM, CONFIGS["qwen2, tied"], tmp_path), make_rows()
    expected = wanted(model.model, rows)
    for bits in ({}, {"weights_percent": (0.0, 20.0, 80.0)}):
        options = {"device": "cpu", "task": "embed", **bits}
        assert_close(read(tmp_path, rows, options), expected)


def test_a_model_that_generates_may_embed_in_few_bits(tmp_path: Path) -> None:
    """Kept apart from what the same model keeps to generate: other matrices are wanted."""
    from transformers import AutoModelForCausalLM

    make_model(AutoModelForCausalLM, CONFIGS["llama"], tmp_path)
    rows, kept = make_rows((5, 40)), tmp_path / "kept"
    options = {"device": "cpu", "weight_bits": 8, "compressed_dir": kept}
    plain = read(tmp_path, rows, {"device": "cpu", "task": "embed"})
    found = read(tmp_path, rows, {**options, "task": "embed"})
    for own, other in zip(found, plain, strict=True):
        assert 1e-6 < float(np.linalg.norm(own - other) / np.linalg.norm(other)) < 0.1
    first = {path: path.stat().st_mtime_ns for path in kept.rglob("weights.bin")}
    engine_options = EngineOptions(**options, dtype="float32")
    workload = Workload.of_alike(1, 5, 1)
    build_engine(tmp_path, options=engine_options, workload=workload).close()
    build_engine(tmp_path, options=replace(engine_options, task="embed"), workload=workload).close()
    after = {path: path.stat().st_mtime_ns for path in kept.rglob("weights.bin")}
    assert len(after) == 2 and first.items() <= after.items()
