"""Predicted beside measured: policies of many kinds, each run after the machine is profiled.

Random weights of two shapes in bfloat16, on the CPU and on the simulated device, computed in what
this machine is faster at. The rates of a shared machine change by the minute, so it is profiled
anew before every run, and medians of both are compared. "Around": what would have been predicted
for a machine as it was on average before and after the run, by the profile that follows; what is
left of the error then is the model's more than the minute's. The last line is JSON.

    GOMP_SPINCOUNT=10000 python benchmarks/predictions.py

``--profile-once``: one profile for all cases. ``--turns 3``: all of it as often, with a profile in
each turn, so that the runs of a case are minutes apart. ``--fewer 4`` takes a fourth of the rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from freight.hardware.machine import Machine
from freight.model.config import ModelConfig, read_config
from freight.model.decoder import build_programme
from freight.model.dummy import write_dummy_checkpoint
from freight.plan.default import Plan
from freight.plan.forecast import forecast
from freight.plan.workload import Workload
from freight.quantities import GIB, MIB
from freight.runtime.device import ComputeDevice, find_device
from freight.runtime.engine import Engine, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.planning import rates_for
from freight.runtime.profiler import profile
from freight.runtime.request import Request, SamplingParams

SHAPES = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 2048,
    },
    # Four norms a layer and two of each head, gates by gelu, windows in five of six layers.
    "gemma": {
        "model_type": "gemma3_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 64,
        "sliding_window_pattern": 6,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One policy on one workload."""

    name: str
    shape: str
    prompt: int
    new: int
    rows: int
    options: dict[str, Any] = field(default_factory=dict)


def make_cases(directory: Path) -> Iterator[Case]:
    """Weights, KV and activations in RAM and on disk, several block shapes, a device on a link."""
    disk = {"disk_dir": directory}

    def on_cpu(name: str, shape: str = "llama", size: str = "128:12:64", **options: Any) -> Case:
        prompt, new, rows = map(int, size.split(":"))
        return Case(
            name=name,
            shape=shape,
            prompt=prompt,
            new=new,
            rows=rows,
            options={"device": "cpu", **disk, **options},
        )

    def on_device(name: str, rate: str, memory: int, **options: Any) -> Case:
        sim = {"device": "sim", "sim_bytes_per_s": int(float(rate)), "gpu_memory_bytes": memory}
        return on_cpu(name, size="64:8:32", **{**options, **sim})

    kv_disk, kv_half = {"kv_percent": (0.0, 0.0, 100.0)}, {"kv_percent": (0.0, 50.0, 50.0)}
    yield on_cpu("all in memory", weights_percent=(0.0, 100.0, 0.0))
    yield on_cpu("all weights on disk", weights_percent=(0.0, 0.0, 100.0))
    yield on_cpu("half of the weights on disk", weights_percent=(0.0, 50.0, 50.0))
    yield on_cpu("small rows", size="16:12:64", weights_percent=(0.0, 20.0, 80.0))
    yield on_cpu("a block of eight rows", size="128:12:8", weights_percent=(0.0, 0.0, 100.0))
    yield on_cpu(
        "four micro-batches",
        weights_percent=(0.0, 30.0, 70.0),
        micro_batch_size=16,
        num_micro_batches=4,
    )
    yield on_cpu(
        "two blocks",
        weights_percent=(0.0, 30.0, 70.0),
        micro_batch_size=16,
        num_micro_batches=2,
    )
    yield on_cpu("KV on disk", "opt", "256:8:16", weights_percent=(0.0, 50.0, 50.0), **kv_disk)
    yield on_cpu(
        "half of KV on disk", "opt", "256:8:16", weights_percent=(0.0, 100.0, 0.0), **kv_half
    )
    yield on_cpu(
        "activations on disk",
        weights_percent=(0.0, 50.0, 50.0),
        activations_percent=(0.0, 0.0, 100.0),
    )
    yield on_cpu("windows, in memory", "gemma", weights_percent=(0.0, 100.0, 0.0))
    yield on_cpu(
        "windows, KV on disk", "gemma", "256:8:32", weights_percent=(0.0, 50.0, 50.0), **kv_disk
    )
    yield on_cpu("without overlap", weights_percent=(0.0, 0.0, 100.0), overlap=False)
    yield on_device("a device, weights in RAM", "4e9", GIB, weights_percent=(30.0, 70.0, 0.0))
    yield on_device(
        "a device on a slow link, KV in RAM",
        "1.5e9",
        GIB,
        weights_percent=(50.0, 50.0, 0.0),
        kv_percent=(0.0, 100.0, 0.0),
        cpu_attention_percent=0.0,
    )
    yield on_device(
        "windows, a device on a slow link",
        "1.5e9",
        GIB,
        shape="gemma",
        weights_percent=(50.0, 50.0, 0.0),
        kv_percent=(0.0, 100.0, 0.0),
        cpu_attention_percent=0.0,
    )
    yield on_device(
        "a device on a slow link, attention on the CPU",
        "1.5e9",
        GIB,
        weights_percent=(50.0, 50.0, 0.0),
        kv_percent=(0.0, 100.0, 0.0),
        cpu_attention_percent=100.0,
    )
    yield on_device("a device, three tiers", "4e9", GIB, weights_percent=(20.0, 40.0, 40.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=None, help="on the disk to use")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--turns", type=int, default=1, help="runs of each, the median counts")
    parser.add_argument("--profile-once", action="store_true", help="one profile for all cases")
    parser.add_argument("--fewer", type=int, default=1, help="what rows are divided by")
    arguments = parser.parse_args()
    runs: dict[str, list[_Run]] = {}
    with tempfile.TemporaryDirectory(prefix="freight-", dir=arguments.directory) as name:
        for _ in range(arguments.turns):
            machine = measure_machine(Path(name))
            for case in make_cases(Path(name)):
                if arguments.only in case.name:
                    own = replace(case, rows=max(1, case.rows // arguments.fewer))
                    found, again = measure(own, Path(name), machine)
                    if not arguments.profile_once:
                        later = measure_machine(Path(name))
                        found = replace(found, around_s=again(_mean(machine, later)))
                        machine = later
                    runs.setdefault(case.name, []).append(found)
                    print(_described(case.name, [found]), flush=True)
    if arguments.turns > 1:
        print("\nmedians")
        for name, own in runs.items():
            print(_described(name, own))
    print(_summary("error", [_error(own) for own in runs.values()]))
    if not arguments.profile_once:
        print(_summary("error around", [_error(own, around=True) for own in runs.values()]))
    cases = [{"name": name, "runs": [asdict(own) for own in found]} for name, found in runs.items()]
    print(json.dumps({"benchmark": "predictions", "cases": cases}))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Seconds of prompts and of what follows, and by lane of work; ``around_s`` are predicted for
    the machine as it was before and after."""

    predicted_s: tuple[float, float]
    around_s: tuple[float, float] | None = None
    measured_s: tuple[float, float]
    predicted_work_s: Mapping[str, float]
    measured_work_s: Mapping[str, float]


def _error(runs: Sequence[_Run], *, around: bool = False) -> float:
    """Of the medians of all seconds."""
    told = statistics.median(
        sum((own.around_s or ()) if around else own.predicted_s) for own in runs
    )
    return told / statistics.median(sum(own.measured_s) for own in runs) - 1


def _summary(what: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return (
        f"{what}: median {statistics.median(sizes):.1%}, largest {max(sizes):.1%}, "
        f"with its sign {statistics.median(errors):+.1%}"
    )


def _described(name: str, runs: Sequence[_Run]) -> str:
    told, was = ([own.predicted_s for own in runs], [own.measured_s for own in runs])
    seconds = [statistics.median(part) for own in (told, was) for part in zip(*own, strict=True)]
    line = (
        f"{name:46} predicted {seconds[0]:6.2f} + {seconds[1]:6.2f} s, measured "
        f"{seconds[2]:6.2f} + {seconds[3]:6.2f} s, error {_error(runs):+.1%}"
    )
    return line + (f", around {_error(runs, around=True):+.1%}" if runs[0].around_s else "")


def measure_machine(directory: Path) -> Machine:
    return profile(find_device("cpu"), directory, lambda _: None)


def measure(
    case: Case, directory: Path, machine: Machine
) -> tuple[_Run, Callable[[Machine], tuple[float, float]]]:
    """Prediction and measurement of a case, and what predicts the same plan for another machine:
    seconds of prompts, and of what follows."""
    model_dir = write_model(directory, case.shape)
    with closing(build(case, model_dir, machine)) as engine:
        run(engine, case)
        told, was = engine.forecast, engine.meter
        assert told is not None
        found = _Run(
            predicted_s=(told.prefill_s, told.decode_s),
            measured_s=(was.prefill_s, was.decode_s),
            predicted_work_s=dict(told.busy_s),
            measured_work_s=dict(was.busy_s),
        )
        again = partial(_foretell, engine.plan, engine.config, engine.dtype, engine.device, case)
    return found, again


def _foretell(
    plan: Plan,
    config: ModelConfig,
    dtype: torch.dtype,
    device: ComputeDevice,
    case: Case,
    machine: Machine,
) -> tuple[float, float]:
    """What a plan that was run would take on a machine: prompts, and what follows."""
    rates = rates_for(_options(case, machine), device)
    assert rates is not None
    name = str(dtype).removeprefix("torch.")
    told = forecast(plan, rates, config, build_programme(config), name)
    return told.prefill_s, told.decode_s


def _mean(one: Any, other: Any) -> Any:
    """Of two machines that were measured alike, number by number."""
    if is_dataclass(one):
        parts = {own.name: getattr(one, own.name) for own in fields(one)}
        means = {name: _mean(own, getattr(other, name)) for name, own in parts.items()}
        return type(one)(**means)
    if isinstance(one, Mapping):
        return {name: _mean(own, other[name]) for name, own in one.items()}
    if isinstance(one, tuple):
        return tuple(_mean(*own) for own in zip(one, other, strict=True))
    return (one + other) / 2 if isinstance(one, float) else one


def write_model(directory: Path, shape: str) -> Path:
    """Where a checkpoint of that shape lies: as published ones do, in 16 bits."""
    model_dir = directory / shape
    if not model_dir.exists():
        model_dir.mkdir()
        (model_dir / "config.json").write_text(json.dumps(SHAPES[shape]))
        write_dummy_checkpoint(read_config(model_dir), model_dir, dtype="bfloat16")
    return model_dir


def build(case: Case, model_dir: Path, machine: Machine) -> Engine:
    return build_engine(model_dir, options=_options(case, machine), workload=workload_of(case))


def _options(case: Case, machine: Machine) -> EngineOptions:
    room = 8 * GIB + 512 * MIB
    return EngineOptions(machine=machine, cpu_memory_bytes=room, **case.options)


def workload_of(case: Case) -> Workload:
    rows, prompt, new = case.rows, case.prompt, case.new
    return Workload.of_alike(rows, prompt, new)


def run(engine: Engine, case: Case) -> None:
    draw = random.Random(0)
    params = SamplingParams(max_tokens=case.new)
    requests = (
        Request(
            index=i,
            prompt_ids=[draw.randrange(9, 30000) for _ in range(case.prompt)],
            params=params,
        )
        for i in range(case.rows)
    )
    num_tokens = sum(len(completion.token_ids) for completion in engine.run(requests))
    assert num_tokens == case.rows * case.new, "rows ended early"


if __name__ == "__main__":
    main()
