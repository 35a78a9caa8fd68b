"""Weights in host memory streamed to a GPU that is too small for them: the bound, then the run.

Random weights of a Llama's shape, a hard cap on device memory, greedy rows of random token ids. The
ceiling is what this machine's link and arithmetic, measured on their own, allow to the best policy
for the work: all rows in one block, no more streamed per sweep than the cap leaves no room for,
moving and computing at the same time. The last line of output is JSON.

    python benchmarks/gpu_short.py
    python benchmarks/gpu_short.py --device sim --shape tiny --link 2GB
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from freight.entrypoints.run import parse_shares
from freight.errors import FreightError
from freight.memory.tier import device_arena, host_arena, system_memory_bytes
from freight.plan.workload import Workload
from freight.quantities import GIB, MIB, format_bytes, parse_bytes
from freight.runtime.device import find_device
from freight.runtime.engine import Engine, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Request, SamplingParams

# hidden, feed-forward, layers, query heads, key/value heads, vocabulary
SHAPES = {
    "tiny": (512, 1408, 6, 8, 4, 8192),
    "1b": (2048, 8192, 16, 32, 8, 32000),
    "7b": (4096, 11008, 32, 32, 32, 32000),
}
GPU_MEMORY = {"tiny": "96MiB", "1b": "2GiB", "7b": "6GiB"}
LEAST_MEMORY_FOR_7B = 24 * GIB
COPY_BYTES = 256 * MIB
REPEATS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of the machine alone: the link to the device, and products at two numbers of tokens."""

    link_bytes_per_s: float
    prefill_flops: float
    decode_flops: float


def main() -> None:
    arguments = read_arguments()
    device = find_device(arguments.device)
    rows, new = arguments.rows, arguments.new_tokens
    prompts = make_prompts(rows, arguments.prompt_tokens, SHAPES[arguments.shape][-1])
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as directory:
        config = write_config(Path(directory), arguments.shape)
        rates = measure_rates(device.torch_device, arguments, config["hidden_size"])
        with closing(build_engine_for(Path(directory), arguments)) as engine:
            room = device.room_bytes(parse_bytes(arguments.gpu_memory))
            ceiling_s = bound_s(engine, rates, room, arguments)
            print(f"device:   {device_name(device.torch_device)}, {arguments.shape} shape")
            print(f"link:     {rates.link_bytes_per_s / 1e9:.2f} GB/s host to device, alone")
            print(f"products: {rates.prefill_flops / 1e12:.2f} TFLOP/s in prefill, ", end="")
            print(f"{rates.decode_flops / 1e12:.2f} in decode, alone")
            print(f"ceiling:  {rows * new / ceiling_s:.1f} token/s, {ceiling_s:.2f} s", flush=True)
            run(engine, prompts[:1], 2)  # code is loaded, arenas are touched
            moved_before = engine.traffic.moved["host to device"]
            reached_s = run(engine, prompts, new)
            moved = engine.traffic.moved["host to device"] - moved_before
            report(engine, arguments, rates, ceiling_s, reached_s, moved)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: 7b, or 1b on less RAM")
    parser.add_argument("--gpu-memory", help="cap on device memory, context included")
    parser.add_argument("--weights", help="shares on gpu/cpu/disk; default: as the planner likes")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--num-micro-batches", type=int)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--link", default="2GB", help="bytes per second of the simulated link")
    arguments = parser.parse_args()
    if arguments.shape is None:
        arguments.shape = "7b" if system_memory_bytes() >= LEAST_MEMORY_FOR_7B else "1b"
    arguments.gpu_memory = arguments.gpu_memory or GPU_MEMORY[arguments.shape]
    return arguments


def write_config(directory: Path, shape: str) -> dict[str, int]:
    hidden, feed_forward, layers, heads, kv_heads, vocab = SHAPES[shape]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
    }
    rest = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps({**sizes, **rest}))
    return sizes


def make_prompts(num_rows: int, num_tokens: int, vocab: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab) for _ in range(num_tokens)] for _ in range(num_rows)]


def build_engine_for(directory: Path, arguments: argparse.Namespace) -> Engine:
    rows, prompt, new = arguments.rows, arguments.prompt_tokens, arguments.new_tokens
    is_sim = arguments.device == "sim"
    return build_engine(
        directory,
        options=EngineOptions(
            device=arguments.device,
            dtype="float32" if is_sim else "bfloat16",
            gpu_memory_bytes=parse_bytes(arguments.gpu_memory),
            weights_percent=parse_shares("--weights", arguments.weights),
            micro_batch_size=arguments.micro_batch_size,
            num_micro_batches=arguments.num_micro_batches,
            overlap=not arguments.no_overlap,
            sim_bytes_per_s=parse_bytes(arguments.link) if is_sim else None,
            dummy_seed=0,
        ),
        workload=Workload(
            num_rows=rows,
            max_prompt_tokens=prompt,
            max_new_tokens=new,
            max_total_tokens=prompt + new,
            total_prompt_tokens=rows * prompt,
            total_new_tokens=rows * new,
        ),
    )


def measure_rates(device: torch.device, arguments: argparse.Namespace, hidden: int) -> Rates:
    if device.type == "cuda":
        link = measure_link(device)
    else:
        link = float(parse_bytes(arguments.link))
    chunk = min(4096, arguments.rows * arguments.prompt_tokens)
    return Rates(
        link_bytes_per_s=link,
        prefill_flops=measure_product(device, chunk, hidden),
        decode_flops=measure_product(device, arguments.rows, hidden),
    )


def measure_link(device: torch.device) -> float:
    """Bytes per second from pinned memory."""
    source = host_arena(COPY_BYTES, pinned=True).take(COPY_BYTES, "source")
    target = device_arena(COPY_BYTES, device).take(COPY_BYTES, "target")
    return COPY_BYTES / best_s(device, lambda: target.copy_(source, non_blocking=True))


def measure_product(device: torch.device, num_tokens: int, hidden: int) -> float:
    """FLOP/s of [tokens, D] times [D, 4 D]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.ones(num_tokens, hidden, dtype=dtype, device=device)
    weight = torch.ones(4 * hidden, hidden, dtype=dtype, device=device)
    out = torch.empty(num_tokens, 4 * hidden, dtype=dtype, device=device)
    flops = 2 * num_tokens * 4 * hidden * hidden
    return flops / best_s(device, lambda: torch.mm(x, weight.t(), out=out))


def best_s(device: torch.device, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        synchronize(device)
        started_s = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - started_s)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bound_s(engine: Engine, rates: Rates, room: int, arguments: argparse.Namespace) -> float:
    """Seconds that no policy can go below: per sweep the longer of moving and computing."""
    units = [layout.unit for layout in engine.plan.layout.units]
    elements = sum(unit.num_elements for unit in units)
    head = sum(unit.num_elements for unit in units if unit.kind == "head")
    # Weights that do not fit must cross the link in every sweep; all else is let off.
    move_s = max(0, elements * engine.dtype.itemsize - room) / rates.link_bytes_per_s
    rows = arguments.rows  # the head is needed after the last token of a prompt only
    prefill = rows * arguments.prompt_tokens * (elements - head) + rows * head
    prefill_s = 2 * prefill / rates.prefill_flops
    decode_s = 2 * rows * elements / rates.decode_flops
    return max(move_s, prefill_s) + (arguments.new_tokens - 1) * max(move_s, decode_s)


def run(engine: Engine, prompts: list[list[int]], num_new: int) -> float:
    """Seconds to answer all prompts."""
    params = SamplingParams(max_tokens=num_new)
    requests = (Request(index=i, prompt_ids=p, params=params) for i, p in enumerate(prompts))
    started_s = time.perf_counter()
    num_tokens = sum(len(completion.token_ids) for completion in engine.run(requests))
    elapsed_s = time.perf_counter() - started_s
    assert num_tokens == len(prompts) * num_new, "rows ended early"
    return elapsed_s


def report(
    engine: Engine,
    arguments: argparse.Namespace,
    rates: Rates,
    ceiling_s: float,
    reached_s: float,
    moved: int,
) -> None:
    num_tokens = arguments.rows * arguments.new_tokens
    print(f"reached:  {num_tokens / reached_s:.1f} token/s, {reached_s:.2f} s, ", end="")
    print(f"{100 * ceiling_s / reached_s:.1f} % of the ceiling")
    print(f"          {format_bytes(moved)} over the link, {moved / reached_s / 1e9:.2f} GB/s")
    print("\n".join(f"          {line}" for line in engine.summary().splitlines()))
    on_cuda = engine.device.torch_device.type == "cuda"
    record = {
        "benchmark": "gpu_short",
        "device": device_name(engine.device.torch_device),
        "shape": arguments.shape,
        "gpu_memory_bytes": parse_bytes(arguments.gpu_memory),
        "rows": arguments.rows,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "link_bytes_per_s": round(rates.link_bytes_per_s),
        "reached_bytes_per_s": round(moved / reached_s),
        "ceiling_tokens_per_s": round(num_tokens / ceiling_s, 2),
        "reached_tokens_per_s": round(num_tokens / reached_s, 2),
        "ratio": round(ceiling_s / reached_s, 4),
        "max_gpu_bytes": torch.cuda.max_memory_reserved() if on_cuda else None,
    }
    print(json.dumps(record))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "simulated"


if __name__ == "__main__":
    try:
        main()
    except FreightError as error:
        sys.exit(f"gpu_short: {error}")
