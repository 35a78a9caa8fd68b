"""A model larger than memory on the CPU: Freight against its ceiling and against Accelerate.

    python benchmarks/offload.py --rows 64 --shape 128:16 --cpu-memory 1450MiB --group 1536MiB

Makes dummy weights once, then runs both systems on the same weights and rows, in turn, each run in
a process of its own inside a memory control group (version 1, as root; page cache counts) with cold
caches. Prints the ceiling first: what the disk and the matrix products, measured apart, allow to
the best zig-zag policy, warm-up and drain included. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": None,
    "bos_token_id": None,
}
GROUPS = Path("/sys/fs/cgroup/memory")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("bench-model"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--shape", default="128:16", help="prompt tokens : new tokens")
    parser.add_argument("--cpu-memory", default="1450MiB")
    parser.add_argument("--group", default="1536MiB", help="limit of the memory control group")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="BATCH:RESIDENT_MIB[:free]")
    parser.add_argument("--peer-timeout", type=int, default=600, metavar="SECONDS")
    parser.add_argument("--child", choices=("ceiling", "freight"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.child:
        child = {"ceiling": measure_ceiling, "freight": run_freight}[arguments.child]
        print(json.dumps(child(arguments)))
        return
    prepare(arguments)
    ceiling = run_child(arguments, "ceiling", grouped=False)
    print(json.dumps(ceiling, indent=1))
    systems: dict[str, Callable[[], dict[str, Any] | None]] = {
        "freight": lambda: run_child(arguments, "freight", grouped=True)
    }
    for setting in arguments.peer:
        systems[f"accelerate {setting}"] = lambda setting=setting: run_peer(arguments, setting)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for turn in range(arguments.repeats):
        for name, run in systems.items():
            result = run()
            print(f"{turn} {name}: {json.dumps(result)}", flush=True)
            if result is not None:
                results[name].append(result)
    report(ceiling, results)


def prepare(arguments: argparse.Namespace) -> None:
    """Weights, and rows of random tokens."""
    from freight.model.config import read_config
    from freight.model.dummy import write_dummy_checkpoint

    directory = arguments.directory
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if not (directory / "model.safetensors").exists():
        write_dummy_checkpoint(read_config(directory), directory)
    draw = random.Random(0)
    prompt_tokens, _ = shape(arguments)
    rows = [[draw.randrange(3, 32000) for _ in range(prompt_tokens)] for _ in range(arguments.rows)]
    (directory / "rows.json").write_text(json.dumps(rows))


def shape(arguments: argparse.Namespace) -> tuple[int, int]:
    prompt_tokens, new_tokens = arguments.shape.split(":")
    return int(prompt_tokens), int(new_tokens)


# -- children ----------------------------------------------------------------------------------


def run_freight(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows through the engine with its default policy; times apart from imports."""
    from freight.plan.workload import Workload
    from freight.quantities import parse_bytes
    from freight.runtime.engine import build_engine
    from freight.runtime.options import EngineOptions
    from freight.runtime.request import Request, SamplingParams

    rows = json.loads((arguments.directory / "rows.json").read_text())
    prompt_tokens, new_tokens = shape(arguments)
    workload = Workload(
        num_rows=len(rows),
        max_prompt_tokens=prompt_tokens,
        max_new_tokens=new_tokens,
        max_total_tokens=prompt_tokens + new_tokens,
        total_prompt_tokens=prompt_tokens * len(rows),
        total_new_tokens=new_tokens * len(rows),
    )
    started_s = time.perf_counter()
    options = EngineOptions(
        device="cpu", dtype="bfloat16", cpu_memory_bytes=parse_bytes(arguments.cpu_memory)
    )
    engine = build_engine(arguments.directory, options=options, workload=workload)
    built_s = time.perf_counter()
    params = SamplingParams(max_tokens=new_tokens)
    requests = (Request(index=i, prompt_ids=r, params=params) for i, r in enumerate(rows))
    tokens = sum(len(completion.token_ids) for completion in engine.run(requests))
    ended_s = time.perf_counter()
    return {
        "system": "freight",
        "load_s": built_s - started_s,
        "generate_s": ended_s - built_s,
        "new_tokens": tokens,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "disk_read_bytes": engine.traffic.moved["disk read"],
        "summary": engine.summary(),
    }


def measure_ceiling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Disk and matrix products apart, and the time they allow together."""
    from freight.model.config import read_config
    from freight.model.programme import build_programme
    from freight.quantities import parse_bytes
    from freight.runtime.device import room_on_cpu

    config = read_config(arguments.directory)
    prompt_tokens, new_tokens = shape(arguments)
    units = build_programme(config).units[1:]
    layers = [unit for unit in units if unit.kind != "head"]
    head = [unit for unit in units if unit.kind == "head"]
    disk = disk_rate(arguments.directory / "model.safetensors")
    room, _ = room_on_cpu(parse_bytes(arguments.cpu_memory))
    kv = arguments.rows * (prompt_tokens + new_tokens) * config.kv_bytes_per_token(2)
    weights = 2 * sum(unit.num_elements for unit in units)
    io_s = max(0, weights - max(0, room - kv)) / disk
    flops = gemm_rate(512), gemm_rate(arguments.rows)
    head_flops = sum(unit.matmul_flops(arguments.rows) for unit in head)
    prefill = sum(unit.matmul_flops(arguments.rows * prompt_tokens) for unit in layers)
    decode = sum(unit.matmul_flops(arguments.rows) for unit in layers) + head_flops
    prefill_s = max(io_s, (prefill + head_flops) / flops[0])
    decode_s = max(io_s, decode / flops[1])
    return {
        "disk_bytes_per_s": disk,
        "gemm_flops_512_rows": flops[0],
        f"gemm_flops_{arguments.rows}_rows": flops[1],
        "io_s_per_sweep": io_s,
        "prefill_s": prefill_s,
        "decode_s_per_sweep": decode_s,
        "ceiling_generate_s": prefill_s + (new_tokens - 1) * decode_s,
    }


def disk_rate(path: Path) -> float:
    """Bytes/s of direct sequential reads of 4 MiB into huge pages, the best of three passes."""
    from freight.memory.disk import DirectFile, Traffic
    from freight.memory.tier import host_arena
    from freight.memory.transfer import host_view

    buffer = host_view(host_arena(64 << 20).take(64 << 20, "read"))
    file = DirectFile(path, Traffic())
    size = min(file.num_bytes, 1 << 30) // len(buffer) * len(buffer)
    best = 0.0
    for _ in range(3):
        started_s = time.perf_counter()
        for offset in range(0, size, 4 << 20):
            place = offset % len(buffer)
            file.read(offset, buffer[place : place + (4 << 20)])
        best = max(best, size / (time.perf_counter() - started_s))
    return best


def gemm_rate(rows: int) -> float:
    """FLOP/s of bfloat16 products with the model's largest matrix, the best of twenty."""
    import torch

    columns, inner = CONFIG["intermediate_size"], CONFIG["hidden_size"]
    weight = torch.randn(columns, inner).to(torch.bfloat16)
    x = torch.randn(rows, inner).to(torch.bfloat16)
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    best_s = float("inf")
    for _ in range(20):
        started_s = time.perf_counter()
        torch.mm(x, weight.t(), out=out)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * rows * columns * inner / best_s


# -- running in a control group ------------------------------------------------------------------


def run_child(arguments: argparse.Namespace, child: str, *, grouped: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", child, "--directory", arguments.directory]
    command += ["--rows", str(arguments.rows), "--shape", arguments.shape]
    command += ["--cpu-memory", arguments.cpu_memory]
    result = run_grouped([str(part) for part in command], arguments.group if grouped else None)
    if result is None:
        raise SystemExit(f"the {child} run failed")
    return result


def run_peer(arguments: argparse.Namespace, setting: str) -> dict[str, Any] | None:
    """Accelerate with one batch size; None where it is killed or takes too long.

    A setting that ends in "free" runs outside the group: with all the machine's memory for weights
    that are let go late and for the page cache, which favours it.
    """
    batch, resident, *free = setting.split(":")
    script = Path(__file__).with_name("peer_accelerate.py")
    command = [sys.executable, str(script), "--model", str(arguments.directory)]
    command += ["--rows", str(arguments.directory / "rows.json"), "--batch-size", batch]
    command += ["--resident-mib", resident, "--new-tokens", str(shape(arguments)[1])]
    # Without this, weights that were let go stay in the heap and the group's limit kills it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    limit = None if free else arguments.group
    return run_grouped(command, limit, environment, arguments.peer_timeout)


def run_grouped(
    command: list[str],
    limit: str | None,
    environment: dict[str, str] | None = None,
    timeout_s: int | None = None,
) -> dict[str, Any] | None:
    """Run with cold caches, inside a fresh control group where a limit is given."""
    from freight.quantities import parse_bytes

    group = GROUPS / f"freight-bench-{os.getpid()}"
    if limit is not None:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(parse_bytes(limit)))
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")

    def enter() -> None:
        if limit is not None:
            (group / "cgroup.procs").write_text("0")

    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=enter,
            env=environment,
            timeout=timeout_s,
        )
        if done.returncode:
            return None
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if limit is not None:
            result["group_peak_bytes"] = int((group / "memory.max_usage_in_bytes").read_text())
        return result
    except subprocess.TimeoutExpired:
        return None
    finally:
        if limit is not None:
            group.rmdir()


def report(ceiling: dict[str, Any], results: dict[str, list[dict[str, Any]]]) -> None:
    medians = {
        name: statistics.median(run["generate_s"] for run in runs)
        for name, runs in results.items()
        if runs
    }
    own = medians.pop("freight")
    best = min(medians, key=medians.__getitem__, default=None)
    summary = {
        "freight_generate_s": own,
        "share_of_ceiling": ceiling["ceiling_generate_s"] / own,
        "best_peer": best,
        "best_peer_generate_s": None if best is None else medians[best],
        "times_best_peer": None if best is None else medians[best] / own,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
