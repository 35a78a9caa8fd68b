"""Ways by numbers of tokens: borders as the formulas say, bytes as the best way has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freight.distributed.tensor import switch as switching
from freight.distributed.tensor.model import TensorModel, load_model
from freight.distributed.tensor.rates import Rates, measure_rates
from freight.distributed.tensor.switch import Switch, calibrated, pinned, reckoned
from freight.distributed.tensor.virtual import VirtualRanks
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.named import DYNAMIC, Dynamic

from ...runtime import tiny

SCHEMES = [*DYNAMIC.values()]
MEGATRON, REPLICATED, GATHERED = SCHEMES
MOVES_ONLY = Rates(flops=1e30, memory_bytes_per_s=1e30, link_bytes_per_s=1e6, collective_s=1e-12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TensorModel:
    directory = tmp_path_factory.mktemp("model")
    tiny.make_model(directory, num_key_value_heads=4)
    return load_model(directory, VirtualRanks(Mesh.of(x=4)), SCHEMES, dtype=torch.float32)


def test_the_border_is_that_of_the_formula(model: TensorModel) -> None:
    """Of weights gathered, with arithmetic free: 3hf of weights against 2sh beside the projection
    that is replicated, sh without (facts of Ong & Kwon): s = 3f beyond the latter."""
    found = reckoned(model, MOVES_ONLY, 4096)
    h, f = model.config.hidden_size, model.config.intermediate_size
    assert found.ways == (REPLICATED, GATHERED)
    # 3sh against 2sh + 3hf: in tokens of four.
    assert abs(found.borders[0] - 3 * f) <= 4
    assert h == 64


def test_slow_arithmetic_forbids_replication(model: TensorModel) -> None:
    """F b > 2hW is what it takes."""
    h = model.config.hidden_size
    for factor, way in ((0.5, MEGATRON), (2.0, REPLICATED)):
        rates = Rates(
            flops=factor * 2 * h * 1e6 / 4,
            memory_bytes_per_s=1e30,
            link_bytes_per_s=1e6,
            collective_s=0.0,
        )
        assert reckoned(model, rates, 256).way(100) == way


def test_bytes_are_those_of_the_best_scheme(model: TensorModel, tmp_path: Path) -> None:
    """For each bucket of tokens, where only moves take time: no scheme moves less."""
    chosen = reckoned(model, MOVES_ONLY, 1024)
    assert len({chosen.way(tokens) for tokens in (1, 1024)}) == 2
    for tokens in (4, 64, 256, 480, 484, 1000):
        counted = []
        for way in SCHEMES:
            own = model.layers_of(way, tokens)
            counted.append(
                4 * 4 * sum(one.moved(weights=True) + one.moved(weights=False) for one in own)
            )
        batch = model.begin(1, tokens)
        model.executor.moved.clear()
        model.step(batch, [[1] * tokens], chosen.way(tokens))
        counted_apart = {"weights", "activations"}
        moved = sum(n for (_, what), n in model.executor.moved.items() if what in counted_apart)
        both = model.programmes(chosen.way(tokens), tokens)
        ends = sum(own.moved(weights=False) for own in (both.embedding, both.logits))
        assert moved - 4 * 4 * ends == min(counted)


def test_calibration_measures_once(
    model: TensorModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times that cross between two sizes give a border between them; they are kept."""
    times = {MEGATRON: lambda s: 10 + s, REPLICATED: lambda s: 1e4, GATHERED: lambda s: 100 + s / 2}
    asked = []

    def measured(model: TensorModel, way: Dynamic, tokens: int) -> float:
        asked.append((way, tokens))
        return times[way](tokens) * 1e-6

    monkeypatch.setattr(switching, "_measured", measured)
    found = calibrated(model, 1000, tmp_path)
    assert found == Switch((180,), (MEGATRON, GATHERED))
    assert len(asked) == 3 * 11
    assert calibrated(model, 1000, tmp_path) == found
    assert len(asked) == 3 * 11
    assert len(json.loads(next(tmp_path.iterdir()).read_text())) == 11
    calibrated(model, 999, tmp_path)
    assert len(asked) == 6 * 11
    # Over another network it is measured anew; a little faster is the same one.
    links = [replace(MOVES_ONLY, link_bytes_per_s=rate) for rate in (1e6, 1.1e6, 1e7)]
    for rates, count in zip(links, (9, 9, 12), strict=True):
        calibrated(model, 1000, tmp_path, network="here", rates=rates)
        assert len(asked) == count * 11


def test_a_calibration_that_cannot_be_kept_counts(
    model: TensorModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "_measured", lambda model, way, tokens: 1e-6)
    file = tmp_path / "file"
    file.touch()
    assert calibrated(model, 16, file / "cache") == calibrated(model, 16, tmp_path)


@pytest.mark.parametrize(
    "damaged", ["", "[[1.0, 2.0", "{}", "[[1.0, 2.0]]", '[["a", 1, 2]]', "[[1, 2, -1]]", "7"]
)
def test_a_damaged_calibration_is_made_anew(
    damaged: str, model: TensorModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "_measured", lambda model, way, tokens: 1e-6)
    calibrated(model, 16, tmp_path)
    kept = next(tmp_path.iterdir())
    whole = kept.read_text()
    kept.write_text(damaged)
    assert calibrated(model, 16, tmp_path).borders == ()
    assert kept.read_text() == whole


def test_calibration_comes_to_an_end(
    model: TensorModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there was time for is kept, and counts for all sizes."""
    monkeypatch.setattr(switching, "_MOST_S", 0.0)
    times = {MEGATRON: 2.0, REPLICATED: 3.0, GATHERED: 1.0}
    monkeypatch.setattr(switching, "_measured", lambda _, way, tokens: times[way])
    assert calibrated(model, 1000, tmp_path) == Switch((), (GATHERED,))
    assert json.loads(next(tmp_path.iterdir()).read_text()) == [[2.0, 3.0, 1.0]]
    monkeypatch.setattr(switching, "_measured", None)
    assert calibrated(model, 1000, tmp_path) == Switch((), (GATHERED,))


def test_small_differences_change_nothing(
    model: TensorModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What measurements differ by is no reason to take another way."""
    times = {MEGATRON: lambda s: 100 + s % 3, REPLICATED: lambda s: 101 - s % 3}

    def measured(model: TensorModel, way: Dynamic, tokens: int) -> float:
        return times.get(way, lambda s: 1e4)(tokens) * 1e-6

    monkeypatch.setattr(switching, "_measured", measured)
    assert calibrated(model, 512).borders == ()


def test_it_is_measured_in_truth(model: TensorModel) -> None:
    rates = measure_rates(VirtualRanks(Mesh.of(x=4)), torch.float32)
    assert min(rates.flops, rates.memory_bytes_per_s, rates.link_bytes_per_s) > 1e6
    assert set(calibrated(model, 16).ways) <= set(SCHEMES)


def test_a_way_can_be_pinned() -> None:
    assert {pinned(Cut()).way(tokens) for tokens in (1, 10**6)} == {Cut()}
    found = Switch((4, 9), (MEGATRON, REPLICATED, GATHERED))
    assert [found.way(s) for s in (1, 4, 5, 9, 10)] == [
        MEGATRON,
        MEGATRON,
        REPLICATED,
        REPLICATED,
        GATHERED,
    ]
