"""Kill a job at random instants, resume it, and hold the output against an undisturbed one.

    python tools/kill_and_resume.py --kills 50

Runs the example dataset through the demo model once in peace. Then the same command is started and
killed (SIGKILL, the whole process) after a random time, over and over until the wanted number of
kills has hit a job that was under way; then it may finish. A job that finishes before its kill is
begun anew. Every finished output must equal the undisturbed one, byte for byte. Knows the command
only.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from freight.demo import EXAMPLES


def command(output: Path, weights: str, admission: str) -> list[str]:
    flags = ["--model", "demo", "--dtype", "float32", "--device", "cpu", "--quiet"]
    # Small blocks: rows finish all along, so that kills fall between them.
    flags += ["--micro-batch-size", "8", "--num-micro-batches", "2", "--weights", weights]
    flags += ["--admission", admission]
    run = [sys.executable, "-m", "freight", "run", str(EXAMPLES)]
    return [*run, "--output", str(output), *flags]


def forget(output: Path) -> None:
    output.unlink(missing_ok=True)
    shutil.rmtree(output.with_name(output.name + ".freight"), ignore_errors=True)


def journalled_rows(output: Path) -> int:
    journal = output.with_name(output.name + ".freight") / "journal.jsonl"
    return len(journal.read_bytes().splitlines()) - 1 if journal.exists() else -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--weights", default="20/80")
    parser.add_argument("--admission", default="zigzag")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        calm, output = Path(name) / "calm.jsonl", Path(name) / "killed.jsonl"
        started_s = time.monotonic()
        subprocess.run(command(calm, arguments.weights, arguments.admission), check=True)
        length_s = time.monotonic() - started_s
        print(f"undisturbed: {length_s:.1f} s, {len(calm.read_bytes().splitlines())} rows")
        kills = finished = 0
        while kills < arguments.kills:
            process = subprocess.Popen(command(output, arguments.weights, arguments.admission))
            try:
                process.wait(timeout=draw.uniform(0, length_s))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
                print(f"kill {kills}: {journalled_rows(output)} rows in the journal", flush=True)
                continue
            finished += compare(process.returncode, calm, output)
            forget(output)
        done = subprocess.run(command(output, arguments.weights, arguments.admission), check=False)
        finished += compare(done.returncode, calm, output)
    print(f"{kills} kills, {finished} finished jobs, all equal to the undisturbed one")
    return 0


def compare(status: int, calm: Path, output: Path) -> int:
    if status != 0 or output.read_bytes() != calm.read_bytes():
        raise SystemExit(f"the resumed job differs (exit status {status})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
