"""What ranks gain by moving and multiplying at once, and by which ways: processes over gloo.

    python benchmarks/collectives.py --ranks 2 --tokens 64 512 2048

Starts as many processes as ranks, one thread each, bound to a core each where there are enough.
For each number of tokens one layer of a Llama-shaped model is computed in each way, with its
collectives one after the other and in loops, in alternating runs; medians are printed, the ceiling
first: arithmetic alone and moving alone, at rates that are measured before. The last line is JSON.
With ``--trace DIR`` the layers of the last number of tokens are also traced, for Perfetto, and the
share of the time is told in which messages are under way while something is computed.
Says nothing of other machines: where processes share cores, moving takes arithmetic's time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from freight.distributed.tensor.attention import Attention, Rows
from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.functions import LayerFunctions
from freight.distributed.tensor.processes import ProcessRanks
from freight.distributed.tensor.rates import measure_rates, predicted_s, slowest
from freight.distributed.tensor.tracing import Timeline, TracedRanks
from freight.distributed.tensor.vectors import Vectors
from freight.model.config import parse_config
from freight.partition.layers import Cut, block, feed_forward, layer_sizes
from freight.partition.layout import Mesh
from freight.partition.named import DYNAMIC, dynamic_layer
from freight.partition.sharded import Sharded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--mlp", type=int, default=2816)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--trace", type=Path, metavar="DIR", help="where traces are written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(arguments.ranks):
            child = os.fork()
            if child == 0:
                _rank(rank, arguments, Path(directory))
                os._exit(0)
            children.append(child)
        failed = max(os.waitpid(child, 0)[1] for child in children)
        if failed:
            raise SystemExit(1)


def _rank(rank: int, arguments: argparse.Namespace, directory: Path) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= arguments.ranks:
        os.sched_setaffinity(0, {cores[rank]})
    store = dist.FileStore(str(directory / "store"), arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    ranks = ProcessRanks(Mesh.of(x=arguments.ranks))
    rates = measure_rates(ranks, torch.float32)
    rows: list[dict[str, Any]] = []
    if rank == 0:
        print(
            f"{arguments.ranks} ranks: {rates.flops / 1e9:.0f} GFLOP/s, "
            f"{rates.link_bytes_per_s / 1e9:.2f} GB/s sent, {rates.collective_s * 1e6:.0f} us a "
            "collective, each"
        )
        print(f"tokens  {'way, ms':52} ceiling   plain  looped   gain")
    for tokens in arguments.tokens:
        for name, own in _layers(arguments, ranks.mesh, tokens):
            ceiling = predicted_s(own, rates, weight_bytes=4, value_bytes=4)
            moved = (own.moved(weights=True) + own.moved(weights=False)) * 4
            bound = max(ceiling - moved / rates.link_bytes_per_s, moved / rates.link_bytes_per_s)
            plain, looped = _times(ranks, own, arguments)
            row = {
                "tokens": tokens,
                "way": name,
                "ceiling_s": bound,
                "plain_s": plain,
                "looped_s": looped,
                "moved_bytes": moved,
            }
            rows.append(row)
            if rank == 0:
                print(
                    f"{tokens:6}  {name:52}{bound * 1e3:8.2f}{plain * 1e3:8.2f}"
                    f"{looped * 1e3:8.2f}{plain / looped:7.2f}"
                )
    if arguments.trace is not None:
        for row, (_, own) in zip(
            rows[-len(DYNAMIC) - 2 :],
            _layers(arguments, ranks.mesh, arguments.tokens[-1]),
            strict=True,
        ):
            row["overlap"] = _traced(ranks, own, arguments, str(row["way"]))
    if rank == 0:
        print(json.dumps({"ranks": arguments.ranks, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def _layers(arguments: argparse.Namespace, mesh: Mesh, tokens: int) -> list[tuple[str, Sharded]]:
    config, one_d = _config(arguments), Cut(width="", inner="x")
    sizes = layer_sizes(config, rows=1, new_tokens=tokens)
    return [
        ("1D weight-stationary MLP", feed_forward(mesh, sizes, one_d)),
        ("1D weight-stationary layer", block(mesh, sizes, one_d, config)),
        *((name, dynamic_layer(mesh, sizes, own)) for name, own in DYNAMIC.items()),
    ]


def _config(arguments: argparse.Namespace) -> Any:
    return parse_config(
        {
            "model_type": "llama",
            "hidden_size": arguments.width,
            "intermediate_size": arguments.mlp,
            "num_hidden_layers": 1,
            "num_attention_heads": arguments.heads,
            "num_key_value_heads": arguments.heads,
            "vocab_size": 1024,
        }
    )


def _times(ranks: ProcessRanks, own: Sharded, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a layer, plain and looped, of the slowest rank: medians of runs in turn."""
    calls = [_call(Executor(ranks, looped=looped), own, arguments) for looped in (False, True)]
    found: list[list[float]] = [[], []]
    for call in calls:
        call()
    for _ in range(arguments.runs):
        for times, call in zip(found, calls, strict=True):
            dist.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    plain, looped = (median(slowest(ranks, times)) for times in found)
    return plain, looped


def _traced(
    ranks: ProcessRanks, own: Sharded, arguments: argparse.Namespace, name: str
) -> list[float]:
    """The share of the time that messages are under way in which something is computed, plain and
    looped, of the second of two calls each."""
    shares = []
    arguments.trace.mkdir(parents=True, exist_ok=True)
    for looped in (False, True):
        label = f"{name.replace(' ', '-')}-{'looped' if looped else 'plain'}"
        path = arguments.trace / f"{label}-{ranks.own[0]}.json"
        _call(Executor(ranks, looped=looped), own, arguments)()
        timeline = Timeline(path, ranks.own[0])
        traced = TracedRanks(ranks, timeline)
        call = _call(Executor(traced, looped=looped, timeline=timeline), own, arguments)
        dist.barrier()
        call()
        timeline.close()
        shares.append(_overlap(path))
    if ranks.own[0] == 0:
        print(f"{name}: computing during {shares[0]:.0%} of moving, looped {shares[1]:.0%}")
    return shares


def _overlap(path: Path) -> float:
    spans = [event for event in json.loads(path.read_text()) if event.get("ph") == "X"]
    computing, moving = (
        _joined([(s["ts"], s["ts"] + s["dur"]) for s in spans if (s["tid"] > 0) == is_message])
        for is_message in (False, True)
    )
    both = sum(
        max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
        for one in computing
        for other in moving
    )
    return both / max(1e-9, sum(end - start for start, end in moving))


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, without overlaps."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _call(executor: Executor, own: Sharded, arguments: argparse.Namespace) -> Callable[[], object]:
    torch.manual_seed(0)
    given = {
        name: [torch.randn([int(n) for n in layout.shape(own.sizes, own.mesh)]) * 0.02]
        for name, layout in {**own.inputs, **own.weights}.items()
    }
    tokens = int(own.sizes["L"])
    rows = Rows(
        width=tokens, num_new=torch.tensor([tokens]), kv_lens=torch.tensor([0]), is_fresh=True
    )
    config = _config(arguments)
    functions = LayerFunctions(
        config, executor.ranks, Vectors(), Attention(config, executor.ranks, rows)
    )

    def call() -> None:
        with torch.inference_mode():
            executor.run(own, given, functions)

    return call


if __name__ == "__main__":
    main()
