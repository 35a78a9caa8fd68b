"""Layers in stages, each cut over ranks of its own: the rows of one machine, and what passes on."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.demo import MODEL_DIR
from freight.distributed.ranks import Ranks
from freight.distributed.tensor import launch as launching
from freight.distributed.tensor import planning
from freight.distributed.tensor.choice import plan_ways
from freight.distributed.tensor.fitting import Planned
from freight.distributed.tensor.model import TensorModel
from freight.distributed.tensor.planning import CutEngine, build_cut_engine
from freight.distributed.tensor.stages import Stage, largest_part
from freight.errors import InputError
from freight.model.config import read_config
from freight.runtime.options import EngineOptions
from freight.runtime.params import SamplingParams
from freight.runtime.request import Completion

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS
from ..pipeline.stages import on_ranks
from .test_planning import mixed, told

OPTIONS = EngineOptions(device="cpu", dtype="float32")
STEPS = 5


def run(
    directory: Path,
    size: int,
    stages: int,
    prompts: list[list[int]],
    params: SamplingParams,
    pin: str | None = None,
    **options: Any,
) -> tuple[list[Completion], list[CutEngine]]:
    """What the first rank answers, and the parts of all ranks."""
    work = tiny.workload(prompts, params.max_tokens, params)
    chosen = replace(OPTIONS, **options)
    engines: dict[int, CutEngine] = {}

    def answers(ranks: Ranks) -> list[Completion]:
        engine = build_cut_engine(
            directory, options=chosen, workload=work, ranks=ranks, stages=stages, pin=pin
        )
        engines[ranks.rank] = engine
        rows = tiny.requests(prompts, params) if not ranks.rank else iter(())
        found = [*engine.run(rows)]
        engine.summary()
        return found

    first, *others = on_ranks(size, answers)
    assert isinstance(first, list), first
    assert others == [[]] * (size - 1)
    return sorted(first, key=lambda own: own.index), [engines[rank] for rank in range(size)]


@pytest.mark.parametrize(
    ("name", "pin"),
    [
        ("llama", None),
        ("llama", "x-weight-gathered"),
        ("falcon 7b", None),
        ("mixtral", None),
        ("gemma2", None),
        ("opt", "megatron"),
    ],
)
def test_two_stages_of_two_ranks_answer_as_one_machine(
    name: str, pin: str | None, tmp_path: Path
) -> None:
    """More rows than both batches have seats, prompts in chunks."""
    model = tiny.make_model(tmp_path, config=CONFIGS[name])
    prompts, params = tiny.prompts(9, 17), SamplingParams(max_tokens=STEPS)
    found, engines = run(tmp_path, 4, 2, prompts, params, pin, micro_batch_size=2, batch_tokens=12)
    wanted = tiny.tokens(tiny.reference(model, prompts, STEPS))
    assert [list(own.token_ids) for own in found] == wanted
    layers = [engine.model.passage.stage.layers for engine in engines]
    assert layers[0] == layers[1] and layers[2] == layers[3]
    assert [*layers[0], *layers[2]] == [*range(engines[0].model.config.num_layers)]
    status = engines[0].status()
    assert "on each of 2 ranks" in status and "of the first of 2 stages, layers 0-0" in status


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("name", "pin"), [("llama", None), ("mixtral", "x-weight-gathered")])
def test_layers_come_from_the_disk_stage_by_stage(
    name: str, pin: str | None, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one of each stage's, once for all calls of a sweep; those of seven layers are not
    equally many. Prompts of a sweep come in several calls, which pass on together."""
    config = deepcopy(CONFIGS[name])
    config.num_hidden_layers = 7
    model = tiny.make_model(tmp_path, config=config)

    def planned(*arguments: Any) -> Planned:
        return replace(
            plan_ways(*arguments), kept=1, slots=3, sweep_tokens=30, call_tokens=8, rows=4
        )

    monkeypatch.setattr(launching, "plan_ways", planned)
    prompts, params = tiny.prompts(11, 17), SamplingParams(max_tokens=STEPS)
    found, engines = run(tmp_path, 2 * stages, stages, prompts, params, pin, disk_dir=tmp_path)
    wanted = tiny.tokens(tiny.reference(model, prompts, STEPS))
    assert [list(own.token_ids) for own in found] == wanted
    away = [engine.model.layers.num_away for engine in engines[::2]]
    assert sum(away) == 7 - stages and min(away) >= 1
    status = engines[0].status()
    assert f"{away[0]} of {away[0] + 1} layers come from its disk in every sweep" in status
    first = engines[0].engine
    assert first is not None
    calls = sum(count for _, count in first.taken.values())
    layers = engines[0].model.layers
    each = layers.traffic.moved["disk write"]
    sweeps = layers.traffic.moved["disk read"] / each
    assert sweeps <= 0.7 * calls, "a sweep has several calls"


def test_three_stages(tmp_path: Path) -> None:
    """Of seven layers the first two, the next two and the last three."""
    model = tiny.make_model(tmp_path, num_hidden_layers=7)
    prompts, params = tiny.prompts(8, 12), SamplingParams(max_tokens=STEPS)
    found, engines = run(tmp_path, 6, 3, prompts, params)
    assert [list(own.token_ids) for own in found] == tiny.tokens(
        tiny.reference(model, prompts, STEPS)
    )
    held = [engine.model.weights_held for engine in engines]
    ends = engines[0].model.config.vocab_size * engines[0].model.config.hidden_size * 4 // 2
    layer = held[2] // 2  # the stage between has no ends
    assert held == [2 * layer + ends] * 2 + [2 * layer] * 2 + [3 * layer + ends] * 2
    read = sum(engine.model.bytes_read for engine in engines)
    whole = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert read <= 1.2 * whole, "each reads its own layers alone"


@pytest.mark.parametrize("rule", ["refill", "zigzag"])
def test_rows_are_those_of_one_machine_whatever_is_asked(rule: str) -> None:
    """Sampling, penalties, stops and scores, from logits that another stage has computed."""
    requests, work = mixed()
    options = replace(OPTIONS, micro_batch_size=3, batch_tokens=6, admission=rule)

    def answers(stages: int, ranks: Ranks) -> list[Completion]:
        engine = build_cut_engine(
            MODEL_DIR, options=options, workload=work, ranks=ranks, stages=stages
        )
        found = [*engine.run(iter(requests if not ranks.rank else ()))]
        engine.summary()
        return found

    one, *_ = on_ranks(2, lambda ranks: answers(1, ranks))
    two, *_ = on_ranks(4, lambda ranks: answers(2, ranks))
    assert told(two) == told(one)
    mine = {own.index: own for own in two}
    for own in one:
        for made, other in zip(mine[own.index].outputs, own.outputs, strict=True):
            if other.cumulative_logprob is not None:
                assert made.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def test_the_first_stage_computes_while_another_batch_is_further_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the logits of a call when it has begun that of the other batch."""
    tiny.make_model(tmp_path)
    seen: list[str] = []
    sweep = TensorModel.sweep

    def noted(self: TensorModel, *arguments: Any, **named: Any) -> list[torch.Tensor]:
        if self.passage.stage.is_first and self.executor.ranks.own == (0,):
            seen.append("computed")
        return sweep(self, *arguments, **named)

    passage_of = planning.passage_of

    def watched(*arguments: Any) -> Any:
        passage = passage_of(*arguments)
        if passage.stage.is_first and passage.answers is not None:
            receive = passage.answers.receive

            def received(like: Any) -> Any:
                seen.append("waited")
                return receive(like)

            passage.answers.receive = received  # type: ignore[method-assign]
        return passage

    monkeypatch.setattr(TensorModel, "sweep", noted)
    monkeypatch.setattr(planning, "passage_of", watched)
    prompts = [[5 + i] * 6 for i in range(4)]
    params = SamplingParams(max_tokens=4)
    run(tmp_path, 4, 2, prompts, params, micro_batch_size=2, admission="zigzag")
    # Two batches of two rows: one sweep with prompts, three without.
    assert seen.count("computed") == seen.count("waited") == 2 * 4
    ahead = [seen[:i].count("computed") - seen[:i].count("waited") for i in range(len(seen) + 1)]
    assert max(ahead) == 2 and ahead.count(2) == 7


@pytest.mark.parametrize(("size", "stages"), [(4, 3), (4, 4), (2, 3), (6, 3)])
def test_stages_that_cannot_be_are_refused(size: int, stages: int, tmp_path: Path) -> None:
    """Too few ranks, or more stages than the model's two layers."""
    tiny.make_model(tmp_path)
    work = tiny.workload([[1, 2, 3]], 2)
    found = on_ranks(size, lambda ranks: attempt_in(tmp_path, work, ranks, stages))
    assert all(isinstance(error, InputError) for error in found)
    assert f"--stages {stages} was given for {size} ranks and 2 layers." in {
        error.asked for error in found if isinstance(error, InputError)
    }


def attempt_in(directory: Path, work: Any, ranks: Ranks, stages: int) -> object:
    """What is refused."""
    try:
        return build_cut_engine(
            directory, options=OPTIONS, workload=work, ranks=ranks, stages=stages
        )
    except InputError as error:
        return error


@given(num_layers=st.integers(1, 200), data=st.data())
def test_layers_are_given_out_evenly(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_layers))
    stages = [Stage.of(number, count, num_layers) for number in range(count)]
    assert [layer for own in stages for layer in own.layers] == [*range(num_layers)]
    sizes = {len(own.layers) for own in stages}
    assert max(sizes) - min(sizes) <= 1
    assert stages[0].is_first and stages[-1].is_last


def test_memory_is_planned_for_the_largest_stage(tmp_path: Path) -> None:
    """The one with most experts, and its own windows."""
    tiny.make_model(tmp_path, config=CONFIGS["gemma2"])
    config = read_config(tmp_path)
    part = largest_part(config, 2)
    assert part.num_layers == -(-config.num_layers // 2)
    assert len(part.sliding_windows) == part.num_layers
    assert largest_part(config, 1) == config
