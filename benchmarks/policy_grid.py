"""The policy that the search picks against a grid of others, all run for real in one memory budget.

The machine is profiled first. What the search picked and what is chosen from nominal rates run
again and again between the policies of the grid, as the speed of a shared machine changes; what the
search picked is in the grid as well, which is one more run of it. The last line is JSON.

    python benchmarks/policy_grid.py --cpu-memory 1100MiB
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import predictions
from predictions import SHAPES, Case, write_model

from freight.errors import FreightError, InputError
from freight.hardware.storage import read_machine, write_machine
from freight.quantities import parse_bytes
from freight.runtime.device import find_device
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.profiler import profile

EVERY = 4


def policies(rows: int) -> Iterator[dict[str, Any]]:
    """Block shapes, KV in RAM and on disk; as much of the weights in RAM as fits."""
    shapes = [
        (size, count)
        for size, count in product((8, 16, 32, 64), (1, 2, 4, 8))
        if size * count <= rows
    ]
    kvs = [(0.0, 100.0, 0.0), (0.0, 50.0, 50.0), (0.0, 0.0, 100.0)]
    for kv, (size, count) in product(kvs, shapes):
        yield {
            "micro_batch_size": size,
            "num_micro_batches": count,
            "kv_percent": kv,
            "activations_percent": (0.0, 100.0, 0.0),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--workload", default="128:16:64", help="prompt:new:rows")
    parser.add_argument("--cpu-memory", default="1100MiB")
    parser.add_argument("--most", type=int, default=30, help="policies of the grid")
    parser.add_argument("--directory", default=None, help="on the disk to use")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        run_one(json.loads(arguments.one))
        return
    prompt, new, rows = map(int, arguments.workload.split(":"))
    budget = parse_bytes(arguments.cpu_memory)
    with tempfile.TemporaryDirectory(prefix="freight-", dir=arguments.directory) as name:
        directory = Path(name)
        model_dir = write_model(directory, arguments.shape)
        case = Case(name="", shape=arguments.shape, prompt=prompt, new=new, rows=rows)
        machine = directory / "machine.json"
        write_machine(profile(find_device("cpu"), directory, lambda _: None), machine)
        searched: list[_Ran] = []
        nominal: list[_Ran] = []
        grid: list[_Ran] = []
        for place, options in enumerate(policies(rows)):
            if len(grid) % EVERY == 0 and (len(grid) or not place):
                searched.append(run_apart(case, directory, model_dir, budget, machine, {}))
                nominal.append(run_apart(case, directory, model_dir, budget, None, {}))
            try:
                grid.append(run_apart(case, directory, model_dir, budget, None, options))
            except FreightError as error:
                print(f"{options}: does not fit: {str(error).splitlines()[0][:80]}")
            if len(grid) == arguments.most:
                break
    picked = {own.policy for own in searched}
    found = statistics.median(own.seconds for own in [*searched, *grid] if own.policy in picked)
    others = [own for own in grid if own.policy not in picked]
    best = min(others, key=lambda own: own.seconds)
    plain = statistics.median(own.seconds for own in nominal)
    print(f"searched {found:.2f} s (median of its runs), from nominal rates {plain:.2f} s")
    print(f"best of {len(others)} other policies {best.seconds:.2f} s: {best.policy}")
    print(f"the search reaches {best.seconds / found:.0%} of that")
    runs = {"searched": searched, "nominal": nominal, "grid": grid}
    record = {name: [asdict(own) for own in of_name] for name, of_name in runs.items()}
    print(json.dumps({"benchmark": "policy grid", **record}))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ran:
    """From the first operation to the last token, and the policy as the engine tells it."""

    seconds: float
    policy: str


def run_apart(
    case: Case,
    directory: Path,
    model_dir: Path,
    budget: int,
    machine: Path | None,
    options: dict[str, Any],
) -> _Ran:
    """One run, in a process of its own."""
    asked = {
        "case": asdict(case),
        "directory": str(directory),
        "model_dir": str(model_dir),
        "budget": budget,
        "machine": None if machine is None else str(machine),
        "options": options,
    }
    command = [sys.executable, __file__, "--one", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(done.stderr.strip().splitlines()[-1], "", "")
    ran = _Ran(**json.loads(done.stdout.splitlines()[-1]))
    print(f"{ran.seconds:6.2f} s  {ran.policy}{'' if options else ', chosen'}", flush=True)
    return ran


def run_one(asked: dict[str, Any]) -> None:
    """What the process does."""
    case = Case(**asked["case"])
    machine = None if asked["machine"] is None else read_machine(Path(asked["machine"]))
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in asked["options"].items()
    }
    engine = build_engine(
        Path(asked["model_dir"]),
        options=EngineOptions(
            device="cpu",
            machine=machine,
            cpu_memory_bytes=asked["budget"],
            disk_dir=Path(asked["directory"]),
            **options,
        ),
        workload=predictions.workload_of(case),
    )
    with closing(engine):
        predictions.run(engine, case)
        policy = engine.summary().splitlines()[0]
        print(json.dumps({"seconds": engine.meter.seconds, "policy": policy}))


if __name__ == "__main__":
    main()
