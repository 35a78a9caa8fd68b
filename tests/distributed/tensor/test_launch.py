"""From a model and ranks to an engine: what is planned fits, runs, and can be pinned."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freight.distributed.tensor import launch as launching
from freight.distributed.tensor.choice import plan_ways
from freight.distributed.tensor.engine import TensorEngine
from freight.distributed.tensor.fitting import TensorOptions
from freight.distributed.tensor.launch import launch
from freight.distributed.tensor.names import name_of
from freight.distributed.tensor.rates import Rates
from freight.distributed.tensor.virtual import VirtualRanks
from freight.errors import BudgetError, InputError
from freight.model.config import read_config
from freight.partition.layers import Cut
from freight.partition.named import Dynamic
from freight.plan.workload import Workload
from freight.runtime.params import SamplingParams

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS
from ..commands import few_wide_layers

RATES = Rates(flops=1e11, memory_bytes_per_s=1e10, link_bytes_per_s=1e9, collective_s=1e-5)
OPTIONS = TensorOptions(memory_bytes=1 << 30)


@pytest.mark.parametrize("name", ["llama", "falcon 7b"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_is_planned_runs(name: str, num_ranks: int, tmp_path: Path) -> None:
    reference = tiny.make_model(tmp_path, config=CONFIGS[name])
    prompts = tiny.prompts(8, 12)
    work = tiny.workload(prompts, 4)
    options = replace(OPTIONS, cache_dir=tmp_path / "cache")
    model, switch, planned = launch(
        tmp_path,
        num_ranks,
        VirtualRanks,
        workload=work,
        dtype=torch.float32,
        options=options,
    )
    assert model.executor.ranks.mesh.num_chips == num_ranks
    assert set(switch.ways) <= {planned.prefill, planned.decode}
    engine = TensorEngine(
        model, switch, workload=work, tokenizer=None, rows=planned.rows, call_tokens=256
    )
    found = engine.run(tiny.requests(prompts, SamplingParams(max_tokens=4)))
    tokens = {own.index: list(own.token_ids) for own in found}
    wanted = tiny.tokens(tiny.reference(reference, prompts, 4))
    assert [tokens[index] for index in range(len(prompts))] == wanted


def work(rows: int, prompt: int) -> Workload:
    return Workload(
        num_rows=rows,
        max_prompt_tokens=prompt,
        max_new_tokens=64,
        max_total_tokens=prompt + 64,
        total_prompt_tokens=rows * prompt,
        total_new_tokens=rows * 64,
    )


def test_phases_have_ways_of_their_own(tmp_path: Path) -> None:
    """A multi-query model with long prompts: weights are gathered for these, and stay for decoding,
    whose rows are cut. With little memory fewer rows are computed together, then none."""
    tiny.make_model(tmp_path, config=CONFIGS["falcon 7b"])
    config = read_config(tmp_path)
    asked = work(64, 4096)
    found = plan_ways(config, 4, RATES, asked, torch.float32, OPTIONS)
    assert isinstance(found.prefill, Cut) and isinstance(found.decode, Cut)
    assert found.rows == 64
    assert found.prefill.gathered and not found.decode.gathered and found.decode.batch
    tight = replace(OPTIONS, memory_bytes=10_000_000)
    assert plan_ways(config, 4, RATES, asked, torch.float32, tight).rows < 64
    with pytest.raises(BudgetError):
        plan_ways(config, 4, RATES, asked, torch.float32, replace(OPTIONS, memory_bytes=100_000))


def test_schemes_are_chosen_where_they_are_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bytes are slow a projection is replicated; prompts and single tokens each have their
    scheme, however many rows' tokens come together. Cuts stay where they are as fast, and for
    models that schemes are not for."""
    slow = replace(RATES, flops=1e14, memory_bytes_per_s=1e14, link_bytes_per_s=1e6)
    reference = tiny.make_model(tmp_path, num_key_value_heads=4)
    prompts = tiny.prompts(12, 40)
    asked = tiny.workload(prompts, 4)
    monkeypatch.setattr(launching, "measure_rates", lambda ranks, dtype: slow)
    model, switch, planned = launch(
        tmp_path, 4, VirtualRanks, workload=asked, dtype=torch.float32, options=OPTIONS
    )
    assert isinstance(planned.prefill, Dynamic) and planned.prefill != planned.decode
    assert planned.decode == Dynamic(replicated=True)
    engine = TensorEngine(
        model, switch, workload=asked, tokenizer=None, rows=12, call_tokens=planned.call_tokens
    )
    found = engine.run(tiny.requests(prompts, SamplingParams(max_tokens=4)))
    tokens = {own.index: list(own.token_ids) for own in found}
    wanted = tiny.tokens(tiny.reference(reference, prompts, 4))
    assert [tokens[index] for index in range(len(prompts))] == wanted
    assert engine.taken[planned.prefill][0] > 0
    assert engine.taken[planned.decode][0] >= 3 * len(prompts)

    config = read_config(tmp_path)
    fast = replace(RATES, link_bytes_per_s=1e14, collective_s=1e-9)
    assert isinstance(plan_ways(config, 4, fast, asked, torch.float32, OPTIONS).decode, Cut)
    tiny.make_model(tmp_path / "mixtral", config=CONFIGS["mixtral"])
    experts = read_config(tmp_path / "mixtral")
    assert isinstance(plan_ways(experts, 4, slow, asked, torch.float32, OPTIONS).decode, Cut)


def test_the_fastest_way_gives_place_to_one_that_fits(tmp_path: Path) -> None:
    """Where messages are slow to begin weights are gathered, which takes the memory of several
    layers; where that is not there they stay. What a refusal asks for is enough."""
    model, _, _ = few_wide_layers(tmp_path, 10)
    # Of norms after the layers, which schemes are not for.
    config, asked = replace(read_config(model), norm_place="after"), work(4, 3)
    rates = replace(RATES, link_bytes_per_s=1e10, collective_s=0.01)
    with pytest.raises(BudgetError) as refused:
        plan_ways(config, 2, rates, asked, torch.float32, replace(OPTIONS, memory_bytes=1 << 20))
    needed = re.search(r"needs ([\d.]+) MiB at least", refused.value.limit)
    assert needed is not None, refused.value.limit
    for memory_bytes, are_gathered in (
        (int((float(needed[1]) + 0.01) * 2**20), False),
        (1 << 30, True),
    ):
        own = replace(OPTIONS, memory_bytes=memory_bytes)
        found = plan_ways(config, 2, rates, asked, torch.float32, own)
        assert found.footprint.total <= memory_bytes
        assert isinstance(found.prefill, Cut) and bool(found.prefill.gathered) == are_gathered


@pytest.mark.parametrize("name", ["1d-weight-stationary", "xy-weight-gathered", "mlp-gathered"])
def test_a_layout_is_pinned(name: str, tmp_path: Path) -> None:
    """Whatever was measured."""
    tiny.make_model(tmp_path, num_key_value_heads=4)
    asked = work(8, 64)
    options = replace(OPTIONS, pin=name)
    _, switch, planned = launch(
        tmp_path, 4, VirtualRanks, workload=asked, dtype=torch.float32, options=options
    )
    assert switch.borders == () and [name_of(way, planned.mesh) for way in switch.ways] == [name]


def test_a_layout_that_is_none_is_refused(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    config, asked = read_config(tmp_path), work(8, 64)
    for name, listed in (("sideways", "megatron"), ("xyz-weight-gathered", "y-weight-gathered")):
        with pytest.raises(InputError, match=name) as refused:
            plan_ways(config, 4, RATES, asked, torch.float32, replace(OPTIONS, pin=name))
        assert listed in refused.value.advice
