"""Ways that change with the tokens of a call against each of them alone: processes over gloo.

    python benchmarks/dynamic.py --ranks 2

A Llama-shaped model of random weights takes prompts of mixed lengths, each a call of its own and
some tokens after it, once in each scheme of Ong & Kwon and once switching between them at borders
that were calibrated here. Runs alternate; medians of the slowest rank are printed, with the borders
reckoned from rates, those calibrated, and where the times of calls really cross. With
``--torch-compile`` each is run a second time with what stands between messages compiled. The last
line is JSON. Cap the links to see a switch: over a fast loopback arithmetic is all.

    python benchmarks/dynamic.py --ranks 4 --chips l4 a100 --model llama-2-13b

reckons a mix of longer calls on chips that are not there, by their data sheets.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.model import TensorModel, load_model
from freight.distributed.tensor.processes import ProcessRanks
from freight.distributed.tensor.rates import Rates, measure_rates, predicted_s, slowest
from freight.distributed.tensor.regions import Regions
from freight.distributed.tensor.switch import Switch, calibrated, pinned, reckoned
from freight.distributed.tensor.ways import Ways
from freight.entrypoints.bundled import find_bundled
from freight.hardware.chip import Chip, find_chip
from freight.model.config import read_config
from freight.model.dummy import write_dummy_checkpoint
from freight.partition.layout import Mesh
from freight.partition.named import DYNAMIC

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
PROMPTS = (8, 16, 48, 128, 256, 512, 768, 1024)
NEW_TOKENS = 4
CALLS = (128, 512, 2048, 8192, 16384, 32768, 65536)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--width", type=int, default=SHAPE["hidden_size"])
    parser.add_argument("--mlp", type=int, default=SHAPE["intermediate_size"])
    parser.add_argument("--torch-compile", action="store_true")
    parser.add_argument("--chips", nargs="+", default=[], help="reckon, on these presets")
    parser.add_argument("--model", default="llama-2-13b", help="bundled, to reckon with")
    arguments = parser.parse_args()
    for name in arguments.chips:
        _reckon(find_chip(name), arguments.model, arguments.ranks)
    if arguments.chips:
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shape = {**SHAPE, "hidden_size": arguments.width, "intermediate_size": arguments.mlp}
        (directory / "config.json").write_text(json.dumps(shape))
        write_dummy_checkpoint(read_config(directory), directory, 0, "float32")
        children = []
        for rank in range(arguments.ranks):
            child = os.fork()
            if child == 0:
                _rank(rank, arguments, directory)
                os._exit(0)
            children.append(child)
        if max(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit(1)


def _reckon(chip: Chip, model: str, count: int) -> None:
    """Milliseconds of each call of a mix, by scheme, and of the best scheme for each."""
    config = find_bundled(model)
    assert config is not None, model
    ways = Ways(config, Mesh.of(x=count), [*DYNAMIC.values()])
    rates = Rates(
        flops=chip.dense_flops,
        memory_bytes_per_s=chip.memory_bytes_per_s,
        link_bytes_per_s=chip.link_bytes_per_s,
        collective_s=chip.link_latency_s,
    )
    times: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    for name, way in DYNAMIC.items():
        layers = [ways.programmes(way, 1, tokens).layers[False] for tokens in CALLS]
        times[name] = [
            1e3 * config.num_layers * predicted_s(own, rates, weight_bytes=2, value_bytes=2)
            for own in layers
        ]
        sent[name] = [2 * (own.moved(weights=True) + own.moved(weights=False)) for own in layers]
    times["switching"] = [min(own) for own in zip(*times.values(), strict=True)]
    totals = {name: sum(own) for name, own in times.items()}
    static = [totals[name] for name in DYNAMIC]
    print(f"{model} on {count} {chip.name}, ms a call of" + "".join(f"{n:9}" for n in CALLS))
    for number, (name, own) in enumerate(times.items()):
        row = "".join(f"{value:9.1f}" for value in own)
        print(f"{number} {name[:24]:24}{row}{totals[name]:10.1f}")
    for place, tokens in enumerate(CALLS):
        fastest = min(DYNAMIC, key=lambda name: times[name][place])
        least = min(own[place] for own in sent.values())
        print(
            f"  {tokens} tokens: {fastest} sends {sent[fastest][place] / 1e6:.1f} MB a layer and "
            f"chip, the scheme that sends least {least / 1e6:.1f}"
        )
    record = {"chip": chip.name, "ranks": count, "model": model, "totals_ms": totals}
    best, worst = min(static) / totals["switching"], max(static) / totals["switching"]
    print(json.dumps({**record, "times_worst": worst, "times_best": best}))


def _rank(rank: int, arguments: argparse.Namespace, directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    ranks = ProcessRanks(Mesh.of(x=arguments.ranks))
    schemes = [*DYNAMIC.values()]
    model = load_model(directory, ranks, schemes, dtype=torch.float32)
    rates = measure_rates(ranks, torch.float32)
    switches = {
        **{name: pinned(own) for name, own in DYNAMIC.items()},
        "switching, reckoned": reckoned(model, rates, max(PROMPTS)),
        "switching, calibrated": calibrated(model, max(PROMPTS)),
    }
    executors = {name: model.executor for name in switches}
    if arguments.torch_compile:
        regions = Regions()
        for name in [*switches]:
            switches[f"{name}, compiled"] = switches[name]
            executors[f"{name}, compiled"] = Executor(ranks, regions=regions)
    times: dict[str, list[float]] = {name: [] for name in switches}
    calls: dict[str, dict[int, list[float]]] = {
        name: {length: [] for length in (*PROMPTS, 0)} for name in switches
    }
    for name, switch in switches.items():
        model.executor = executors[name]
        _mix(model, switch)  # programmes are written, sockets are open
        _mix(model, switch)
    for _ in range(arguments.runs):
        for name, switch in switches.items():
            model.executor = executors[name]
            dist.barrier()
            taken = _mix(model, switch)
            times[name].append(sum(taken.values()))
            for length in taken:
                calls[name][length].append(taken[length])
    totals = {name: median(slowest(ranks, own)) for name, own in times.items()}
    prompts = {
        name: {n: median(slowest(ranks, own)) for n, own in found.items()}
        for name, found in calls.items()
    }
    if rank == 0:
        print(
            f"{arguments.ranks} ranks: {rates.flops / 1e9:.0f} GFLOP/s, "
            f"{rates.link_bytes_per_s / 1e9:.3f} GB/s sent, {rates.collective_s * 1e6:.0f} us a "
            "collective, each"
        )
        for name in ("switching, reckoned", "switching, calibrated"):
            numbers = [schemes.index(way) for way in switches[name].ways]  # type: ignore[arg-type]
            print(f"{name}: borders {switches[name].borders}, schemes {numbers}")
        print("ms a prompt of    " + "".join(f"{n:8}" for n in PROMPTS) + "  tokens   total")
        for number, (name, total) in enumerate(totals.items()):
            row = "".join(f"{prompts[name][n] * 1e3:8.1f}" for n in PROMPTS)
            after = prompts[name][0] * 1e3
            label = f"{name[:15]}{'+' if name.endswith('compiled') else ''}"
            print(f"{number} {label:16}{row}{after:8.1f}{total * 1e3:8.1f}")
        print(json.dumps({"ranks": arguments.ranks, "totals_s": totals, "prompts_s": prompts}))
    dist.barrier()
    dist.destroy_process_group()


def _mix(model: TensorModel, switch: Switch) -> dict[int, float]:
    """Seconds of each prompt's call, and under 0 of all tokens after them."""
    found = {0: 0.0}
    for length in PROMPTS:
        batch = model.begin(1, length + NEW_TOKENS)
        start = time.perf_counter()
        logits = model.step(batch, [[7] * length], switch.way(length))
        found[length] = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(NEW_TOKENS):
            logits = model.step(batch, [[int(logits[0].argmax())]], switch.way(1))
        found[0] += time.perf_counter() - start
    return found


if __name__ == "__main__":
    main()
