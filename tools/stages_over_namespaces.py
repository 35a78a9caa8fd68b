"""Run stages of a pipeline on machines of their own, as far as the network can tell: Linux only.

    sudo python tools/stages_over_namespaces.py --rate 100mbit

Each stage gets a network namespace with an address of its own, joined to the others by a bridge;
what each sends is held to ``--rate``. First the example dataset goes through the demo model on 2
and 4 stages by every rule of admission, and on 2 stages of two ranks that cut their layers, and
each output is held against one process's. Then
prompts of random weights are timed: weights cross a simulated link that is slow enough to be all
that counts, so that stages do not compete for this machine's cores. T blocks on S stages should
take S T / (T + S - 1) times less than on one. Last, a model that fits into neither of two machines:
each rank is put into a memory control group of its own that holds what it needs for its layers
and some, and has a budget just below it; weights may not go to disk. One process must refuse the
larger budget, and two stages must make what one makes with room: the larger machine gets more
layers where they differ (``--hold 1100MiB,700MiB``). Needs root; removes what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freight.demo import EXAMPLES
from freight.entrypoints.bench.groups import GroupMaker
from freight.quantities import format_bytes, parse_bytes

SRC = Path(__file__).resolve().parents[1] / "src"
BRIDGE = "freight-br"
PORT = 29511
BLOCKS = 4
ROWS = 4
MARGIN_BYTES = 32 << 20
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def name_of(stage: int) -> str:
    return f"freight-{stage}"


def address_of(stage: int) -> str:
    return f"10.213.7.{stage + 1}"


def inside(stage: int) -> list[str]:
    return ["nsenter", f"--net=/var/run/netns/{name_of(stage)}"]


@contextmanager
def namespaces(count: int, rate: str) -> Iterator[None]:
    """So many, each with an interface ``eth0`` that sends at ``rate`` at most."""
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for stage in range(count):
            name, outer = name_of(stage), f"freight-v{stage}"
            ip("netns", "add", name)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outer, "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{address_of(stage)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
            shape += ["burst", "32kbit", "latency", "400ms"]
            subprocess.run(["ip", "netns", "exec", name, "tc", *shape], check=True)
        yield
    finally:
        for stage in range(count):
            subprocess.run(["ip", "link", "del", f"freight-v{stage}"], check=False)
            subprocess.run(["ip", "netns", "del", name_of(stage)], check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


def run(stages: int, command: list[str]) -> str:
    """What the first rank says; with one stage it is a plain process."""
    statuses, told = attempt([[sys.executable, *command]] * stages)
    if any(statuses):
        raise SystemExit("\n".join(told))
    return told[0]


def attempt(commands: list[list[str]]) -> tuple[list[int], list[str]]:
    """How each rank's machine ends and what it says, by the command that is the rank itself."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    stages = len(commands)
    if stages > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
        start += ["--nnodes", str(stages), "--master-addr", address_of(0)]
        start += ["--master-port", str(PORT), "--no-python"]
        commands = [
            # Not ``ip netns exec``, which hides control groups.
            [*inside(stage), *start, "--node-rank", str(stage), *own]
            for stage, own in enumerate(commands)
        ]
    processes = [
        subprocess.Popen(own, env=environment, stderr=subprocess.PIPE, text=True)
        for own in commands
    ]
    told = [process.communicate(timeout=300)[1] for process in processes]
    return [process.returncode for process in processes], told


def compare(directory: Path, counts: list[int], num_rows: int) -> None:
    rows = directory / "rows.jsonl"
    rows.write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:num_rows]))
    flags = ["--model", "demo", "--dtype", "float32", "--device", "cpu"]
    flags += ["--micro-batch-size", "8"]
    command = ["-m", "freight", "run", str(rows), *flags]
    alone = directory / "alone.jsonl"
    run(1, [*command, "--output", str(alone)])
    cases = [
        (count, f"{count} stages, {rule}", ["--num-micro-batches", "2", "--admission", rule])
        for count in counts
        for rule in ("zigzag", "diagonal", "refill")
    ]
    if max(counts) >= 4:
        cut = ["--split", "tensor", "--stages", "2"]
        cases.append((4, "2 stages of 2 ranks that cut their layers", cut))
    for number, (count, name, own) in enumerate(cases):
        output = directory / f"{number}.jsonl"
        run(count, [*command, *own, "--output", str(output)])
        if output.read_bytes() != alone.read_bytes():
            raise SystemExit(f"{name}: another output")
        print(f"{name}: the output of one process", flush=True)


def time_prompts(directory: Path, counts: list[int], link: str, prompt_tokens: int) -> None:
    model, rows = directory / "model", directory / "prompts.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    prompts = [[(7 * row + i) % 256 for i in range(prompt_tokens)] for row in range(ROWS * BLOCKS)]
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags = ["--model", str(model), "--dummy-weights", "--dtype", "float32", "--max-tokens", "1"]
    flags += ["--device", "sim", "--sim-bandwidth", link, "--weights", "0/100/0", "--kv", "100/0/0"]
    flags += ["--activations", "100/0/0", "--micro-batch-size", str(ROWS)]
    flags += ["--num-micro-batches", "1", "--admission", "zigzag", "--batch-tokens"]
    flags += [str(ROWS * prompt_tokens), "--no-shared-prefixes"]
    seconds: dict[int, float] = {}
    for stages in (1, *counts):
        output = directory / f"prompts-{stages}.jsonl"
        told = run(stages, ["-m", "freight", "run", str(rows), "--output", str(output), *flags])
        found = re.search(r"tokens in ([\d.]+) s", told)
        assert found is not None, told
        seconds[stages] = float(found[1])
        same = output.read_bytes() == (directory / "prompts-1.jsonl").read_bytes()
        ideal = BLOCKS * stages / (BLOCKS + stages - 1)
        print(
            f"{stages} stages: {seconds[stages]:.2f} s, {seconds[1] / seconds[stages]:.2f} times "
            f"faster than one; S T / (T + S - 1) is {ideal:.2f}; same tokens: {same}",
            flush=True,
        )


def hold(directory: Path, limits: list[int], num_layers: int) -> None:
    """A model that neither of two machines with such limits could hold: both groups' peaks, and
    what one process says and how it ends under the larger limit."""
    model, rows = directory / "wide", directory / "few.jsonl"
    model.mkdir()
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": num_layers}
    (model / "config.json").write_text(json.dumps({**CONFIG, **wide}))
    rows.write_text("".join(json.dumps({"prompt": [i, i + 1, 7]}) + "\n" for i in range(ROWS)))
    weights = 4 * (num_layers * (4 * 1024**2 + 3 * 1024 * 4096) + 2 * 256 * 1024)
    machines = " and ".join(map(format_bytes, limits))
    print(f"{format_bytes(weights)} of weights, machines of {machines}")

    def grouped(limits: list[int], name: str) -> tuple[list[int], list[str], str]:
        """Each rank in a group of its own, told of a little less."""
        own = [GroupMaker(limit_bytes=limit).make() for limit in limits]
        enter = 'echo 0 > "$0"/cgroup.procs && exec "$@"'
        command = ["-m", "freight", "run", str(rows), "--output", str(directory / name)]
        command += ["--model", str(model), "--dummy-weights", "--dtype", "float32"]
        command += ["--device", "cpu", "--weights", "0/100/0", "--max-tokens", "4", "--cpu-memory"]
        ranks = [["sh", "-c", enter, str(group.path), sys.executable, *command] for group in own]
        for rank, limit in zip(ranks, limits, strict=True):
            rank.append(str(limit - MARGIN_BYTES))
        try:
            statuses, told = attempt(ranks)
            peaks = ", ".join(format_bytes(group.peak_bytes() or 0) for group in own)
        finally:
            for group in own:
                group.remove()
        return statuses, told, peaks

    statuses, told, _ = grouped([max(limits)], "none.jsonl")
    if not statuses[0] or "Raise --cpu-memory" not in told[0]:
        raise SystemExit(f"one process does not refuse:\n{told[0]}")
    print(f"one process on the larger refuses:\n{told[0]}", flush=True)
    statuses, told, peaks = grouped(limits, "two.jsonl")
    if any(statuses):
        raise SystemExit("\n".join(told))
    print(f"two stages:\n{told[0]}peaks {peaks}", flush=True)
    statuses, told, peaks = grouped([4 << 30], "one.jsonl")
    if (
        statuses[0]
        or (directory / "one.jsonl").read_bytes() != (directory / "two.jsonl").read_bytes()
    ):
        raise SystemExit(f"another output:\n{told[0]}")
    print(f"one process with room answers the same, peak {peaks}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="what each stage may send (tc's units)")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--rows", type=int, default=60, help="of the example dataset; 0: not compared"
    )
    parser.add_argument("--link", default="32MiB", help="of weights, a second")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="0: not timed")
    parser.add_argument(
        "--hold", default="784MiB", help="memory of two machines, or of each of them; 0: left out"
    )
    parser.add_argument("--hold-layers", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, namespaces(max(arguments.stages), arguments.rate):
        if arguments.rows:
            compare(Path(name), arguments.stages, arguments.rows)
        if arguments.prompt_tokens:
            time_prompts(Path(name), arguments.stages, arguments.link, arguments.prompt_tokens)
        if arguments.hold != "0":
            limits = [parse_bytes(size) for size in arguments.hold.split(",")]
            hold(Path(name), limits if len(limits) > 1 else 2 * limits, arguments.hold_layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
