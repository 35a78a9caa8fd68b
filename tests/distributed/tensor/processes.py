"""Starts ranks as processes and gives back what each of them found."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_ranks(job: str, num_ranks: int, directory: Path, seconds: int = 120) -> list:
    """Of each rank what the job of ``worker`` returned; fails with what a rank failed with."""
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), job, str(num_ranks)]
    done = subprocess.run(
        [*command, str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    errors = [path.read_text() for path in sorted(directory.glob("*.error"))]
    assert not done.returncode, "\n".join([*errors[:1], done.stderr[-2000:]])
    return [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(num_ranks)]
