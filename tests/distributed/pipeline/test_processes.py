"""``freight run`` under torchrun: one process's output, refusals, lost ranks, memory, ports."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from freight.demo import MODEL_DIR
from freight.distributed.ranks import Place, Ranks

from ..commands import (
    DIFFERING,
    NUM_ROWS,
    SMALL,
    few_wide_layers,
    job,
    kill,
    lose_a_rank,
    refused,
    wait_for_rows,
)
from ..forks import LIMIT_S, Forks, Run


def test_two_ranks_write_the_output_of_one(
    rows: Path, alone: bytes, forks: Forks, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    status, told = forks.finish(2, job(rows, output))
    assert status == 0, told
    assert output.read_bytes() == alone
    assert told.count(f"{NUM_ROWS} rows: {NUM_ROWS} answered") == 1, "the first rank alone speaks"
    assert "stage 2 of 2, layers 3-5" in told
    status, told = forks.finish(2, job(rows, output))
    assert status == 0 and "already complete" in told


@pytest.mark.parametrize("split", ["layers", "rows"])
def test_all_ranks_end_their_traces_and_leave_nothing(
    split: str, rows: Path, forks: Forks, tmp_path: Path
) -> None:
    """No random weights on the disk."""
    disk_dir = tmp_path / "disk"
    disk_dir.mkdir()
    flags = ["--split", split, "--trace", str(tmp_path / "trace.json"), "--max-tokens", "2"]
    flags += ["--dummy-weights", "--weights", "0/0/100", "--disk-dir", str(disk_dir)]
    status, told = forks.finish(2, job(rows, tmp_path / "answers.jsonl", *flags))
    assert status == 0, told
    for name in ("trace.json", "trace.rank1.json"):
        events = json.loads((tmp_path / name).read_text())
        assert any(event.get("name") == "compute" for event in events)
    assert not [*disk_dir.iterdir()]


@pytest.mark.parametrize("split", ["layers", "rows"])
def test_ranks_score_as_one_does(split: str, rows: Path, forks: Forks, tmp_path: Path) -> None:
    """Of prompts and continuations, and nothing else: each rank's part is work of its own."""
    scored = tmp_path / "scored.jsonl"
    asked = [json.loads(line) for line in rows.read_text().splitlines()]
    own = [{"prompt": one["prompt"], "prompt_logprobs": 0, "max_tokens": 0} for one in asked[:9]]
    own += [{"prompt": one["prompt"], "continuation": " the end"} for one in asked[9:]]
    scored.write_text("".join(json.dumps(row) + "\n" for row in own))
    outputs = [tmp_path / f"{size}.jsonl" for size in (1, 2)]
    for size, output in zip((1, 2), outputs, strict=True):
        flags = ["--split", split] if size > 1 else []
        status, told = forks.finish(size, job(scored, output, *flags))
        assert status == 0, told
    alone, together = (
        [json.loads(line) for line in output.read_text().splitlines()] for output in outputs
    )
    assert len(alone) == len(own)
    # Which rows are beside one decides the last bits of its sums.
    scores = [taken_out(rows) for rows in (alone, together)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4) and len(scores[0]) > NUM_ROWS
    assert together == alone


def taken_out(value: Any) -> list[float]:
    """Numbers that are no whole ones, in order; 0 is left in their places."""
    found: list[float] = []
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for key, own in places:
        if isinstance(own, float):
            found.append(own)
            value[key] = 0.0
        elif isinstance(own, dict | list):
            found += taken_out(own)
    return found


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
    rows: Path, alone: bytes, forks: Forks, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    command = job(rows, output, *SMALL)

    def look(run: Run) -> None:
        assert len(run.ranks()) == 3
        for pid in run.ranks():
            assert listening(pid) == {"0100007F"}, "on the loopback alone"

    told = lose_a_rank(forks, 3, command, output, torchrun=True, look=look)
    assert "It ran stage 2 of 3, layers 2-3" in told
    status, told = forks.finish(2, command)
    assert status == 0, told
    assert "going on: " in told and output.read_bytes() == alone


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


def test_a_first_rank_that_is_stuck_ends_too(rows: Path, forks: Forks, tmp_path: Path) -> None:
    output, script = tmp_path / "answers.jsonl", tmp_path / "stuck.py"
    script.write_text(STUCK.format(limit=2 * LIMIT_S))
    with forks.start(2, [str(script), *job(rows, output, *SMALL)[2:]]) as run:
        wait_for_rows(output, run)
        told = kill(run, 1)
    assert re.search(r"Rank 1 .* has ended", told) and "kept" in told, told


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("sys.argv += ['--micro-batch-size', '3']", "--micro-batch-size"),
        ("sys.argv += ['--split', 'tensor']", "--split"),
        (
            "import freight.entrypoints.run as run; run.freight_version = lambda: '0.0.0'",
            "Freight's version",
        ),
        ("sys.argv[sys.argv.index('demo')] = '{model}'", "the weights"),
    ],
)
def test_ranks_that_differ_refuse(
    change: str, name: str, rows: Path, forks: Forks, tmp_path: Path
) -> None:
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
    limit = refused(forks.finish(2, [str(script), *job(rows, output)[2:]])).splitlines()[1]
    assert "Rank 1" in limit and name in limit
    assert not output.exists()


# A file of one rank ends while its weights are read.
DAMAGED = """
    import freight.runtime.performer as performer
    from freight.errors import ModelError
    perform, done = performer.Performer.perform, []
    def damaged(*arguments):
        done.append(None)
        if len(done) > 40:
            raise ModelError("weights were read at byte 7.", "The file ended.", "Fetch it again.")
        return perform(*arguments)
    performer.Performer.perform = damaged
"""


@pytest.mark.parametrize(
    ("split", "part"), [("layers", "stage 2 of 2, layers 3-5"), ("rows", "replica 2 of 2")]
)
def test_why_a_rank_ends_is_told_before_it_is_gone(
    split: str, part: str, rows: Path, forks: Forks, tmp_path: Path
) -> None:
    """Its connections break first."""
    script, output = tmp_path / "differing.py", tmp_path / "answers.jsonl"
    script.write_text(DIFFERING.format(change=DAMAGED.strip()))
    command = job(rows, output, "--split", split, *SMALL)
    error = refused(forks.finish(2, [str(script), *command[2:]]))
    assert "Rank 1 " in error and "weights were read at byte 7. The file ended." in error
    assert f"It ran {part}." in error and "torchrun --nproc-per-node 2" in error


def test_two_ranks_hold_what_one_cannot(forks: Forks, tmp_path: Path) -> None:
    """Under the same budget for each process, no weights on disk."""
    model, rows, weights = few_wide_layers(tmp_path, 8)

    def run(size: int, budget: str, output: str) -> tuple[int, str]:
        flags = ["--model", str(model), "--dummy-weights", "--weights", "0/100/0"]
        flags += ["--cpu-memory", budget, "--max-tokens", "3"]
        return forks.finish(size, job(rows, tmp_path / output, *flags))

    process = re.search(r"the process itself ([\d.]+) MiB", refused(run(1, "1MiB", "none.jsonl")))
    assert process is not None
    budget = f"{int(float(process[1]) + 0.75 * weights / 2**20)}MiB"
    assert "Raise --cpu-memory" in refused(run(1, budget, "none.jsonl"))
    status, told = run(2, budget, "two.jsonl")
    assert status == 0, told
    assert "0.0/100.0/0.0 % on gpu/cpu/disk" in told
    status, told = run(1, "4GiB", "one.jsonl")
    assert status == 0, told
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_lost_rank_is_told_while_somebody_waits_in_the_store() -> None:
    """For something of a rank that is gone: all others are kept out of the store until then."""
    told = threading.Event()

    class Held:
        def check(self, keys: list[str]) -> bool:
            assert told.wait(20.0), "the loss waited for the store"
            return False

    ranks = Ranks.__new__(Ranks)
    ranks.place = Place(rank=0, size=2, local_rank=0, local_size=2)
    ranks.hosts, ranks.lost = ["here", "there"], [1]
    ranks._store = Held()
    error = ranks.loss()
    assert not told.is_set() and "Rank 1 (there) has ended." in error.limit
    told.set()
