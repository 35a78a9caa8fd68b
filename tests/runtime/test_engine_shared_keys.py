"""Models whose later layers attend the keys of earlier ones, and whose layers have inputs of their
own from a table beside the embedding's: against transformers, with rows that enter at any time,
samples, scores, beginnings that are shared, compressed keys and few of them; what crosses links is
counted, and of prompts the later layers compute what the head needs alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.gemma4 import modeling_gemma4

from freight.errors import BudgetError, InputError
from freight.kernels import paged
from freight.model import layers
from freight.model.batch import MicroBatch, RowKey, RowSpan
from freight.model.config import read_config
from freight.model.decoder import build_programme
from freight.model.frame import Frame
from freight.model.programme import Unit
from freight.plan.policy import Split
from freight.plan.stages import stage_model
from freight.runtime import attention_work

from . import tiny
from .draws import draw_entering
from .test_engine_admission import (
    BEGINNINGS,
    PROMPTS,
    Asked,
    asked_alike,
    asked_rows,
    check,
    engine,
    run_counted,
    score,
)
from .test_engine_admission import STEPS as FEW
from .test_engine_admission import workload as work_of
from .test_engine_kv_bits import approximate
from .test_engine_parity import GEMMA4_SMALL, gemma4

CONFIG = gemma4(**GEMMA4_SMALL, use_double_wide_mlp=True)
NEAR: dict[str, dict[str, Any]] = {
    "cpu": tiny.with_keys_near(tiny.ON_CPU),
    "sim": tiny.with_keys_near(tiny.ON_SIM),
}
"""Weights, tables and activations on all tiers; keys stay where they are made."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> tuple[list[tiny.Answer], dict[int, torch.Tensor]]:
    model = tiny.make_model(model_dir, config=CONFIG)
    return tiny.reference(model, PROMPTS, FEW), score(model)


shares = st.sampled_from([0.0, 0.0, 30.0, 100.0])


@settings(
    deadline=None,
    max_examples=35,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_admission_gives_the_same_answers(
    data: st.DataObject,
    model_dir: Path,
    oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]],
) -> None:
    answers, scores = oracle
    rows = data.draw(st.sampled_from([asked_rows, asked_alike]))
    asked = data.draw(st.lists(rows, min_size=1, max_size=14))
    if data.draw(st.sampled_from([False, False, True])):  # scores and first tokens alone
        asked = [replace(own, max_tokens=1) for own in asked]
    asked.sort(key=lambda own: BEGINNINGS[own.prompt] if own.is_shared else [])
    entering, changes = draw_entering(data)
    device = data.draw(st.sampled_from(["cpu", "sim"]))
    near = data.draw(shares) if device == "sim" else 0.0
    host = min(100.0 - near, data.draw(shares))
    table = data.draw(st.sampled_from([None, Split(disk=1.0), Split(cpu=0.4, disk=0.6)]))
    options = {
        "device": device,
        "weights_percent": (near, host, 100.0 - near - host),
        **entering,
        "draft_tokens": data.draw(st.sampled_from([0, 0, 1, 5])),
    }
    with engine(model_dir, work_of(asked), {**changes, "embedding": table}, **options) as built:
        is_plain = max(own.samples for own in asked) == 1
        is_plain &= not built.plan.geometry.shared_page
        run_counted(built, asked, answers, scores, is_counted=is_plain)


@pytest.mark.parametrize("placed", NEAR)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_compressed_keys_and_few_of_them(
    share: float,
    kernels: str,
    placed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a layer has left is what others find, rounded once."""
    config = gemma4(**GEMMA4_SMALL, head_dim=32, global_head_dim=48)
    model, prompts = tiny.make_model(tmp_path, config=config), tiny.prompts(5, 30)
    plain = modeling_gemma4.eager_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        own = approximate(plain, 8, 16, share)
        patch.setattr(modeling_gemma4, "eager_attention_forward", own)
        answers = tiny.tokens(tiny.reference(model, prompts, FEW))
    if kernels == "reference":
        monkeypatch.setattr(paged, "find_loops", lambda: None)
    options = {**NEAR[placed], "kv_bits": 8, "sparse_attention": share if share < 1 else None}
    with tiny.engine(tmp_path, prompts, FEW, **options) as built:
        assert tiny.run(built, prompts, FEW) == answers


def test_of_prompts_later_layers_compute_what_the_head_needs(
    model_dir: Path,
    oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens: dict[str, Counter[int]] = {"attention": Counter(), "queries": Counter()}

    def counting(unit: Unit, frame: Frame) -> None:
        assert unit.layer is not None
        tokens[unit.kind][unit.layer] += frame.values["x"].shape[0]
        layers.run_unit(unit, frame)

    monkeypatch.setattr(attention_work, "run_unit", counting)
    prompts = PROMPTS[:4]
    with tiny.engine(model_dir, prompts, FEW, device="cpu") as built:
        assert tiny.run(built, prompts, FEW) == tiny.tokens(oracle[0][:4])
    all_tokens = sum(map(len, prompts)) + 4 * (FEW - 1)
    assert tokens["attention"] == dict.fromkeys(range(3), all_tokens)
    assert tokens["queries"] == dict.fromkeys(range(3, 6), 4 * FEW)


def test_what_the_head_picks_as_spans() -> None:
    """Those that are sampled after, in runs, then those that are scored, each behind its keys."""
    first = RowSpan(RowKey(0), 0, 6, 10, (1, 2, 5), range(2, 4))
    second = RowSpan(RowKey(1), 6, 3, 0, (), range(3), siblings=(RowKey(1, 1),))
    batch = MicroBatch(index=0, rows=(first, second), token_ids=range(9))
    found = batch.picked_spans()
    assert [(own.row.request, own.start, own.num_new, own.kv_len) for own in found] == [
        (0, 0, 2, 11),
        (0, 2, 1, 15),
        (0, 3, 2, 12),
        (1, 5, 3, 0),
    ]
    assert batch.picked_indices() == [1, 2, 5, 2, 3, 6, 7, 8]
    assert sum(own.num_new for own in found) == batch.num_picked
    # Each at the same place among its row's keys as the token that it is.
    places = [(own.row, own.kv_len + number) for own in found for number in range(own.num_new)]
    spans = [next(own for own in batch.rows if n < own.end) for n in batch.picked_indices()]
    assert places == [
        (own.row, own.kv_len + n - own.start)
        for own, n in zip(spans, batch.picked_indices(), strict=True)
    ]


@pytest.mark.parametrize("placed", NEAR)
@pytest.mark.parametrize("admission", ["zigzag", "refill"])
def test_rows_of_both_tables_are_counted(
    admission: str,
    placed: str,
    model_dir: Path,
    oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]],
) -> None:
    answers, scores = oracle
    asked = [Asked(prompt=n, max_tokens=2 + n % 3) for n in range(len(PROMPTS))]
    options = {**NEAR[placed], "admission": admission}
    with engine(model_dir, work_of(asked), {}, **options) as built:
        assert all(table.is_far("cpu") for table in built.plan.layout.tables)
        run_counted(built, asked, answers, scores)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_rows_that_make_one_token_keep_their_keys_for_later_layers(
    device: str, model_dir: Path, oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]]
) -> None:
    """Other models write a layer's over those of the one below, micro-batch by micro-batch."""
    answers, scores = oracle
    asked = [Asked(prompt=n, max_tokens=1, is_scored=True) for n in range(len(PROMPTS))]
    options = {"device": device, "micro_batch_size": 4, "admission": "zigzag"}
    with engine(model_dir, work_of(asked), {}, **options) as built:
        assert len(built.plan.geometry.kv_page_bytes + built.plan.geometry.window_page_bytes) == 3
        requests = [own.request(index, answers) for index, own in enumerate(asked)]
        check([*built.run(iter(requests))], asked, answers, scores)


def test_each_layer_has_pages_of_its_own_size(
    model_dir: Path, oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]]
) -> None:
    """Two of three have four heads of 24, the other one of them four of 40: none has room for more
    than its own, for no row's keys are elsewhere."""
    with tiny.engine(model_dir, PROMPTS, FEW, device="cpu", roll_windows=False) as built:
        geometry, policy = built.plan.geometry, built.plan.policy
        assert geometry.kv_page_bytes == tuple(
            policy.page_tokens * 2 * 4 * width * 4 for width in (24, 40, 24)
        )
        pools = built.placement.kv_cache.pools["compute"]
        assert [pool.shape[1] for pool in pools] == [
            geometry.kv_page_bytes[layer] for layer in (0, 1, 2, 2, 1, 1)
        ]
        assert pools[5].data_ptr() == pools[1].data_ptr() != pools[2].data_ptr()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_percent": (0.0, 50.0, 50.0)}, "Several layers of this model attend the same ones"),
        ({"device": "sim", "kv_percent": (50.0, 50.0, 0.0)}, "Several layers"),
        ({"device": "sim", "cpu_attention_percent": 50.0}, "has layers that attend the same keys"),
        ({"recompute_percent": 50.0}, "Several layers of this model attend the same keys"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any],
    words: str,
    model_dir: Path,
    oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]],
) -> None:
    prompts = PROMPTS[:2]
    with (
        pytest.raises(InputError, match=words),
        tiny.engine(model_dir, prompts, FEW, **{"device": "cpu", **options}),
    ):
        pass


def test_keys_that_do_not_fit_are_refused_for_what_they_lack(
    model_dir: Path, oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]]
) -> None:
    """They do not go to the disk."""
    with (
        pytest.raises(BudgetError, match="KV cache"),
        tiny.engine(model_dir, PROMPTS[:2], FEW, device="sim", gpu_memory_bytes=1 << 16),
    ):
        pass


def test_which_layers_have_keys(
    model_dir: Path, oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]]
) -> None:
    config = read_config(model_dir)
    assert config.key_layers == (0, 1, 2, 2, 1, 1)  # the last one sees all
    assert config.keeping == (True, True, True, False, False, False)
    assert config.num_attention_layers == 3
    # Of layers with a window those keep the last keys alone whose keys nobody else attends.
    assert [config.has_window(i) for i in range(6)] == [True, *[False] * 5]
    kinds = [unit.kind for unit in build_programme(config).units]
    assert kinds.count("attention") == kinds.count("queries") == 3
    # As of other models, the MLP behind the last layer with keys works on what was picked, too.
    assert build_programme(config).picks_at == kinds.index("queries") - 1
    with pytest.raises(InputError, match="inputs made with the embedding"):
        stage_model(config, range(3))
