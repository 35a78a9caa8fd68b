"""Stages planned by measured rates: one block for all, the best of those proposed, and a forecast
of the whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.distributed.pipeline.engine import StageEngine
from freight.distributed.pipeline.forecasts import StageForecaster, flow
from freight.distributed.pipeline.wires import Wires, hop_of
from freight.distributed.ranks import Ranks
from freight.entrypoints import own_machine
from freight.entrypoints.profile import default_path
from freight.entrypoints.rank_machine import rank_machine
from freight.hardware.curve import Curve
from freight.hardware.machine import Machine
from freight.hardware.storage import write_machine
from freight.plan.forecast import SweepRun
from freight.plan.operation import Lane
from freight.plan.pipeline import Hop
from freight.runtime import profiler
from freight.runtime.engine import Engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, SamplingParams

from ...runtime import tiny
from ...runtime.test_engine_forecast import MACHINE
from .stages import answers, on_ranks

STEPS = 5
# All alike: what stages are told of is the mean row.
PROMPTS = [[1 + (7 * i + j) % 300 for j in range(21)] for i in range(8)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    directory = tmp_path_factory.mktemp("llama")
    model = tiny.make_model(directory, num_hidden_layers=4)
    return directory, tiny.tokens(tiny.reference(model, PROMPTS, STEPS))


def run(
    directory: Path, size: int, **options: Any
) -> tuple[list[StageEngine], list[list[Completion]]]:
    """The engines, as they were when the run had ended, and what each answered."""
    engines: dict[int, StageEngine] = {}

    def look(engine: StageEngine) -> None:
        engines[engine.stage.layers.start] = engine

    requests = [*tiny.requests(PROMPTS, SamplingParams(max_tokens=STEPS))]
    told = answers(directory, size, requests, tiny.workload(PROMPTS, STEPS), look=look, **options)
    return [engines[first] for first in sorted(engines)], told


def ids(done: Sequence[Completion]) -> list[list[int]]:
    return [list(one.token_ids) for one in done]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"device": "sim"},
        {"weights_percent": (0.0, 0.0, 100.0)},
        {"weights_percent": (0.0, 0.0, 100.0), "kv_percent": (0.0, 0.0, 100.0)},
    ],
    ids=["free", "device", "weights on disk", "all on disk"],
)
def test_searched_stages_answer_and_are_told(
    llama: tuple[Path, list[list[int]]], size: int, policy: dict[str, Any]
) -> None:
    directory, wanted = llama
    engines, told = run(directory, size, machine=MACHINE, **policy)
    assert [ids(own) for own in told] == [wanted] * size
    forecasts = [engine.forecast for engine in engines]
    assert all(own is not None and own.seconds > 0 for own in forecasts)
    # Of the pipeline all say the same; of their lanes each its own.
    assert len({(own.prefill_s, own.decode_s, own.new_tokens) for own in forecasts if own}) == 1
    assert forecasts[0] is not None and forecasts[0].new_tokens == len(PROMPTS) * STEPS
    blocks = {
        (p.micro_batch_size, p.num_micro_batches, p.admission)
        for p in (engine.plan.policy for engine in engines)
    }
    assert len(blocks) == 1
    for engine in engines:
        assert "predicted (measured) seconds: " in Engine.summary(engine)


@pytest.mark.parametrize(
    "policy",
    [
        {"weights_percent": (0.0, 0.0, 100.0), "kv_percent": (0.0, 100.0, 0.0)},
        {"weights_percent": (0.0, 30.0, 70.0), "kv_percent": (0.0, 40.0, 60.0)},
    ],
    ids=["weights on disk", "mixed"],
)
def test_layers_bytes_are_as_predicted(tmp_path: Path, policy: dict[str, Any]) -> None:
    """Of a stage in the middle, which brings nothing but its layers' weights and keys; it is told
    with a head of one token."""
    tiny.make_model(tmp_path, num_hidden_layers=4, intermediate_size=3000)
    engines, _ = run(
        tmp_path,
        4,
        machine=MACHINE,
        micro_batch_size=2,
        num_micro_batches=1,
        admission="zigzag",
        activations_percent=(0.0, 100.0, 0.0),
        **policy,
    )
    for engine in engines[1:3]:
        assert engine.forecast is not None
        loaded = engine.load_traffic.get("disk read", 0)
        moved = engine.traffic.moved["disk read"] - loaded
        assert engine.forecast.num_bytes[Lane.DISK_READ] == pytest.approx(moved, rel=0.02)


def test_the_last_layer_of_a_stage_works_on_all_tokens(tmp_path: Path) -> None:
    """That of the model needs an MLP for the last token of each prompt alone: 5 tokens of 25."""
    tiny.make_model(tmp_path, num_hidden_layers=4, intermediate_size=3000)
    fixed = {"micro_batch_size": 4, "num_micro_batches": 1, "admission": "zigzag"}
    engines, _ = run(tmp_path, 4, machine=MACHINE, **fixed)
    forecasts = [engine.forecast for engine in engines]
    busy = [own.busy_s[Lane.COMPUTE] for own in forecasts if own is not None]
    assert busy[:3] == pytest.approx([busy[0]] * 3, rel=0.02)
    assert busy[0] > 3 * busy[3]


def test_a_rank_without_rates_leaves_all_to_nominal_ones(
    llama: tuple[Path, list[list[int]]],
) -> None:
    directory, wanted = llama

    def own(rank: int) -> dict[str, Any]:
        return {"machine": MACHINE if rank else None}

    engines, told = run(directory, 2, own=own)
    assert [ids(done) for done in told] == [wanted] * 2
    assert [engine.forecast for engine in engines] == [None, None]


def test_the_best_proposal_is_taken(
    llama: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it, and however large its block is."""
    sizes = {0: 1, 2: 4}  # by first layer

    def search(self: StageForecaster, options: EngineOptions) -> Any:
        plan = found(self, options)
        policy = replace(plan.policy, micro_batch_size=sizes[self.layers.start])
        return replace(plan, policy=policy)

    found = StageForecaster.search
    monkeypatch.setattr(StageForecaster, "search", search)
    fixed = {"weights_percent": (0.0, 0.0, 100.0), "admission": "zigzag", "num_micro_batches": 1}
    slow = replace(MACHINE, links={**MACHINE.links, "disk read": _link(MACHINE, "disk read", 1e7)})
    engines, _ = run(llama[0], 2, machine=slow, **fixed)
    # Each sweep reads all weights, so the block with most rows is the fastest.
    assert {engine.plan.policy.micro_batch_size for engine in engines} == {4}
    chosen = engines[0].forecast
    monkeypatch.undo()
    engines, _ = run(llama[0], 2, machine=slow, micro_batch_size=1, **fixed)
    assert chosen is not None and engines[0].forecast is not None
    assert chosen.seconds < engines[0].forecast.seconds / 3


@pytest.mark.parametrize(("disk_bytes_per_s", "blocks"), [(1e12, 4), (1e7, 2)])
def test_more_blocks_are_in_flight_where_that_is_faster(
    llama: tuple[Path, list[list[int]]], disk_bytes_per_s: float, blocks: int
) -> None:
    """Where arithmetic is all, two stages are idle for a third of the prompts' time with two
    blocks, for a fifth with four; but each sweep reads all weights."""
    directory, wanted = llama
    disk = _link(MACHINE, "disk read", disk_bytes_per_s)
    machine = replace(MACHINE, links={**MACHINE.links, "disk read": disk})
    engines, told = run(
        directory, 2, machine=machine, weights_percent=(0.0, 0.0, 100.0), admission="zigzag"
    )
    assert {engine.plan.policy.blocks_in_flight for engine in engines} == {blocks}
    assert [ids(own) for own in told] == [wanted] * 2
    assert f"{blocks} blocks in flight" in Engine.summary(engines[0])


def _link(machine: Machine, name: str, bytes_per_s: float) -> Any:
    return replace(machine.links[name], bytes_per_s=Curve.constant(bytes_per_s))


def test_stages_by_hand() -> None:
    """Two blocks over stages of 3 and 1 s: the second leaves the slow one after 6 s, and the fast
    one after 7; each of ten sweeps behind takes both blocks through the slow one. With one block
    the stages take turns."""
    prompts, later = SweepRun(3.0, 1, is_prompts=True), SweepRun(3.0, 10)
    stages = [(prompts, later), (prompts._replace(seconds=1.0), later._replace(seconds=1.0))]
    near = [Hop(bytes_per_s=1e9, latency_s=0.0)] * 2
    assert flow(stages, 2, near, 0) == (7.0, 60.0)
    assert flow(stages, 1, near, 0) == (4.0, 40.0)
    assert flow(stages[:1], 1, near[:1], 0) == (3.0, 30.0)


def test_hops_by_hand() -> None:
    """Of two stages of a second each. Where ten tokens of 100 bytes each take 2 s to the second,
    and half a second passes before any comes, or is known: one block is there after 2 + 2 * (1 +
    0.5) s, and a second one, which waits for the link, 2 s later. Later tokens, of which there is
    one a sweep, take 0.2 s."""
    prompts, later = SweepRun(1.0, 1, is_prompts=True, tokens=10), SweepRun(1.0, 3, tokens=1)
    stages = [(prompts, later)] * 2
    hops = [Hop(bytes_per_s=500.0, latency_s=0.5), Hop(bytes_per_s=1.0, latency_s=0.5)]
    assert flow(stages, 1, hops, 100) == pytest.approx((5.0, 3 * 3.2))
    assert flow(stages, 2, hops, 100).prefill_s == pytest.approx(7.0)


@given(
    lists=st.integers(1, 3).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(1, 9), min_size=size, max_size=size), min_size=1, max_size=6
        )
    ),
    counts=st.lists(st.integers(1, 12), min_size=6, max_size=6),
    blocks=st.integers(1, 4),
    token_s=st.lists(st.sampled_from([0.0, 0.5, 4.0]), min_size=3, max_size=3),
    latency_s=st.sampled_from([0.0, 2.0]),
)
def test_sweeps_that_are_alike_settle(
    lists: list[list[int]], counts: list[int], blocks: int, token_s: list[float], latency_s: float
) -> None:
    """They take about as long as one by one: what is skipped begins no later than in the first
    rounds, and a bubble is no longer than a block through all stages."""
    stages = [[*zip(map(float, own), counts, strict=False)] for own in zip(*lists, strict=True)]
    together = [[SweepRun(*run, tokens=1) for run in own] for own in stages]
    apart = [[SweepRun(s, 1, tokens=1) for s, times in own for _ in range(times)] for own in stages]
    hops = [Hop(bytes_per_s=1 / max(own, 1e-9), latency_s=latency_s) for own in token_s]
    hops = hops[: len(stages)]
    told, exact = (flow(some, blocks, hops, 1).decode_s for some in (together, apart))
    slack = sum(max(own) + max(token_s) + latency_s for own in lists) * len(stages)
    assert exact - slack <= told <= exact + slack


def test_no_link_is_endlessly_fast() -> None:
    """Small messages that waited for a core take longer than large ones that did not."""
    assert hop_of(1000, 3.0, 1.0) == Hop(bytes_per_s=500.0, latency_s=0.5)
    for alone_s in (1.5, 1.999, 2.0, 9.0):
        assert hop_of(1000, 2.0, alone_s) == Hop(bytes_per_s=1000.0, latency_s=alone_s / 2)


def test_all_ranks_learn_what_is_between_them() -> None:
    """Of the last stage to the first, too; and rows go the same way afterwards."""

    def work(ranks: Ranks) -> tuple[list[Hop], list[float]]:
        wires = Wires(ranks)
        hops, row = wires.measure_hops(), torch.full((3,), float(ranks.rank))
        if ranks.rank:
            wires.receive_rows(row.view(torch.uint8))
        if ranks.rank < ranks.size - 1:
            wires.send_rows((row + 1).view(torch.uint8))
        return hops, row.tolist()

    found = on_ranks(3, work)
    assert all(isinstance(own, tuple) for own in found)
    hops = [own[0] for own in found if isinstance(own, tuple)]
    assert [own[1] for own in found if isinstance(own, tuple)] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert hops[0] == hops[1] == hops[2] and len(hops[0]) == 3
    for hop in hops[0]:
        assert 1e7 < hop.bytes_per_s < 1e12 and 0 < hop.latency_s < 0.1


@pytest.mark.parametrize("admission", ["zigzag", "refill"])
def test_a_slow_network_counts(
    llama: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch, admission: str
) -> None:
    """All tokens that stages compute cross from the first to the second in turn."""
    directory, wanted = llama
    monkeypatch.setattr(Wires, "measure_hops", lambda _: [Hop(bytes_per_s=1e3, latency_s=0.0)] * 2)
    engines, told = run(directory, 2, machine=MACHINE, admission=admission)
    assert [ids(own) for own in told] == [wanted] * 2
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (STEPS - 1)
    forecast, token_bytes = engines[0].forecast, 4 * engines[0].config.hidden_size
    assert forecast is not None
    assert forecast.seconds == pytest.approx(tokens * token_bytes / 1e3, rel=0.02)


# -- a rank's part of its host ---------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sequence[str]]:
    """Names that were left out of the environment of whoever measured this host, with two
    threads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host = {"cpu": "an imagined one", "threads": "2", "gpu": "none"}
    monkeypatch.setattr(profiler, "identify_host", lambda _: {**host, "threads": "1"})
    calls: list[Sequence[str]] = []

    def measure(kind: str, directory: Path | None, left_out: Sequence[str]) -> None:
        calls.append(left_out)
        write_machine(replace(MACHINE, host=host), default_path())

    monkeypatch.setattr(own_machine, "_measure", measure)
    return calls


def test_a_host_is_measured_once_and_shared(measured: list[Sequence[str]], tmp_path: Path) -> None:
    """Each of its two ranks has one of two threads, and half of the disk."""
    assert default_path().is_relative_to(tmp_path)

    def part(ranks: Ranks) -> Machine | None:
        return rank_machine(ranks, EngineOptions(device="cpu"), tmp_path, 1e4, lambda _: None)

    for result in on_ranks(2, part):
        assert isinstance(result, Machine)
        assert result.units["cpu"].products["float32"].at(64) == pytest.approx(5e10)
        assert result.links["disk read"].bytes_per_s.at(1 << 22) == pytest.approx(1e9)
    assert len(measured) == 1 and "OMP_NUM_THREADS" in measured[0]


def test_short_work_of_ranks_is_not_worth_measuring(
    measured: list[Sequence[str]], tmp_path: Path
) -> None:
    def part(ranks: Ranks) -> Machine | None:
        return rank_machine(ranks, EngineOptions(device="cpu"), tmp_path, 10.0, lambda _: None)

    assert on_ranks(2, part) == [None, None]
    assert not measured
