"""``freight run`` under torchrun: one process's output, refusals, lost ranks, memory, ports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kill_a_rank import ranks_of

from freight.demo import EXAMPLES

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ["--model", "demo", "--dtype", "float32", "--device", "cpu"]
SMALL = ["--micro-batch-size", "4", "--num-micro-batches", "1"]
LIMIT_S = 60.0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def torchrun(size: int, *arguments: str) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    return [*start, *arguments]


def job(rows: Path, output: Path, *flags: str) -> list[str]:
    return ["-m", "freight", "run", str(rows), "--output", str(output), *FLAGS, *flags]


def finish(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:60]))
    return path


@pytest.fixture(scope="module")
def alone(rows: Path) -> bytes:
    """What one process makes of the rows."""
    output = rows.with_name("alone.jsonl")
    done = finish([sys.executable, *job(rows, output, *SMALL)])
    assert done.returncode == 0, done.stderr
    return output.read_bytes()


def test_two_ranks_write_the_output_of_one(rows: Path, alone: bytes, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    done = finish(torchrun(2, *job(rows, output)))
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == alone
    assert done.stderr.count("60 rows: 60 answered") == 1, "the first rank alone speaks"
    assert "stage 2 of 2, layers 3-5" in done.stderr
    again = finish(torchrun(2, *job(rows, output)))
    assert again.returncode == 0 and "already complete" in again.stderr


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment(), stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_rows(output: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until some rows of a run are in its journal."""
    journal = output.with_name(f"{output.name}.freight") / "journal.jsonl"
    ends_s = time.monotonic() + LIMIT_S
    while not journal.exists() or len(journal.read_bytes().splitlines()) < 6:
        assert process.poll() is None and time.monotonic() < ends_s, log.read_text()
        time.sleep(0.01)


def listening(pid: int) -> set[str]:
    """Addresses on which a process listens, as /proc/net/tcp writes them."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:
            continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                addresses.add(parts[1].partition(":")[0])
    return addresses


def test_a_lost_rank_ends_the_run_and_another_number_goes_on(
    rows: Path, alone: bytes, tmp_path: Path
) -> None:
    output, log = tmp_path / "answers.jsonl", tmp_path / "log"
    with started(torchrun(3, *job(rows, output, *SMALL)), log) as process:
        wait_for_rows(output, process, log)
        pids = ranks_of(process.pid)
        assert sorted(pids) == [0, 1, 2]
        for pid in pids.values():
            assert listening(pid) == {"0100007F"}, "on the loopback alone"
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        assert process.wait(LIMIT_S) != 0
        assert time.monotonic() - killed_s < 10, log.read_text()
    told = log.read_text()
    error = re.search(r"freight: error: (.*\n  .*\n  .*)\n", told)
    assert error is not None, told
    assert re.search(r"Rank 1 .* has ended", error[1]) and "stage 2 of 3, layers 2-3" in error[1]
    assert "torchrun --nproc-per-node 3 -m freight run" in error[1] and "kept" in error[1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    done = finish(torchrun(2, *job(rows, output, *SMALL)))
    assert done.returncode == 0, done.stderr
    assert "going on: " in done.stderr and output.read_bytes() == alone


# The first rank's own thread neither unwinds nor speaks when the run has ended under it.
STUCK = """
import os, sys, time
import freight.entrypoints.run_stages as run_stages
from freight.entrypoints.cli import main
answer_rows = run_stages.answer_rows
def hang(*arguments):
    try:
        return answer_rows(*arguments)
    except BaseException:
        time.sleep({limit})
if os.environ["RANK"] == "0":
    run_stages.answer_rows = hang
sys.exit(main())
"""


def test_a_first_rank_that_is_stuck_ends_too(rows: Path, tmp_path: Path) -> None:
    output, log, script = tmp_path / "answers.jsonl", tmp_path / "log", tmp_path / "stuck.py"
    script.write_text(STUCK.format(limit=2 * LIMIT_S))
    with started(torchrun(2, str(script), *job(rows, output, *SMALL)[2:]), log) as process:
        wait_for_rows(output, process, log)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        killed_s = time.monotonic()
        assert process.wait(LIMIT_S) != 0
        assert time.monotonic() - killed_s < 10, log.read_text()
    told = log.read_text()
    assert re.search(r"Rank 1 .* has ended", told) and "kept" in told, told


# The command line of one rank alone is changed.
DIFFERING = """
import os, sys
from freight.entrypoints.cli import main
if os.environ["RANK"] == "1":
    {change}
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("sys.argv += ['--micro-batch-size', '3']", "--micro-batch-size"),
        (
            "import freight.entrypoints.run as run; run.freight_version = lambda: '0.0.0'",
            "Freight's version",
        ),
        ("sys.argv[sys.argv.index('demo')] = '{model}'", "the weights"),
    ],
)
def test_ranks_that_differ_refuse(change: str, name: str, rows: Path, tmp_path: Path) -> None:
    from freight.demo import MODEL_DIR

    model = tmp_path / "model"
    model.mkdir()
    for path in MODEL_DIR.iterdir():
        if path.is_file():
            (model / path.name).write_bytes(path.read_bytes())
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x3b")
    script, output = tmp_path / "differing.py", tmp_path / "answers.jsonl"
    script.write_text(DIFFERING.format(change=change.format(model=model)))
    done = finish(torchrun(2, str(script), *job(rows, output)[2:]))
    assert done.returncode != 0
    error = re.findall(r"freight: error: .*\n  (.*)\n  .*\n", done.stderr)
    assert len(error) == 1, done.stderr
    assert "Rank 1" in error[0] and name in error[0]
    assert not output.exists()


def few_wide_layers(directory: Path, num_layers: int) -> tuple[Path, Path, int]:
    """A config, rows for it, and the bytes of its weights in float32."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    model, rows = directory / "model", directory / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    rows.write_text("".join(json.dumps({"prompt": [i, i + 1, 7]}) + "\n" for i in range(4)))
    weights = 4 * (num_layers * (4 * 1024**2 + 3 * 1024 * 4096) + 2 * 1000 * 1024)
    return model, rows, weights


def test_two_ranks_hold_what_one_cannot(tmp_path: Path) -> None:
    """Under the same budget for each process, no weights on disk."""
    model, rows, weights = few_wide_layers(tmp_path, 12)

    def run(size: int, budget: str, output: str) -> subprocess.CompletedProcess[str]:
        flags = ["--model", str(model), "--dummy-weights", "--weights", "0/100/0"]
        flags += ["--cpu-memory", budget, "--max-tokens", "3"]
        command = job(rows, tmp_path / output, *flags)
        return finish(torchrun(size, *command) if size > 1 else [sys.executable, *command])

    refused = run(1, "1MiB", "none.jsonl")
    process = re.search(r"the process itself ([\d.]+) MiB", refused.stderr)
    assert process is not None, refused.stderr
    budget = f"{int(float(process[1]) + 0.72 * weights / 2**20)}MiB"
    alone = run(1, budget, "none.jsonl")
    assert alone.returncode != 0 and "Raise --cpu-memory" in alone.stderr
    done = run(2, budget, "two.jsonl")
    assert done.returncode == 0, done.stderr
    assert "0.0/100.0/0.0 % on gpu/cpu/disk" in done.stderr
    roomy = run(1, "4GiB", "one.jsonl")
    assert roomy.returncode == 0, roomy.stderr
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
