"""Kill one rank of a run at random instants, go on with another number, compare the outputs.

    python tools/kill_a_rank.py --kills 20 [--split tensor]

Runs part of the example dataset through the demo model once in peace, in one process. Then the same
command is started under torchrun with 1 to 4 ranks, and one of them is killed (SIGKILL) after a
random time, until the wanted number of kills has hit a run that was under way; every next run has
another number of ranks and goes on from what the last one left. The run must end within seconds of
the kill, and where the first rank lives it must name the one that was lost, its part and the
command to go on with. A job that finishes before its kill is begun anew. Every finished output must
have each row once, and equal the undisturbed one byte for byte. Knows the command only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from freight.demo import EXAMPLES

SRC = Path(__file__).resolve().parents[1] / "src"
MOST_RANKS = 4
LIMIT_S = 10.0


def job(rows: Path, output: Path, split: str) -> list[str]:
    flags = ["--model", "demo", "--dtype", "float32", "--device", "cpu", "--quiet"]
    # Small blocks: rows finish all along, so that kills fall between them.
    flags += ["--micro-batch-size", "2", "--split", split]
    if split != "tensor":
        flags += ["--num-micro-batches", "1", "--weights", "20/80"]
    return ["-m", "freight", "run", str(rows), "--output", str(output), *flags]


def start(size: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    many = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)] if size > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *many, *command], env=environment, stdout=file, stderr=file
        )


def ranks_of(parent: int) -> dict[int, int]:
    """Ranks of a torchrun and their process ids."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PPid:\t{parent}\n" in (entry / "status").read_text():
                values = (entry / "environ").read_bytes().decode().split("\0")
                named = dict(value.partition("=")[::2] for value in values)
                found[int(named["RANK"])] = int(entry.name)
        except (OSError, KeyError):
            continue
    return found


def journalled_rows(output: Path) -> int:
    """-1 where there is no journal: not yet, or no more."""
    try:
        journal = (output.with_name(output.name + ".freight") / "journal.jsonl").read_bytes()
    except FileNotFoundError:
        return -1
    return len(journal.splitlines()) - 1


def kill_one(process: subprocess.Popen[bytes], size: int, draw: random.Random) -> int:
    """Kill a rank; which one, -1 where there was none."""
    ranks = ranks_of(process.pid) if size > 1 else {0: process.pid}
    if len(ranks) < size:
        return -1
    rank = draw.randrange(size)
    os.kill(ranks[rank], signal.SIGKILL)
    return rank


def check_message(log: Path, rank: int, size: int) -> None:
    told = log.read_text()
    if "freight: error:" not in told:
        return  # it was still starting: torchrun speaks
    wanted = (f"Rank {rank} ", f" {rank + 1} of {size}", "torchrun --nproc-per-node")
    if any(part not in told for part in wanted):
        raise SystemExit(f"rank {rank} of {size} was killed, and this was said:\n{told}")


def wait_for_rows(process: subprocess.Popen[bytes], output: Path, more: int) -> None:
    """Until a run that goes on has journalled so many, or ends. Moments between rows do not depend
    on how fast a machine starts."""
    wanted = max(0, journalled_rows(output)) + more
    while more and process.poll() is None and journalled_rows(output) < wanted:
        time.sleep(0.01)


def check_rows(output: Path, num_rows: int) -> None:
    """Each row is there, once."""
    ids = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    if len(ids) != num_rows or len({*ids}) != num_rows:
        raise SystemExit(f"{len(ids)} rows of {num_rows}, {len({*ids})} of them different")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--longest", type=float, default=14.0, help="seconds until a kill")
    parser.add_argument(
        "--more-rows", type=int, default=0, help="rows to wait for, up to so many, before these"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", default="layers", choices=("layers", "rows", "tensor"))
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    slowest_s, is_cut = 0.0, arguments.split == "tensor"
    with tempfile.TemporaryDirectory() as name:
        rows, log = Path(name) / "rows.jsonl", Path(name) / "log"
        calm, output = Path(name) / "calm.jsonl", Path(name) / "killed.jsonl"
        lines = EXAMPLES.read_text().splitlines(keepends=True)[: arguments.rows]
        rows.write_text("".join(lines))
        if status := start(1, job(rows, calm, "layers"), log).wait():
            raise SystemExit(f"the undisturbed job ended with {status}:\n{log.read_text()}")
        kills = finished = messages = size = 0
        while True:
            # The width of the model divides by these.
            sizes = (2, MOST_RANKS) if is_cut else range(1, MOST_RANKS + 1)
            size = draw.choice([other for other in sizes if other != size])
            process = start(size, job(rows, output, arguments.split), log)
            rank = -1
            if kills < arguments.kills:
                wait_for_rows(process, output, draw.randint(0, arguments.more_rows))
                try:
                    process.wait(timeout=draw.uniform(0.0, arguments.longest))
                except subprocess.TimeoutExpired:
                    rank = kill_one(process, size, draw)
            killed_s = time.monotonic()
            if rank >= 0:
                process.wait(timeout=LIMIT_S)
                slowest_s = max(slowest_s, time.monotonic() - killed_s)
                kills += 1
                if rank:
                    check_message(log, rank, size)
                    messages += "freight: error:" in log.read_text()
                done = journalled_rows(output)
                print(f"kill {kills}: rank {rank} of {size}, {done} rows", flush=True)
                continue
            if process.wait() or output.read_bytes() != calm.read_bytes():
                raise SystemExit(f"the resumed job differs:\n{log.read_text()}")
            check_rows(output, arguments.rows)
            finished += 1
            output.unlink()
            shutil.rmtree(output.with_name(output.name + ".freight"), ignore_errors=True)
            if kills >= arguments.kills:
                break
    print(
        f"{kills} kills, {messages} told by the first rank, the slowest end after {slowest_s:.1f} "
        f"s; {finished} finished jobs, all equal to the undisturbed one"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
