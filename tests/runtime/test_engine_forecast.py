"""What was predicted of a run against what the run counted: bytes exactly, since both are made of
the same operations; time is measured elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freight.hardware.curve import Curve
from freight.hardware.machine import ComputeUnit, Link, Machine
from freight.plan import forecast
from freight.plan.continuous import RolledSweep
from freight.plan.operation import Lane
from freight.quantities import GIB, MIB
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Prefix, Request, SamplingParams

from . import tiny
from .test_engine_parity import gemma4
from .test_engine_recurrence import CONFIGS

STEPS = 5  # so few that every sweep is run on the clock
PROMPT = 21

MACHINE = Machine(
    name="imagined",
    description="round figures",
    units={
        "cpu": ComputeUnit(
            name="cpu",
            memory_bytes=8 * GIB,
            memory_bytes_per_s=1e10,
            products={"float32": Curve.constant(1e11), "bfloat16": Curve.constant(1e12)},
            attention_flops={"float32": 1e11, "bfloat16": 1e11},
            attended_bytes_per_s=Curve.constant(5e9),
        )
    },
    links={
        "disk read": Link(bytes_per_s=Curve.constant(2e9)),
        "disk write": Link(bytes_per_s=Curve.constant(1e9)),
    },
)
POLICIES: dict[str, dict[str, Any]] = {
    "cpu, mixed": tiny.ON_CPU,
    "sim, mixed": {**tiny.ON_SIM, "gpu_memory_bytes": 64 * MIB},
    "weights on disk": {"device": "cpu", "weights_percent": (0.0, 0.0, 100.0)},
    "without overlap": {**tiny.ON_CPU, "overlap": False},
    "kv on the host": {
        "device": "sim",
        "gpu_memory_bytes": 64 * MIB,
        "weights_percent": (100.0, 0.0, 0.0),
        "kv_percent": (0.0, 100.0, 0.0),
        "micro_batch_size": 3,
        "num_micro_batches": 2,
    },
    "attention on the host": {
        "device": "sim",
        "gpu_memory_bytes": 64 * MIB,
        "weights_percent": (100.0, 0.0, 0.0),
        "kv_percent": (20.0, 40.0, 40.0),
        "cpu_attention_percent": 60.0,
        "micro_batch_size": 5,
        "num_micro_batches": 2,
    },
    "keys computed again": {
        "device": "sim",
        "gpu_memory_bytes": 64 * MIB,
        "weights_percent": (100.0, 0.0, 0.0),
        "kv_percent": (20.0, 40.0, 40.0),
        "cpu_attention_percent": 0.0,
        "recompute_percent": 50.0,
        "micro_batch_size": 5,
        "num_micro_batches": 2,
    },
    "keys computed again, from disk": {
        **tiny.ON_CPU,
        "kv_percent": (0.0, 0.0, 100.0),
        "recompute_percent": 100.0,
        "admission": "refill",
    },
    "diagonal": {**tiny.ON_CPU, "admission": "diagonal"},
    "refill in chunks": {**tiny.ON_CPU, "admission": "refill", "batch_tokens": 12},
    "refill on a device": {
        **tiny.ON_SIM,
        "gpu_memory_bytes": 64 * MIB,
        "admission": "refill",
        "micro_batch_size": 2,
    },
    "as searched": {"device": "cpu"},
    "searched for a device": {"device": "sim", "gpu_memory_bytes": 64 * MIB},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_of_heads_of_several_sizes_are_as_predicted(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make_model(tmp_path, config=gemma4())
    check_bytes(tmp_path, POLICIES[policy], monkeypatch)


def for_themselves(
    rolled: Sequence[RolledSweep], weights: Sequence[float], count: int
) -> tuple[list[int], dict[int, float]]:
    """All sweeps: those that bring as many tokens may still move other bytes."""
    return [*range(len(rolled))], dict(enumerate(weights))


@pytest.mark.parametrize(
    "policy", [name for name in POLICIES if "attention" not in name and "again" not in name]
)
def test_bytes_of_states_are_as_predicted(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model some of whose layers keep a state."""
    tiny.make_model(tmp_path, config=CONFIGS["qwen3.5"])
    options = {**POLICIES[policy]}
    if options.get("cpu_attention_percent"):
        options["cpu_attention_percent"] = 0.0
    check_bytes(tmp_path, options, monkeypatch)


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_as_predicted(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make_model(tmp_path, head_dim=32)  # what comes into attention is narrower than its keys
    check_bytes(tmp_path, POLICIES[policy], monkeypatch)


def check_bytes(tmp_path: Path, policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_representatives", for_themselves)
    prompts = [[1 + (7 * i + j) % 300 for j in range(PROMPT)] for i in range(7)]
    options = {**policy, "machine": MACHINE}
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        before = dict(engine.traffic.moved)
        tiny.run(engine, prompts, STEPS)
        told, meter = engine.forecast, engine.meter
        assert told is not None
        moved = {link: n - before.get(link, 0) for link, n in engine.traffic.moved.items()}
        summary = engine.summary()
        (looked_up,) = engine.plan.layout.tables
        table = sum(part.tier == "disk" for part in looked_up.parts)
    lanes = [Lane.DISK_WRITE, Lane.TO_DEVICE, Lane.FROM_DEVICE]
    # Rows of the table are looked up by token: how many blocks they are in is not foreseen.
    lanes += [] if table else [Lane.DISK_READ]
    for lane in lanes:
        expected = moved.get(lane.value, 0)
        assert told.num_bytes.get(lane, 0.0) == pytest.approx(expected, rel=0.02, abs=8192)
    assert told.new_tokens == STEPS * len(prompts)
    assert meter.decode_s > 0
    assert (meter.prefill_s > 0) == (not engine.plan.policy.is_continuous)
    assert "predicted (measured) seconds" in summary


BEGINNING = list(range(5, 53))
ELSEWHERE: dict[str, dict[str, Any]] = {
    "on disk": {"device": "cpu", "kv_percent": (0.0, 0.0, 100.0)},
    "on disk, refill": {"device": "cpu", "kv_percent": (0.0, 0.0, 100.0), "admission": "refill"},
    "in RAM": {
        "device": "sim",
        "gpu_memory_bytes": 64 * MIB,
        "kv_percent": (0.0, 100.0, 0.0),
        "cpu_attention_percent": 0.0,
        "micro_batch_size": 3,
        "num_micro_batches": 2,
    },
}


@pytest.mark.parametrize("policy", ELSEWHERE)
def test_bytes_of_rows_that_begin_alike_are_as_predicted(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own keys cross a link, those of the beginning none."""
    monkeypatch.setattr(forecast, "_representatives", for_themselves)
    tiny.make_model(tmp_path)
    prompts = [[*BEGINNING, *(1 + (7 * i + j) % 300 for j in range(PROMPT))] for i in range(7)]
    work = tiny.workload(prompts, STEPS)
    options = EngineOptions(
        dtype="float32", verify=True, disk_dir=tmp_path, machine=MACHINE, **ELSEWHERE[policy]
    )
    crossed: dict[int, Counter[Lane]] = {}
    for shared in (0, len(BEGINNING)):
        told = work.with_beginning(shared)
        prefix = Prefix(key=0, num_tokens=shared) if shared else None
        params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
        rows = [
            Request(index=i, prompt_ids=ids, params=params, prefix=prefix)
            for i, ids in enumerate(prompts)
        ]
        engine = build_engine(tmp_path, options=options, workload=told)
        try:
            assert bool(engine.plan.geometry.shared_page) == bool(shared)
            assert len([*engine.run(iter(rows))]) == len(rows)
            assert engine.forecast is not None
            expected = engine.forecast.num_bytes
            loaded = engine.load_traffic
            moved = {link: n - loaded.get(link, 0) for link, n in engine.traffic.moved.items()}
        finally:
            engine.close()
        lanes = Lane.DISK_READ, Lane.DISK_WRITE, Lane.TO_DEVICE, Lane.FROM_DEVICE
        crossed[shared] = Counter({lane: moved.get(lane.value, 0) for lane in lanes})
        for lane, size in crossed[shared].items():
            assert expected.get(lane, 0.0) == pytest.approx(size, rel=0.02, abs=8192)
    assert crossed[len(BEGINNING)].total() < 0.6 * crossed[0].total()


def test_nothing_is_predicted_of_an_unknown_machine(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    with tiny.engine(tmp_path, [[1, 2, 3]], 2, device="cpu") as engine:
        tiny.run(engine, [[1, 2, 3]], 2)
        assert engine.forecast is None
        assert "predicted" not in engine.summary()


def test_a_trace_has_both_sides(tmp_path: Path) -> None:
    """What was predicted and what was measured, from the same beginning, on the same lanes."""
    tiny.make_model(tmp_path)
    prompts = [[1 + i] * PROMPT for i in range(7)]
    path = tmp_path / "trace.json"
    options = {**tiny.ON_SIM, "gpu_memory_bytes": 64 * MIB, "machine": MACHINE, "trace_path": path}
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        tiny.run(engine, prompts, STEPS)
    events = [event for event in json.loads(path.read_text()) if event]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["measured", "predicted"]
    spans = {names[pid]: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in names}
    block = [e for e in spans["measured"] if e["args"]["sweep"] < STEPS]
    for name in ("begin attention", "attend", "finish attention", "copy back KV"):
        counts = {side: sum(e["name"] == name for e in own) for side, own in spans.items()}
        assert counts["predicted"] == sum(e["name"] == name for e in block) > 0, name
    starts = [min(e["ts"] for e in own) for own in spans.values()]
    assert abs(starts[0] - starts[1]) < 1e5
