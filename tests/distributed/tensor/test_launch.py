"""From a model and ranks to an engine: what is planned fits, runs, and can be pinned."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freight.distributed.tensor import launch as launching
from freight.distributed.tensor.choice import plan_ways
from freight.distributed.tensor.engine import TensorEngine
from freight.distributed.tensor.fitting import Planned, TensorOptions
from freight.distributed.tensor.footprint import Footprint, WeightSizes
from freight.distributed.tensor.launch import launch
from freight.distributed.tensor.names import name_of
from freight.distributed.tensor.offloading import Pace, spreads
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


def work(rows: int, prompt: int, new: int = 64) -> Workload:
    return Workload(
        num_rows=rows,
        max_prompt_tokens=prompt,
        max_new_tokens=new,
        max_total_tokens=prompt + new,
        total_prompt_tokens=rows * prompt,
        total_new_tokens=rows * new,
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


def test_what_memory_lacks_is_on_the_disk(tmp_path: Path) -> None:
    """As many layers as the memory of rows that are worth more: a slow disk has fewer of them. With
    enough memory nothing is there, and a refusal names what is enough with a disk."""
    model, _, _ = few_wide_layers(tmp_path, 10)
    config, asked = read_config(model), work(256, 32, 512)
    options = replace(OPTIONS, disk_dir=tmp_path)

    def planned(memory_bytes: int, disk: float = 1e9, **changes: Any) -> Planned:
        own = replace(options, memory_bytes=memory_bytes, **changes)
        found = plan_ways(config, 2, RATES, asked, torch.float32, own, disk)
        assert found.footprint.total <= memory_bytes
        assert (found.kept is None) == (found.sweep_tokens is None)
        return found

    assert planned(1 << 34).kept is None
    with pytest.raises(BudgetError) as refused:
        planned(1 << 20)
    needed = re.search(r"needs ([\d.]+) MiB at least", refused.value.limit)
    assert needed is not None and "--disk-dir" not in refused.value.advice
    least = int((float(needed[1]) + 0.01) * 2**20)
    assert planned(least).kept == 0
    with pytest.raises(BudgetError, match="--disk-dir"):
        planned(least, disk_dir=None)
    slow, fast = planned(1 << 29, 1e7), planned(1 << 29, 1e10)
    assert slow.kept is None or (fast.kept is not None and slow.kept > fast.kept)
    assert slow.rows < fast.rows
    # More tokens than there are take no more memory.
    assert planned(least, batch_tokens=1 << 20).kept == 0
    # Where that is asked for, so many rows and tokens.
    own = planned(1 << 29, 1e9, rows=8, batch_tokens=64)
    assert (own.rows, own.sweep_tokens) in ((8, 64), (8, None))


@pytest.mark.parametrize("memory_mib", [40, 60, 100, 160, 400])
def test_plans_that_offload_are_the_fastest_of_all(memory_mib: int) -> None:
    """Of all layers that might be kept and all lengths of sweeps, by their own count."""
    asked = work(100, 48)
    sizes = WeightSizes(layers=(8 << 20, 6 << 20) * 6, ends=5e6, reading=1e6)
    pace = Pace(prompt_token_s=0.001, decode_s=0.02, disk_bytes_per_s=2e8)
    held = Footprint(weights=sum(sizes.layers) + 5e6, keys=8e6, call=4e6, token=4000.0)
    memory = memory_mib << 20

    def fits(kept: int, tokens: int) -> bool:
        own = held.offloaded(sizes, kept=kept, slots=2, tokens=tokens)
        return own.total <= memory

    found = [
        *spreads(
            held,
            sizes,
            pace,
            rows=32,
            slots=2,
            call_tokens=64,
            sweep_tokens=None,
            memory_bytes=memory,
            workload=asked,
        )
    ]
    lengths = [64, 128, 256, 512, 1024, 32 * 48]
    pairs = [(kept, tokens) for kept in range(12) for tokens in lengths if fits(kept, tokens)]
    assert bool(found) == bool(pairs)
    if found:
        best = min(found, key=lambda own: own.row_s)
        read_s = [
            ((12 - kept) / 12 * sum(sizes.layers) / 2e8, -(-32 * 48 // tokens), tokens)
            for kept, tokens in pairs
        ]
        wanted = min(
            (max(sweeps * own, 32 * 48 * 0.001) + 64 * max(own, 0.02)) / 32
            for own, sweeps, _ in read_s
        )
        if held.total <= memory:
            wanted = min(wanted, (32 * 48 * 0.001 + 64 * 0.02) / 32)
        assert best.row_s == pytest.approx(wanted)


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
