"""Models whose layers have heads of several sizes, or values that are narrower than keys, in pages
of one size: against transformers, with rows that enter at any time, samples, beginnings that are
shared, keys that are attended elsewhere, made again or compressed; what crosses links is
counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash

from freight.kernels import paged
from freight.model.config import read_config
from freight.model.heads import Heads
from freight.plan.page_sizes import page_size

from . import tiny
from .draws import draw_entering
from .test_engine_admission import (
    BEGINNINGS,
    PROMPTS,
    asked_alike,
    asked_rows,
    engine,
    homes,
    run_counted,
    score,
)
from .test_engine_admission import STEPS as FEW
from .test_engine_admission import workload as work_of
from .test_engine_kv_bits import approximate
from .test_engine_parity import GEMMA4_EXPERTS, gemma4, mimo

CHANGES: dict[str, dict[str, Any]] = {
    "fewer": {},
    "larger": {"num_key_value_heads": 2, **GEMMA4_EXPERTS},
}
CONFIGS = {name: gemma4(**changes) for name, changes in CHANGES.items()}
"""Layers that see all have less to keep than the others, or more."""
IN_GROUPS: dict[str, tuple[Any, Any]] = {
    **{
        name: (gemma4(**changes, head_dim=32, global_head_dim=48), modeling_gemma4)
        for name, changes in CHANGES.items()
    },
    "narrow values": (mimo(head_dim=48, v_head_dim=32), modeling_mimo_v2_flash),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> tuple[list[tiny.Answer], dict[int, torch.Tensor]]:
    model = tiny.make_model(model_dir, config=CONFIGS["fewer"])
    return tiny.reference(model, PROMPTS, FEW), score(model)


@settings(
    deadline=None,
    max_examples=25,
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
    asked.sort(key=lambda own: BEGINNINGS[own.prompt] if own.is_shared else [])
    entering, changes = draw_entering(data)
    device, kv, attention = data.draw(homes)
    again = 0.0 if attention else data.draw(st.sampled_from([0.0, 50.0, 100.0]))
    options = {
        "device": device,
        "kv_percent": kv,
        "cpu_attention_percent": attention,
        "recompute_percent": again,
        **entering,
        "draft_tokens": data.draw(st.sampled_from([0, 0, 1, 5])),
    }
    with engine(model_dir, work_of(asked), changes, **options) as built:
        is_plain = max(own.samples for own in asked) == 1 and not again and not attention
        is_plain &= not built.plan.geometry.shared_page
        run_counted(built, asked, answers, scores, is_counted=is_plain)


@pytest.mark.parametrize("placed", [tiny.ON_CPU, tiny.ON_SIM], ids=["cpu", "sim"])
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("name", IN_GROUPS)
def test_compressed_keys_and_values(
    name: str,
    kernels: str,
    placed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In groups that divide heads of all sizes, and values."""
    config, modeling = IN_GROUPS[name]
    model, prompts = tiny.make_model(tmp_path, config=config), tiny.prompts(5, 30)
    plain = modeling.eager_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "eager_attention_forward", approximate(plain, 8, 16, 1.0))
        answers = tiny.tokens(tiny.reference(model, prompts, FEW))
    if kernels == "reference":
        monkeypatch.setattr(paged, "find_loops", lambda: None)
    with tiny.engine(tmp_path, prompts, FEW, **placed, kv_bits=8) as built:
        assert tiny.run(built, prompts, FEW) == answers


@pytest.mark.parametrize("placed", [tiny.ON_CPU, tiny.ON_SIM], ids=["cpu", "sim"])
@pytest.mark.parametrize("name", CONFIGS)
def test_plain_pages_without_loops(
    name: str, placed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a page that a layer does not fill only the part that it does is taken out."""
    model, prompts = tiny.make_model(tmp_path, config=CONFIGS[name]), tiny.prompts(5, 30)
    answers = tiny.tokens(tiny.reference(model, prompts, FEW))
    monkeypatch.setattr(paged, "find_loops", lambda: None)
    with tiny.engine(tmp_path, prompts, FEW, **placed) as built:
        assert tiny.run(built, prompts, FEW) == answers


@pytest.mark.parametrize(("name", "most"), [("fewer", 2 * 4 * 24), ("larger", 2 * 2 * 40)])
def test_a_page_has_room_for_the_largest_layer(name: str, most: int, tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=CONFIGS[name])
    config = read_config(tmp_path)
    assert config.all_heads == (Heads(config.num_kv_heads, 24), Heads(2, 40))
    assert page_size(config, 16, 4) == 16 * most * 4
    kept = [config.kept_bytes_per_token_in(layer, 4) for layer in range(4)]
    assert kept == [8 * config.num_kv_heads * 24, 8 * 2 * 40] * 2
