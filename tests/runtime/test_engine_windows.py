"""Layers that keep of each row the pages alone that their window reaches: never another answer,
less memory, fewer bytes.

Windows are a few tokens and pages fewer, so that rows leave most of what they had behind. Lengths,
rules, chunks, homes, samples and shared beginnings are drawn at random, as where all is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    GptOssConfig,
    LagunaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from freight.model.batch import MicroBatch
from freight.plan.rollout import WorkSizes
from freight.plan.samples import continuous_story, roll, zigzag_story
from freight.plan.sweep import BatchWork
from freight.runtime.batches import BatchPreparer

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
    move_rows,
    run_counted,
    score,
    workload,
)
from .test_engine_rehearsal import Dataset, datasets, is_possible

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
    # Layers with a window have sinks, and more heads; values are narrower than keys.
    "mimo": MiMoV2FlashConfig(
        **SIZES,
        sliding_window=WINDOW,
        v_head_dim=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        pad_token_id=0,
    ),
    # Layers with a window have more query heads, and a gate for each.
    "laguna": LagunaConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
        num_attention_heads_per_layer=[4, 6, 4, 6],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=40,
        pad_token_id=0,
    ),
    # With sinks, and experts.
    "gpt-oss": GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
    ),
}
Oracle = tuple[Path, list[tiny.Answer], dict[int, torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def roll_always() -> Iterator[None]:
    """Rows are short here: all that they have may be less than what this takes."""
    with patch("freight.plan.windows.pays", return_value=True):
        yield


@pytest.fixture(scope="module", params=MODELS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    directory = tmp_path_factory.mktemp("model")
    model = tiny.make_model(directory, config=MODELS[request.param])
    return directory, tiny.reference(model, PROMPTS, STEPS), score(model)


@settings(
    deadline=None,
    max_examples=11,
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
    max_examples=9,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_rows_that_move_go_on_as_they_would_have(data: st.DataObject, oracle: Oracle) -> None:
    directory, answers, scores = oracle
    move_rows(data, directory, answers, scores, page_tokens=4)


MIXED = (34.0, 33.0, 33.0)
KV = [
    *(("cpu", CPU, "diagonal"), ("cpu", DISK, "zigzag"), ("cpu", DISK, "refill")),
    *(("sim", GPU, "refill"), ("sim", MIXED, "zigzag"), ("sim", MIXED, "diagonal")),
]


@pytest.mark.parametrize(("device", "kv", "admission"), KV)
def test_fewer_bytes_are_kept_and_moved(
    device: str, kv: tuple[float, float, float], admission: str, oracle: Oracle
) -> None:
    """By as much as was planned, whatever the rule; what moves is what is reckoned row by row."""
    directory, answers, _ = oracle
    asked = [Asked(prompt=row, might_stop=row % 2 > 0) for row in range(13)]
    options = {
        "device": device,
        "kv_percent": kv,
        "admission": admission,
        "micro_batch_size": 3,
        "num_micro_batches": 2,
        "cpu_attention_percent": 0.0 if device == "sim" else None,
    }
    held, crossed = [], []
    for rolls in (True, False):
        changes = {"page_tokens": 4, "row_tokens": 0, "rolls_windows": rolls}
        with engine(directory, workload(asked), changes, **options) as built:
            moved = run_counted(built, asked, answers)
            usage = built.plan.geometry.usage.values()
            kept = ("KV cache", "KV windows")
            held.append(sum(own.get(name, 0) for own in usage for name in kept))
            crossed.append(moved.total())
            pages, windows = built.plan.geometry.kv_pages, built.plan.geometry.windows
            config = built.config
            whole = config.num_layers - windows.layers
            assert windows.layers == rolls * config.num_window_layers
            assert held[-1] == built.plan.geometry.page_bytes * (
                whole * sum(pages.values())
                + windows.layers * windows.pages * sum(windows.rows.values())
            )
    assert held[0] < 0.8 * held[1]
    assert crossed[0] < crossed[1] or not crossed[1]


@pytest.mark.parametrize("admission", ["zigzag", "refill"])
def test_a_prompt_in_pieces_goes_through_scratch(admission: str, oracle: Oracle) -> None:
    """Pieces larger than what the window reaches, smaller, and of one token; neighbours decode."""
    directory, answers, _ = oracle
    asked = [Asked(prompt=row) for row in range(13)]
    for batch_tokens in (4, 13, 29):
        changes = {"page_tokens": 4, "row_tokens": 0, "chunk_tokens": 16}
        options = {"admission": admission, "batch_tokens": batch_tokens, "micro_batch_size": 4}
        with engine(directory, workload(asked), changes, **options) as built:
            assert built.plan.geometry.rolls
            requests = [own.request(index, answers) for index, own in enumerate(asked)]
            check([*built.run(iter(requests))], asked, answers)


def note(batches: list[MicroBatch], sweep: int, batch: MicroBatch) -> None:
    batches.append(batch)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_rows_that_begin_alike_have_windows_of_their_own(device: str, oracle: Oracle) -> None:
    """A beginning is computed once, and longer than the window; rows go on behind it anywhere."""
    directory, answers, _ = oracle
    asked = [Asked(prompt=row, is_shared=True) for row in range(5)]
    computed = []
    for rule, size in (("zigzag", 5), ("refill", 2)):
        for kv in (CPU, GPU, DISK)[: 1 + 2 * (device == "sim")]:
            changes = {"page_tokens": 4, "row_tokens": 0, "shares_prefixes": True}
            options = {
                "device": device,
                "admission": rule,
                "micro_batch_size": size,
                "kv_percent": kv,
                "cpu_attention_percent": 0.0 if device == "sim" else None,
            }
            with engine(directory, workload(asked), changes, **options) as built:
                assert built.plan.geometry.rolls
                requests = [own.request(index, answers) for index, own in enumerate(asked)]
                batches: list[MicroBatch] = []
                done = built.run(iter(requests), partial(note, batches))
                check([*done], asked, answers)
                computed.append(sum(batch.num_tokens for batch in batches))
    whole = sum(len(PROMPTS[own.prompt]) + STEPS - 1 for own in asked)
    saved = 4 * len(BEGINNINGS[0])
    assert {*computed} == {whole - saved}


@pytest.mark.parametrize("kv", [CPU, DISK, (50.0, 50.0, 0.0), (20.0, 40.0, 40.0)], ids=str)
def test_the_cpu_attends_windows_where_they_are(
    kv: tuple[float, float, float], oracle: Oracle
) -> None:
    directory, answers, _ = oracle
    asked = [Asked(prompt=row) for row in range(13)]
    options = {"device": "sim", "kv_percent": kv, "cpu_attention_percent": 100.0}
    changes = {"page_tokens": 4, "row_tokens": 0}
    with engine(directory, workload(asked), changes, micro_batch_size=4, **options) as built:
        assert built.plan.geometry.rolls
        requests = [own.request(index, answers) for index, own in enumerate(asked)]
        check([*built.run(iter(requests))], asked, answers)


def test_compressed_keys_roll_too(oracle: Oracle) -> None:
    """The same answers as where all of them are kept."""
    directory, answers, _ = oracle
    asked = [Asked(prompt=row) for row in range(13)]
    found = []
    for rolls in (True, False):
        changes = {"page_tokens": 4, "row_tokens": 0, "rolls_windows": rolls}
        options = {"device": "sim", "kv_percent": (50.0, 50.0, 0.0), "kv_bits": 8}
        with engine(directory, workload(asked), changes, micro_batch_size=4, **options) as built:
            assert built.plan.geometry.rolls == rolls
            requests = [own.request(index, answers) for index, own in enumerate(asked)]
            done = sorted(built.run(iter(requests)), key=lambda own: own.index)
            found.append([own.outputs[0].token_ids for own in done])
    assert found[0] == found[1]


def passed(works: Iterable[BatchWork]) -> Counter[str]:
    """Bytes of pages of one layer that come and go, and how many loads there are."""
    totals: Counter[str] = Counter()
    for work in works:
        for name, own in (("whole", work.kv), ("window", work.windows)):
            for way, moved in (("in", own.load), ("out", own.store)):
                for tier, size in moved._asdict().items():
                    totals[f"{name} {way} {tier}"] += size
            totals[f"{name} slot"] += own.slot_bytes
            totals[f"{name} pages"] += own.num_loaded
    return totals


@settings(
    deadline=None,
    max_examples=9,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    data=datasets().filter(is_possible),
    admission=st.sampled_from(["zigzag", "refill"]),
    home=st.sampled_from([("cpu", DISK), ("cpu", (0.0, 50.0, 50.0)), ("sim", CPU), ("sim", DISK)]),
)
def test_what_passes_is_what_was_told(
    data: Dataset, admission: str, home: tuple[str, Any], oracle: Oracle
) -> None:
    """Of rows that have all of their prompts to themselves; those that enter by turns stay. They
    enter as fast as there is room: a run learns from the first that end how fast others do, and a
    forecast does not."""
    device, kv = home
    data = replace(data, num_beginnings=0)
    options = {
        "device": device,
        "kv_percent": kv,
        "cpu_attention_percent": 0.0 if device == "sim" else None,
        "admission": admission,
        "micro_batch_size": 3,
        "num_micro_batches": 2,
    }
    changes = {"page_tokens": 4, "row_tokens": 0, "moves_rows": False, "entry_pace": 1000.0}
    works: list[BatchWork] = []
    describe = BatchPreparer.describe

    def noting(*args: Any) -> BatchWork:
        works.append(describe(*args))
        return works[-1]

    with (
        engine(oracle[0], data.workload(), changes, **options) as built,
        patch.object(BatchPreparer, "describe", noting),
    ):
        for _ in built.run(iter(data.requests())):
            pass
        plan, rows = built.plan, built.plan.workload.num_rows
        sizes = WorkSizes.of(plan, built.config)
    sweeps = []
    if plan.policy.is_continuous:
        rolled = roll(plan, rows)
        sweeps += continuous_story(rolled, range(len(rolled)))(sizes)
    for first in range(0, 0 if plan.policy.is_continuous else rows, plan.policy.block_rows):
        lengths = plan.workload.row_lengths(first, min(rows, first + plan.policy.block_rows), 0)
        sweeps += zigzag_story(lengths, range(max(1, max(row.new for row in lengths))))(sizes)
    assert passed(works) == passed(work for sweep in sweeps for work in sweep.works)
