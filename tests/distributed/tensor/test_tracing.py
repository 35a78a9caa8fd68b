"""Traces of ranks: what was computed and what was under way, as a file that Perfetto opens."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from freight.distributed.ranks import Ranks
from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.functions import LayerFunctions
from freight.distributed.tensor.layers import OnDisk, StoredLayers
from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.planning import build_cut_engine
from freight.distributed.tensor.tracing import Timeline, TracedRanks
from freight.distributed.tensor.vectors import Vectors
from freight.distributed.tensor.virtual import VirtualRanks
from freight.distributed.tensor.weights import Stored
from freight.errors import InputError
from freight.partition.layers import Cut, feed_forward, layer_sizes
from freight.partition.layout import Mesh
from freight.runtime.options import EngineOptions
from freight.runtime.params import SamplingParams
from freight.runtime.request import Completion

from ...runtime import tiny
from ..pipeline.stages import on_ranks
from .bed import config


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event.get("ph") == "X"]


def test_layers_that_come_from_the_disk_are_there(tmp_path: Path) -> None:
    """In a row of their own, those that came first among them."""
    tiny.make_model(tmp_path, num_hidden_layers=4)
    path = tmp_path / "trace.json"
    timeline = Timeline(path, 0)
    model = load_model(
        tmp_path,
        TracedRanks(VirtualRanks(Mesh.of(x=2)), timeline),
        [Cut(width="", inner="x")],
        dtype=torch.float32,
        on_disk=OnDisk(directory=tmp_path, kept=1, slots=2),
        timeline=timeline,
    )
    batch = model.begin(2, 8)
    for _ in range(2):
        model.step(batch, [[5, 6], [7, 8]], model.ways[0])
    model.layers.close()
    timeline.close()
    events = json.loads(path.read_text())
    (row,) = {
        event["tid"]
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"] == "disk"
    }
    reads = [event for event in spans(path) if event["tid"] == row]
    sizes = [int(event["name"].split()[2]) for event in reads]
    assert sum(sizes) == model.layers.traffic.moved["disk read"]
    assert [event["name"].split(",")[0] for event in reads][:6] == [
        "layer 0", "layer 1", "layer 2", "layer 0", "layer 1", "layer 2",
    ]  # fmt: skip


def test_layers_of_a_later_stage_have_their_numbers(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json", 0)
    on_disk = OnDisk(directory=tmp_path, kept=0, slots=2)
    layers = StoredLayers([[16], [16]], on_disk, torch.device("cpu"), timeline, first=6)
    for number in range(2):
        own = [torch.full((4,), float(number))]
        layers.append(Stored(parts={"weight": own}, layouts={}, vectors=Vectors()))
    for place in range(2):
        layers.take(place)
    layers.close()
    timeline.close()
    reads = [event["name"].split(",")[0] for event in spans(tmp_path / "trace.json")]
    assert reads == ["layer 6", "layer 7"]


@pytest.mark.parametrize("looped", [False, True])
def test_every_computation_and_message_of_a_layer_is_there(looped: bool, tmp_path: Path) -> None:
    """In loops a product is computed in as many pieces as come."""
    path = tmp_path / "trace.json"
    mesh, own_config = Mesh.of(x=4), config(8, 8)
    own = feed_forward(
        mesh, layer_sizes(own_config, rows=1, new_tokens=8), Cut(width="", inner="x")
    )
    timeline = Timeline(path, 3)
    plain = VirtualRanks(mesh)
    executor = Executor(TracedRanks(plain, timeline), looped=looped, timeline=timeline)
    given = {
        name: [torch.randn([int(n) for n in layout.shape(own.sizes, mesh)]) for _ in range(4)]
        for name, layout in {**own.inputs, **own.weights}.items()
    }
    found = executor.run(own, given, LayerFunctions(own_config, executor.ranks, Vectors()))
    timeline.close()
    untraced = Executor(VirtualRanks(mesh), looped=looped)
    wanted = untraced.run(own, given, LayerFunctions(own_config, untraced.ranks, Vectors()))
    for name, parts in wanted.items():
        for part, other in zip(parts, found[name], strict=True):
            assert torch.equal(part, other)
    assert executor.moved == untraced.moved and executor.moved
    told = spans(path)
    computed = [event["name"] for event in told if event["tid"] == 0]
    assert set(computed) == {step.out for step in own.computes}
    assert (len(computed) > len(own.computes)) == looped
    messages = [event for event in told if event["tid"]]
    sent = sum(int(event["name"].split(", ")[1].split()[0]) for event in messages)
    assert sent == executor.ranks.sent_bytes == sum(executor.moved.values())
    rows = defaultdict(list)
    for event in told:
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in rows.values():
        times.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(times))


def test_a_run_is_traced_by_each_rank(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    prompts, params = tiny.prompts(4, 9), SamplingParams(max_tokens=3)
    work = tiny.workload(prompts, 3, params)

    def answers(ranks: Ranks) -> list[Completion]:
        options = EngineOptions(
            device="cpu", dtype="float32", trace_path=tmp_path / f"trace{ranks.rank}.json"
        )
        engine = build_cut_engine(
            tmp_path, options=options, workload=work, ranks=ranks, pin="x-weight-gathered"
        )
        found = [*engine.run(tiny.requests(prompts, params) if not ranks.rank else iter(()))]
        engine.summary()
        return found

    first, _ = on_ranks(2, answers)
    assert len(first) == len(prompts)
    for rank in range(2):
        told = spans(tmp_path / f"trace{rank}.json")
        assert {event["pid"] for event in told} == {rank}
        assert any(event["name"].startswith("weights, ") for event in told)
        assert any(event["name"] == "attended" for event in told)


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    work = tiny.workload([[1, 2]], 2)
    options = EngineOptions(device="cpu", dtype="float32")

    def attempt(ranks: Ranks) -> object:
        own = replace(options, trace_path=tmp_path / "no" / f"{ranks.rank}.json")
        try:
            return build_cut_engine(tmp_path, options=own, workload=work, ranks=ranks)
        except InputError as error:
            return error

    for error in on_ranks(2, attempt):
        assert isinstance(error, InputError) and "cannot be written" in error.limit
