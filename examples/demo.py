"""The demo: a small language model stays on disk while it completes a file of prompts.

Runs the ``freight`` command as anyone would, then compares the answers with the expected ones. The
weights are read anew, layer by layer, in every pass; the report says how much memory they took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from freight.demo import EXAMPLES, MODEL_DIR

NUM_SHOWN = 6
LEAST_RIGHT = 0.95


def main() -> int:
    size = (MODEL_DIR / "model.safetensors").stat().st_size
    print(f"A model of {size / 2**20:.2f} MiB on disk, at {MODEL_DIR}")
    with tempfile.TemporaryDirectory(prefix="freight-demo-") as directory:
        output = Path(directory) / "answers.jsonl"
        run(["run", str(EXAMPLES), "--model", "demo", "--output", str(output)])
        answers = {row["id"]: row for row in read(output)}
    rows = read(EXAMPLES)
    right = [answers[row["id"]].get("text", "").strip() == row["expected"] for row in rows]
    for row in rows[:NUM_SHOWN]:
        print(f"\n{row['prompt']}{answers[row['id']].get('text')}")
    share = sum(right) / len(rows)
    print(f"\nexact match: {sum(right)} of {len(rows)} rows, {100 * share:.1f} %")
    command = Path(sys.executable).with_name("freight")
    print(f"\nYour own rows: {command} run rows.jsonl --model MODEL --output answers.jsonl")
    print("MODEL is a directory, a GGUF file or a Hugging Face Hub id.")
    print("The README says what rows look like.")
    return 0 if share >= LEAST_RIGHT else 1


def run(arguments: list[str]) -> None:
    """The command, with all weights on disk; in float32, so that every machine gives the same."""
    arguments += ["--weights", "0/100", "--dtype", "float32", "--device", "cpu"]
    print(f"$ freight {' '.join(arguments)}\n", flush=True)
    subprocess.run([sys.executable, "-m", "freight.entrypoints.cli", *arguments], check=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
