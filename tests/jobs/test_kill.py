"""kill -9 at random moments: the job goes on, and every row is there once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("slow_job.py")
NUM_ROWS = 300


@pytest.mark.parametrize("order", [[], ["unordered"]])
def test_killed_at_random_moments(tmp_path: Path, model_dir: Path, order: list[str]) -> None:
    rows = [
        {"prompt": [1 + index % 50] * (index % 9), "id": f"row {index}"}
        for index in range(NUM_ROWS)
    ]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(SCRIPT), str(source), str(sink), str(model_dir), *order]
    chance = random.Random(len(order))
    resumed = []
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            resumed.append(int(process.stdout.readline() or -1))
            time.sleep(chance.uniform(0, 0.08))
            process.kill()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        time.sleep(chance.uniform(0, 0.4))  # while starting up, reading or recovering
        process.kill()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ids = [json.loads(line)["id"] for line in sink.read_text().splitlines()]
    expected = [row["id"] for row in rows]
    assert sorted(ids) == sorted(expected)
    assert order or ids == expected
    assert resumed == sorted(resumed) and resumed[-1] > 0, "work was kept"
