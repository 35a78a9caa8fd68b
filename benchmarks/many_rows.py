"""A dataset of very many short rows through the bundled model: time to the first row, and memory.

    python benchmarks/many_rows.py [--rows 100000] [--max-tokens 4] [-- FLAGS of freight run]

What is bounded is the memory: it must not grow with the rows. So a tenth of them runs first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNITS = ("mm", "cm", "dm", "m", "km")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("own", nargs="*", help="flags of freight run, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = [
            measure(Path(directory) / str(rows), rows, arguments)
            for rows in (max(1, arguments.rows // 10), arguments.rows)
        ]
    print(json.dumps({"benchmark": "many rows", "runs": found}))


def measure(directory: Path, rows: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds until the journal has a row, and until all is done; the process's peak memory."""
    directory.mkdir()
    source, sink = directory / "rows.jsonl", directory / "answers.jsonl"
    draw = random.Random(0)
    with source.open("w") as file:
        for _ in range(rows):
            amount, unit, other = draw.randint(1, 999), draw.choice(UNITS), draw.choice(UNITS)
            file.write(json.dumps({"prompt": f"Quantity: {amount} {unit}\nIn {other}:"}) + "\n")
    command = [sys.executable, "-m", "freight", "run", str(source), "-m", "demo", "-o", str(sink)]
    command += ["--max-tokens", str(arguments.max_tokens), *arguments.own]
    journal = directory / "answers.jsonl.freight" / "journal.jsonl"
    started_s = time.perf_counter()
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    first_s = 0.0
    while run.returncode is None:
        pid, status, used = os.wait4(run.pid, os.WNOHANG)
        if pid:
            run.returncode = os.waitstatus_to_exitcode(status)
        elif not first_s and journal.exists() and b"\n{" in journal.read_bytes():
            first_s = time.perf_counter() - started_s
        else:
            time.sleep(0.02)
    seconds = time.perf_counter() - started_s
    first_s = first_s or seconds  # a job may be over before its journal is looked at
    with sink.open() as file:
        num_answers = sum("error" not in json.loads(line) for line in file)
    if run.returncode or num_answers != rows:
        sys.exit(f"{num_answers} of {rows} rows were answered, status {run.returncode}.")
    peak_bytes = used.ru_maxrss * 1024
    print(
        f"{rows} rows: the first after {first_s:.2f} s, all after {seconds:.1f} s, "
        f"{peak_bytes / 2**20:.0f} MiB at most",
        flush=True,
    )
    return {"rows": rows, "first_s": first_s, "s": seconds, "peak_bytes": peak_bytes}


if __name__ == "__main__":
    main()
