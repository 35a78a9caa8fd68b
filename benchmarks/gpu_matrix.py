"""Models larger than a GPU's memory on a CUDA device of which 16 GiB may be used, case by case.

    python benchmarks/gpu_matrix.py [--only opt-30b] [--peers accelerate flexgen] [--seconds 540]

The machine is measured first, if it has no profile. Each case is a call of ``freight bench
offload`` in a process of its own: ceiling, prediction, what was reached and, with --peers, others
under the same caps, of as many rows as they are done with in minutes. Weights are made in memory.
The object that a call ends with goes into the file as one line; cases that are there already are
left out, so that a call that was cut short goes on where it was. No case is begun after so many
seconds. --list names them all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "src" / "freight" / "model" / "configs"
MODELS = {
    "opt-30b": (CONFIGS / "opt-30b.json", 96),
    "opt-6.7b": (CONFIGS / "opt-6.7b.json", 192),
    "qwen2.5-32b": (HERE / "qwen2.5-32b" / "config.json", 192),
    "mixtral-8x7b": (HERE / "mixtral-8x7b" / "config.json", 192),
}
"""Configurations, and how many rows."""
PEER_ROWS = {"opt-30b": 48, "opt-6.7b": 64}
OTHERS_ROWS = 16
BATCHES = {"opt-6.7b": "64,32"}
OTHERS_BATCHES = "16"
"""That Accelerate is tried with: what fits beside a layer that comes and goes."""
FLEXGEN = {
    "opt-30b": ("--percent 20 80 0 100 0 100 --gpu-batch-size 48 --num-gpu-batches 1",),
    "opt-6.7b": (
        "--percent 100 0 100 0 100 0 --gpu-batch-size 2",
        "--percent 100 0 0 100 100 0 --gpu-batch-size 32",
    ),
}
"""Its published policies, of as many batches as the host has room for; and one with larger batches.
"""
SHAPES = ("512:32", "128:128")
WAYS = {
    "exact": (),
    "4 bits": ("--weight-bits", "4", "--kv-bits", "4"),
    "no cpu attention": ("--cpu-attention", "0"),
    "cpu attention": ("--cpu-attention", "100"),
    "zigzag": ("--admission", "zigzag"),
    "refill": ("--admission", "refill"),
}
GPU_MEMORY = "16GiB"


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    shape: str
    way: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.shape}, {self.way}"


def cases() -> Iterator[Case]:
    """The most telling first: each model exact, then in 4 bits, then what each part is worth."""
    for way in WAYS:
        for shape in SHAPES:
            for model in MODELS:
                if way in ("exact", "4 bits") or (shape == SHAPES[0] and model != "mixtral-8x7b"):
                    yield Case(model, shape, way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument(
        "--peers", nargs="*", default=[], help="accelerate or flexgen, beside the exact cases"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="begin none after so many")
    parser.add_argument("--out", type=Path, default=Path("gpu-matrix.jsonl"))
    parser.add_argument("--work-dir", default="freight-bench", help="where configurations go")
    parser.add_argument("--cpu-memory", help="most memory of the process, such as 64GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, help="instead of each model's own")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    begun_s = time.monotonic()
    if not arguments.list:
        measure(arguments.device)
    known = read(arguments.out)
    for case in cases():
        if arguments.only not in case.name:
            continue
        key = f"{case.name}, {arguments.cpu_memory or 'all'} of host memory"
        key += ", peers" * bool(peers(case, arguments))
        if arguments.list:
            print(f"{'done' if key in known else '    '} {key}")
        elif key not in known:
            if time.monotonic() - begun_s > arguments.seconds:
                print(f"no time was left for {key}")
                break
            known[key] = run(case, arguments)
            with arguments.out.open("a", encoding="utf-8") as file:
                print(json.dumps({"case": key, **known[key]}), file=file, flush=True)
    print(*table(known), sep="\n")


def measure(device: str) -> None:
    """Without a profile plans go by nominal rates."""
    from freight.entrypoints.profile import default_path

    if not default_path().exists():
        command = [sys.executable, "-m", "freight", "profile"]
        command += ["--device", "cpu" if device == "sim" else device]
        subprocess.run(command, check=False)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """What was measured before, but not what failed."""
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return {own["case"]: own for own in lines if "systems" in own}


def run(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """The object of one call; of one that failed what it said last."""
    config, rows = MODELS[case.model]
    command = [sys.executable, "-m", "freight", "bench", "offload", "--model", str(config)]
    command += ["--shape", case.shape, "--rows", str(arguments.rows or rows), "--repeats", "1"]
    command += ["--device", arguments.device, "--gpu-memory", GPU_MEMORY]
    command += ["--work-dir", arguments.work_dir, "--unwritten-weights", *WAYS[case.way]]
    if arguments.cpu_memory:
        command += ["--cpu-memory", arguments.cpu_memory]
    for peer in peers(case, arguments):
        command += ["--peer", peer, "--peer-timeout", "200"]
        command += ["--peer-rows", str(PEER_ROWS.get(case.model, OTHERS_ROWS))]
        if peer == "flexgen":
            for policy in FLEXGEN[case.model]:
                command += ["--flexgen", policy]
        else:
            command += ["--peer-batch-sizes", BATCHES.get(case.model, OTHERS_BATCHES)]
    print(f"\n{case.name}\n  {' '.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if not line.startswith("{"):
            print(f"  {line}", end="", flush=True)
    if process.wait() == 0:
        record: dict[str, Any] = json.loads(said[-1])
        return record
    return {"failed": process.returncode, "said": said[-5:]}


def peers(case: Case, arguments: argparse.Namespace) -> list[str]:
    """Those that run beside a case: FlexGen knows OPT alone."""
    if case.way != "exact":
        return []
    return [peer for peer in arguments.peers if peer != "flexgen" or case.model.startswith("opt")]


def table(known: dict[str, dict[str, Any]]) -> Iterator[str]:
    """New tokens per second, share of the ceiling, prediction over measurement, times the peer."""
    for key, record in known.items():
        if "systems" not in record:
            yield f"{key}: failed"
            continue
        own = record["systems"]["freight"]
        generate_s = own["median"]["generate_s"]
        told_s = own["runs"][-1].get("forecast_s")
        told = f"{told_s / generate_s - 1:+.0%} predicted" if told_s else "not predicted"
        peers = ", ".join(
            f"{times:.1f} times {name}" for name, times in record["times_peer"].items()
        )
        yield (
            f"{key}: {own['median']['new_tokens_per_s']:.2f} new token/s, "
            f"{record['share_of_ceiling']:.2f} of the ceiling, {told}{f', {peers}' * bool(peers)}"
        )


if __name__ == "__main__":
    main()
