"""``freight run --split tensor`` under torchrun: one process's output, lost ranks, memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_a_rank import ranks_of

from freight.demo import EXAMPLES

from ..pipeline.test_processes import (
    DIFFERING,
    LIMIT_S,
    SMALL,
    few_wide_layers,
    finish,
    job,
    started,
    torchrun,
    wait_for_rows,
)

FEW = ["--micro-batch-size", "4"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:24]))
    return path


@pytest.fixture(scope="module")
def alone(rows: Path) -> bytes:
    """What one process makes of the rows."""
    output = rows.with_name("alone.jsonl")
    done = finish([sys.executable, *job(rows, output)])
    assert done.returncode == 0, done.stderr
    return output.read_bytes()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What calibration measures is kept here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def cut(rows: Path, output: Path, *flags: str) -> list[str]:
    return job(rows, output, "--split", "tensor", *flags)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What was refused, limit and advice."""
    assert done.returncode != 0
    return re.findall(r"freight: error: (.*\n  .*\n  .*)\n", done.stderr)


def test_two_ranks_write_the_output_of_one(rows: Path, alone: bytes, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    done = finish(torchrun(2, *cut(rows, output)))
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == alone
    assert done.stderr.count("24 rows: 24 answered") == 1, "the first rank alone speaks"
    told = re.search(r"layouts: (.*)\n.*sent by all ranks: (.*)", done.stderr)
    assert told is not None, done.stderr
    # Every token but the last of a row is computed.
    tokens = sum(map(int, re.findall(r"(\d+) tokens in", told[1])))
    counted = re.search(r"(\d+) prompt and (\d+) generated tokens", done.stderr)
    assert counted is not None
    assert tokens <= int(counted[1]) + int(counted[2]) <= tokens + 24
    assert "all-gather" in told[2] and "B" in told[2]


def test_a_lost_rank_ends_the_run_and_another_number_goes_on(
    rows: Path, alone: bytes, tmp_path: Path
) -> None:
    """The others compute everything in one layout that gathers weights."""
    output, log = tmp_path / "answers.jsonl", tmp_path / "log"
    with started(torchrun(2, *cut(rows, output, *FEW)), log) as process:
        wait_for_rows(output, process, log)
        pids = ranks_of(process.pid)
        assert sorted(pids) == [0, 1]
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        assert process.wait(LIMIT_S) != 0
        assert time.monotonic() - killed_s < 10, log.read_text()
    told = log.read_text()
    error = re.search(r"freight: error: (.*\n  .*\n  .*)\n", told)
    assert error is not None, told
    assert re.search(r"Rank 1 .* has ended. It ran part 2 of 2 of every layer", error[1])
    assert "torchrun --nproc-per-node 2 -m freight run" in error[1] and "kept" in error[1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    done = finish(torchrun(4, *cut(rows, output, "--pin-layout", "xy-weight-gathered")))
    assert done.returncode == 0, done.stderr
    assert "going on: " in done.stderr and output.read_bytes() == alone
    (layouts,) = re.findall(r"layouts: (.*)", done.stderr)
    assert layouts.count("tokens in") == 1 and layouts.startswith("xy-weight-gathered")
    assert "all-gather of weights" in done.stderr


def test_ranks_that_differ_refuse(rows: Path, tmp_path: Path) -> None:
    script, output = tmp_path / "differing.py", tmp_path / "answers.jsonl"
    change = "sys.argv += ['--pin-layout', 'megatron']"
    script.write_text(DIFFERING.format(change=change))
    (error,) = errors(finish(torchrun(2, str(script), *cut(rows, output, *SMALL[:2])[2:])))
    assert "Rank 1" in error and "--pin-layout" in error
    assert not output.exists()


# Says at the end what each rank has held at most.
TELLING = """
import os, re, sys
import freight.entrypoints.run_stages as run_stages
from freight.entrypoints.cli import main
leave = run_stages._leave
def tell(status):
    with open("/proc/self/status") as file:
        sys.stderr.write("held " + re.search(r"VmHWM:\\s+(\\d+)", file.read())[1] + "\\n")
    leave(status)
run_stages._leave = tell
status = main()
tell(status)
"""


def test_ranks_hold_what_one_cannot_and_no_more_than_they_may(tmp_path: Path) -> None:
    """Under the same budget for each process."""
    model, rows, weights = few_wide_layers(tmp_path, 10)
    script = tmp_path / "telling.py"
    script.write_text(TELLING)

    def run(budget: str, output: str) -> subprocess.CompletedProcess[str]:
        flags = ["--model", str(model), "--dummy-weights", "--cpu-memory", budget]
        command = cut(rows, tmp_path / output, *flags, "--max-tokens", "3")
        return finish(torchrun(2, str(script), *command[2:]))

    (refused,) = errors(run("450MiB", "none.jsonl"))
    assert "Raise --cpu-memory, start more ranks" in refused and "weights" in refused
    needed = re.search(r"needs ([\d.]+) MiB at least .* has ([\d.]+) MiB beside", refused)
    assert needed is not None, refused
    budget = 450 + float(needed[1]) - float(needed[2]) + 30
    assert budget < 450 - float(needed[2]) + weights / 2**20
    done = run(f"{int(budget)}MiB", "two.jsonl")
    assert done.returncode == 0, done.stderr
    held = [int(size) / 2**10 for size in re.findall(r"held (\d+)", done.stderr)]
    assert len(held) == 2 and max(held) <= budget, held
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == 4
