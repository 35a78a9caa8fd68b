"""Layers that keep of each row the pages alone that their window reaches: never another answer, less
memory, fewer bytes.

Windows are a few tokens and pages fewer, so that rows leave most of what they had behind. Lengths,
rules, chunks, homes, samples and shared beginnings are drawn at random, as where all is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, GptOssConfig, MistralConfig, PretrainedConfig, Qwen2Config

from freight.entrypoints.bench.closed_form import SweepLog, logged_bytes
from freight.runtime.options import EngineOptions
from freight.runtime.request import SamplingParams

from . import tiny
from .draws import draw_entering
from .test_engine_admission import (
    BEGINNINGS,
    CPU,
    DISK,
    GPU,
    PROMPTS,
    STEPS,
    Asked,
    asked_alike,
    asked_rows,
    check,
    engine,
    homes,
    mixed_homes,
    moves_of,
    score,
    workload,
)

WINDOW = 9
SIZES: dict[str, Any] = {**tiny.SIZES, "num_hidden_layers": 4, "head_dim": 32}
MODELS: dict[str, PretrainedConfig] = {
    # Every other layer has a window; scores are capped.
    "gemma 2": Gemma2Config(**SIZES, sliding_window=WINDOW),
    # All have one.
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    # Layers with a window come last.
    "qwen2": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    # With sinks, and experts.
    "gpt-oss": GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
    ),
}
Oracle = tuple[Path, list[tiny.Answer], dict[int, torch.Tensor]]


@pytest.fixture(scope="module", params=MODELS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    directory = tmp_path_factory.mktemp("model")
    model = tiny.make_model(directory, config=MODELS[request.param])
    return directory, tiny.reference(model, PROMPTS, STEPS), score(model)


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_admission_gives_the_same_answers(data: st.DataObject, oracle: Oracle) -> None:
    directory, answers, scores = oracle
    rows = data.draw(st.sampled_from([asked_rows, asked_alike]))
    asked = data.draw(st.lists(rows, min_size=1, max_size=14))
    asked.sort(key=lambda own: own.beginning[1])
    entering, changes = draw_entering(data)
    changes["page_tokens"] = data.draw(st.sampled_from([2, 4, 8]))
    device, kv, attention = data.draw(homes)
    options = {
        "device": device,
        "kv_percent": kv,
        "cpu_attention_percent": attention,
        **entering,
        "draft_tokens": data.draw(st.sampled_from([0, 0, 1, 5])),
    }
    work = workload(asked, data.draw(st.integers(1, STEPS)))
    with engine(directory, work, changes, **options) as built:
        requests = [own.request(index, answers) for index, own in enumerate(asked)]
        check([*built.run(iter(requests))], asked, answers, scores)


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_rows_that_move_go_on_as_they_would_have(data: st.DataObject, oracle: Oracle) -> None:
    """What crosses links is counted, and reckoned from where rows were."""
    directory, answers, scores = oracle
    rows = data.draw(st.sampled_from([asked_rows, asked_alike]))
    asked = data.draw(st.lists(rows, min_size=8, max_size=20))
    asked.sort(key=lambda own: own.beginning[1])
    device, kv, attention = data.draw(mixed_homes)
    options = {
        "device": device,
        "kv_percent": kv,
        "cpu_attention_percent": attention,
        "admission": data.draw(st.sampled_from(["diagonal", "refill", "refill"])),
        "micro_batch_size": data.draw(st.integers(3, 9)),
        "num_micro_batches": data.draw(st.integers(1, 2)),
        "batch_tokens": data.draw(st.sampled_from([None, 17, 40])),
        "draft_tokens": data.draw(st.sampled_from([0, 0, 1, 5])),
    }
    changes: dict[str, Any] = {
        "entry_pace": data.draw(st.sampled_from([2.0, 1000.0])),
        "row_tokens": data.draw(st.sampled_from([20, 40, 60, 0])),
        "page_tokens": 4,
    }
    work = workload(asked, data.draw(st.integers(1, STEPS)))
    with engine(directory, work, changes, **options) as built:
        log, before = SweepLog(built), Counter(built.traffic.moved)
        requests = [own.request(index, answers) for index, own in enumerate(asked)]
        check([*built.run(iter(requests), on_batch=log.on_batch)], asked, answers, scores)
        moved = Counter(built.traffic.moved)
        moved.subtract(before)
        if max(own.samples for own in asked) == 1 and not (
            attention or built.plan.geometry.shared_page
        ):
            assert dict(+moved) == logged_bytes(built, log)
