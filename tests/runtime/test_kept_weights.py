"""Weights that stay in memory between runs: those of the same rows are not loaded again, others
are, and answers are those of transformers every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from freight.memory.process import process_bytes
from freight.runtime import loaders
from freight.runtime.engine import Engine, build_engine
from freight.runtime.kept_weights import WeightKeeper
from freight.runtime.options import EngineOptions

from . import tiny

HALF: dict[str, Any] = {**tiny.ON_CPU, "weights_percent": (0.0, 50.0, 50.0)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return tiny.make_model(model_dir)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of weights that are loaded into memory."""
    names: list[str] = []
    fill = loaders.CheckpointFiles.fill

    def note(self: Any, name: str, first_row: int, out: torch.Tensor) -> None:
        names.append(name)
        fill(self, name, first_row, out)

    monkeypatch.setattr(loaders.CheckpointFiles, "fill", note)
    yield names


def built(
    directory: Path, keeper: WeightKeeper, prompts: list[list[int]], steps: int, **options: Any
) -> Engine:
    defaults = {"dtype": "float32", "verify": True, "disk_dir": directory}
    return build_engine(
        directory,
        options=EngineOptions(**{**defaults, **options}),
        workload=tiny.workload(prompts, steps),
        keeper=keeper,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_loaded_once(tied: bool, tmp_path: Path, filled: list[str]) -> None:
    model = tiny.make_model(tmp_path, tie_word_embeddings=tied)
    keeper = WeightKeeper()
    counts = []
    for options, num_rows, longest in ((HALF, 3, 9), (HALF, 11, 30), (tiny.ON_CPU, 4, 20)):
        prompts = tiny.prompts(num_rows, longest)
        expected = tiny.tokens(tiny.reference(model, prompts, 5))
        filled.clear()
        for _ in range(2):
            with closing(built(tmp_path, keeper, prompts, 5, **options)) as engine:
                assert keeper.held_bytes == 0
                assert tiny.run(engine, prompts, 5) == expected
            counts.append(len(filled))
            assert keeper.held_bytes > 0
    # Other rows of the model are other weights' places; another share of the weights is.
    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[3] == 0
    assert counts[4] == counts[5] > 0


def test_of_runs_side_by_side_each_has_its_own(
    model: Any, model_dir: Path, filled: list[str]
) -> None:
    prompts, keeper = tiny.prompts(5, 12), WeightKeeper()
    expected = tiny.tokens(tiny.reference(model, prompts, 4))
    built(model_dir, keeper, prompts, 4, **HALF).close()
    filled.clear()
    with closing(built(model_dir, keeper, prompts, 4, **HALF)) as first:
        assert not filled
        with closing(built(model_dir, keeper, prompts, 4, **HALF)) as second:
            assert filled
            assert tiny.run(second, prompts, 4) == expected
        filled.clear()
        with closing(built(model_dir, keeper, prompts, 4, **HALF)) as third:
            # Closed once more, it takes nothing from who has its weights now.
            second.close()
            assert keeper.held_bytes == 0
            assert tiny.run(first, prompts, 4) == tiny.run(third, prompts, 4) == expected
    assert not filled


def test_a_run_that_fails_to_load_leaves_nothing(
    model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, keeper = tiny.prompts(3, 7), WeightKeeper()

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(loaders.CheckpointFiles, "fill", fail)
        with pytest.raises(OSError, match="gone"):
            built(model_dir, keeper, prompts, 4, **HALF)
    assert keeper.held_bytes == 0
    with closing(built(model_dir, keeper, prompts, 4, **HALF)) as engine:
        expected = tiny.tokens(tiny.reference(model, prompts, 4))
        assert tiny.run(engine, prompts, 4) == expected


def test_a_device_places_its_own(model: Any, model_dir: Path) -> None:
    prompts, keeper = tiny.prompts(5, 12), WeightKeeper()
    expected = tiny.tokens(tiny.reference(model, prompts, 4))
    for _ in range(2):
        with closing(built(model_dir, keeper, prompts, 4, **tiny.ON_SIM)) as engine:
            assert tiny.run(engine, prompts, 4) == expected
    assert keeper.held_bytes == 0


def test_a_budget_is_the_same_with_them(tmp_path: Path) -> None:
    """What is kept counts as free for the next plan, which keeps as much again."""
    tiny.make_model(tmp_path, num_hidden_layers=6, hidden_size=512, intermediate_size=2048)
    prompts, keeper = tiny.prompts(4, 16), WeightKeeper()
    built(tmp_path, keeper, prompts, 4, **HALF).close()  # what is loaded once is loaded
    keeper.close()
    budget = process_bytes() + (400 << 20)
    shares = []
    for _ in range(3):
        with closing(built(tmp_path, keeper, prompts, 4, cpu_memory_bytes=budget)) as engine:
            shares.append(engine.plan.layout.held_bytes["cpu"])
            tiny.run(engine, prompts, 4)
    assert min(shares) > 0.8 * max(shares) > 0
