"""What a rule or a technique gains over another way, simulated beside measured, on the simulated
device behind a slow link.

Random weights in 16 bits, in RAM, that cross the link in every sweep. The machine is profiled once;
for each way the planner chooses the rest, and its plan is run. Ways of a pair take turns, medians
count. The last line is JSON.

    GOMP_SPINCOUNT=10000 python benchmarks/gains.py --turns 3
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from freight.hardware.machine import Machine
from freight.model.config import read_config
from freight.model.dummy import write_dummy_checkpoint
from freight.plan.beginnings import Beginnings, Shared
from freight.plan.workload import Workload
from freight.quantities import GIB, MIB
from freight.runtime.device import find_device
from freight.runtime.engine import Engine, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.profiler import profile
from freight.runtime.request import Prefix, Request, SamplingParams

LINK = 1.5e9
MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WINDOWED = {
    **MODEL,
    "model_type": "gemma3_text",
    "head_dim": 64,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
"""Of every six layers five attend the last 64 tokens."""

Lengths = Sequence[tuple[int, int]]
"""(prompt, new) tokens of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two ways to run the same rows, so many ``samples`` of each prompt."""

    name: str
    lengths: Lengths
    samples: int = 1
    before: dict[str, Any]
    after: dict[str, Any]
    both: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: MODEL)


def make_pairs() -> Iterator[Pair]:
    draw = random.Random(1)
    ragged = [(draw.randint(8, 64), draw.randint(4, 48)) for _ in range(160)]
    zigzag = {"admission": "zigzag"}
    near = {
        "weights_percent": (0.0, 100.0, 0.0),
        "kv_percent": (100.0, 0.0, 0.0),
        "gpu_memory_bytes": 400 * MIB,
    }
    yield Pair(
        name="refill over zig-zag, many lengths",
        lengths=ragged,
        before=zigzag,
        after={"admission": "refill"},
        both=near,
    )
    yield Pair(
        name="diagonal over zig-zag, one length",
        lengths=[(32, 32)] * 160,
        before=zigzag,
        after={"admission": "diagonal"},
        both=near,
    )
    yield Pair(
        name="rows that move over rows that stay",
        lengths=[(draw.randint(64, 192), draw.randint(8, 64)) for _ in range(120)],
        before={"move_rows": False},
        after={"move_rows": True},
        both={
            "admission": "refill",
            "gpu_memory_bytes": 2 * GIB,
            "weights_percent": (100.0, 0.0, 0.0),
            "kv_percent": (40.0, 60.0, 0.0),
            "cpu_attention_percent": 0.0,
            "micro_batch_size": 20,
            "num_micro_batches": 4,
            "sim_bytes_per_s": int(0.5e9),
        },
    )
    yield Pair(
        name="keys computed again over keys moved",
        lengths=[(192, 16)] * 16,
        before={"recompute_percent": 0.0},
        after={"recompute_percent": 100.0},
        both={
            **zigzag,
            "gpu_memory_bytes": GIB,
            "weights_percent": (100.0, 0.0, 0.0),
            "kv_percent": (0.0, 100.0, 0.0),
            "cpu_attention_percent": 0.0,
            "sim_bytes_per_s": int(0.1e9),
        },
    )
    yield Pair(
        name="samples that share their prompt over samples that do not",
        lengths=[(draw.randint(150, 300), 32) for _ in range(24)],
        samples=8,
        before={"share_prefixes": False},
        after={"share_prefixes": True},
        both={**near, "gpu_memory_bytes": 500 * MIB},
    )
    whole, rolled = {"roll_windows": False}, {"roll_windows": True}
    yield Pair(
        name="windows that roll over all keys, on the device",
        lengths=[(draw.randint(150, 300), 32) for _ in range(96)],
        before=whole,
        after=rolled,
        both=near,
        model=WINDOWED,
    )
    yield Pair(
        name="windows that roll over all keys, behind the link",
        lengths=[(256, 32)] * 32,
        before=whole,
        after=rolled,
        both={
            **zigzag,
            "gpu_memory_bytes": 2 * GIB,
            "weights_percent": (100.0, 0.0, 0.0),
            "kv_percent": (0.0, 100.0, 0.0),
            "cpu_attention_percent": 0.0,
            "sim_bytes_per_s": int(0.5e9),
        },
        model=WINDOWED,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=None, help="where the weights are written")
    parser.add_argument("--only", default="", help="pairs whose name has this in it")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory(prefix="freight-", dir=arguments.directory) as name:
        machine = profile(find_device("cpu"), Path(name), lambda _: None)
        for pair in make_pairs():
            if arguments.only in pair.name:
                model_dir = Path(name) / pair.model["model_type"]
                write_model(pair.model, model_dir)
                records.append(compare(pair, model_dir, machine, arguments.turns))
    print(json.dumps({"benchmark": "gains", "link_bytes_per_s": LINK, "pairs": records}))


def write_model(model: dict[str, Any], model_dir: Path) -> None:
    """Random weights in a directory, unless they are there."""
    if model_dir.exists():
        return
    model_dir.mkdir()
    (model_dir / "config.json").write_text(json.dumps(model))
    write_dummy_checkpoint(read_config(model_dir), model_dir, dtype="bfloat16")


def compare(pair: Pair, model_dir: Path, machine: Machine, turns: int) -> dict[str, Any]:
    """Seconds of both ways, simulated and measured, and what the second one gains."""
    simulated: list[list[float]] = [[], []]
    measured: list[list[float]] = [[], []]
    plans = ["", ""]
    for _ in range(turns):
        for number, way in enumerate((pair.before, pair.after)):
            options = {"sim_bytes_per_s": int(LINK), **pair.both, **way}
            with closing(build(model_dir, machine, pair, options)) as engine:
                run(engine, pair)
                assert engine.forecast is not None
                simulated[number].append(engine.forecast.seconds)
                measured[number].append(engine.meter.seconds)
                policy = engine.plan.policy
                plans[number] = (
                    f"{policy.admission} {policy.num_micro_batches} x {policy.micro_batch_size}"
                )
    told = [statistics.median(own) for own in simulated]
    was = [statistics.median(own) for own in measured]
    gains = {"simulated": told[0] / told[1], "measured": was[0] / was[1]}
    print(
        f"{pair.name:38} {plans[0]} -> {plans[1]}: simulated {told[0]:.1f} -> {told[1]:.1f} s "
        f"({gains['simulated']:.2f}), measured {was[0]:.1f} -> {was[1]:.1f} s "
        f"({gains['measured']:.2f}), ratio {gains['measured'] / gains['simulated']:.3f}",
        flush=True,
    )
    return {"name": pair.name, "plans": plans, "simulated_s": simulated, "measured_s": measured}


def build(model_dir: Path, machine: Machine, pair: Pair, options: dict[str, Any]) -> Engine:
    prompts, new = (np.array(own) for own in zip(*pair.lengths, strict=True))
    shared = prompts - 1 if pair.samples > 1 else np.zeros_like(prompts)
    count = len(prompts)
    workload = Workload(
        num_rows=pair.samples * count,
        max_prompt_tokens=int(prompts.max()),
        max_new_tokens=int(new.max()),
        max_total_tokens=int((prompts + new).max()),
        total_prompt_tokens=int(prompts.sum()),
        total_new_tokens=pair.samples * int(new.sum()),
        min_samples=pair.samples,
        max_samples=pair.samples,
        lengths=tuple((pair.samples, *own) for own in pair.lengths),
    )
    if pair.samples > 1:
        beginnings = Beginnings.of(
            tuple(Shared(tokens, 1) for tokens in shared.tolist()),
            keys=np.arange(count),
            tokens=shared,
            prompts=prompts,
            totals=prompts + new,
            rows=np.full(count, pair.samples),
        )
        workload = replace(workload, beginnings=beginnings)
    return build_engine(
        model_dir,
        options=EngineOptions(machine=machine, device="sim", cpu_memory_bytes=8 * GIB, **options),
        workload=workload,
    )


def run(engine: Engine, pair: Pair) -> None:
    draw, samples = random.Random(0), pair.samples
    requests = (
        Request(
            index=index,
            prompt_ids=[draw.randrange(9, 7000) for _ in range(prompt)],
            params=SamplingParams(max_tokens=new, n=samples, temperature=float(samples > 1)),
            prefix=Prefix(key=index, num_tokens=prompt - 1) if samples > 1 else None,
        )
        for index, (prompt, new) in enumerate(pair.lengths)
    )
    made = sum(len(own.token_ids) for done in engine.run(requests) for own in done.outputs)
    assert made == samples * sum(new for _, new in pair.lengths), "rows ended early"


if __name__ == "__main__":
    main()
