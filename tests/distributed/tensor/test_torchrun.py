"""``freight run --split tensor`` under torchrun: one process's output, lost ranks, memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ..commands import DIFFERING, NUM_ROWS, SMALL, few_wide_layers, job, lose_a_rank, refused
from ..forks import Forks


def cut(rows: Path, output: Path, *flags: str) -> list[str]:
    return job(rows, output, "--split", "tensor", *flags)


def test_two_ranks_write_the_output_of_one(
    rows: Path, alone: bytes, forks: Forks, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    status, said = forks.finish(2, cut(rows, output), torchrun=True)
    assert status == 0, said
    assert output.read_bytes() == alone
    assert said.count(f"{NUM_ROWS} rows: {NUM_ROWS} answered") == 1, "the first rank alone speaks"
    told = re.search(r"layouts: (.*)\n.*sent by all ranks: (.*)", said)
    assert told is not None, said
    # Every token but the last of a row is computed.
    tokens = sum(map(int, re.findall(r"(\d+) tokens in", told[1])))
    counted = re.search(r"(\d+) prompt and (\d+) generated tokens", said)
    assert counted is not None
    assert tokens <= int(counted[1]) + int(counted[2]) <= tokens + NUM_ROWS
    assert "all-gather" in told[2] and "B" in told[2]


def test_a_lost_rank_ends_the_run_and_another_number_goes_on(
    rows: Path, alone: bytes, forks: Forks, tmp_path: Path
) -> None:
    """The others compute everything in one layout that gathers weights."""
    output = tmp_path / "answers.jsonl"
    told = lose_a_rank(forks, 2, cut(rows, output, *SMALL[:2]), output)
    assert "It ran part 2 of 2 of every layer" in told
    status, told = forks.finish(4, cut(rows, output, "--pin-layout", "xy-weight-gathered"))
    assert status == 0, told
    assert "going on: " in told and output.read_bytes() == alone
    (layouts,) = re.findall(r"layouts: (.*)", told)
    assert layouts.count("tokens in") == 1 and layouts.startswith("xy-weight-gathered")
    assert "all-gather of weights" in told


def test_four_ranks_in_two_stages_write_the_output_of_one(
    rows: Path, alone: bytes, forks: Forks, tmp_path: Path
) -> None:
    """And go on with what ranks in one stage had begun."""
    output = tmp_path / "answers.jsonl"
    told = lose_a_rank(forks, 4, cut(rows, output, "--stages", "2", *SMALL[:2]), output)
    assert re.search(r"It ran part [12] of 2 of every layer of stage [12] of 2", told), told
    status, told = forks.finish(4, cut(rows, output, "--stages", "2"), torchrun=True)
    assert status == 0, told
    assert "going on: " in told and output.read_bytes() == alone
    assert "of the first of 2 stages" in told


def test_ranks_in_stages_score_as_one(forks: Forks, tmp_path: Path) -> None:
    """Continuations of contexts of many lengths, some cut into several calls."""
    rows, outputs = tmp_path / "pairs.jsonl", [tmp_path / name for name in ("one", "four")]
    contexts = ["a cat sat " * count for count in range(1, 13)]
    pairs = [{"prompt": context, "continuation": " on three mats"} for context in contexts]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for count, output, flags in ((1, outputs[0], ()), (4, outputs[1], ("--stages", "2"))):
        own = job(rows, output) if count == 1 else cut(rows, output, *flags)
        status, said = forks.finish(count, own)
        assert status == 0, said
    one, four = ([*map(json.loads, own.read_text().splitlines())] for own in outputs)
    assert len(one) == len(four) == len(pairs)
    for own, other in zip(one, four, strict=True):
        assert own["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert own["is_greedy"] == other["is_greedy"] and own["num_tokens"] == other["num_tokens"]


def test_flags_that_mean_nothing_are_refused(rows: Path, forks: Forks, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    error = refused(forks.finish(2, cut(rows, output, "--stages", "0")))
    assert error.startswith("--stages 0 was given.")
    error = refused(forks.finish(2, cut(rows, output, "--recalibrate")))
    assert error.startswith("--recalibrate was given for 2 ranks.")
    error = refused(forks.finish(2, job(rows, output, "--stages", "2")))
    assert "--split layers" in error and "Add --split tensor" in error
    error = refused(forks.finish(1, cut(rows, output, "--stages", "2")))
    assert "One process runs this job" in error and "torchrun" in error
    assert not output.exists()


def test_ranks_that_differ_refuse(rows: Path, forks: Forks, tmp_path: Path) -> None:
    script, output = tmp_path / "differing.py", tmp_path / "answers.jsonl"
    script.write_text(DIFFERING.format(change="sys.argv += ['--pin-layout', 'megatron']"))
    error = refused(forks.finish(2, [str(script), *cut(rows, output)[2:]]))
    assert "Rank 1" in error and "--pin-layout" in error
    assert not output.exists()


def test_what_is_wrong_with_another_rank_is_told(rows: Path, forks: Forks, tmp_path: Path) -> None:
    """Hosts have directories of their own: one may lack what was named, or not have been given any,
    and then would cut otherwise."""
    script, output = tmp_path / "differing.py", tmp_path / "answers.jsonl"
    named = "sys.argv.index('--disk-dir')"
    for change, told in (
        (f"sys.argv[{named} + 1] = '/nowhere'", ("Rank 1", "/nowhere", "no such directory")),
        (f"del sys.argv[{named} :]", ("Rank 1", "--disk-dir")),
    ):
        script.write_text(DIFFERING.format(change=change))
        command = cut(rows, output, "--disk-dir", str(tmp_path))
        error = refused(forks.finish(2, [str(script), *command[2:]]))
        assert all(part in error for part in told), error
    assert not output.exists()


# The disk of one rank is full, which is found out while all measure theirs.
FULL = """
    import freight.distributed.tensor.rates as rates
    from freight.errors import BudgetError
    def full(*arguments):
        raise BudgetError("32 MiB were to be written.", "The disk is full.", "Free some.")
    rates.create_scratch = full
"""


def test_a_disk_that_is_full_is_told_and_nobody_waits_for_its_rank(
    rows: Path, forks: Forks, tmp_path: Path
) -> None:
    """The others had begun to measure theirs, together with it."""
    script, output = tmp_path / "differing.py", tmp_path / "answers.jsonl"
    script.write_text(DIFFERING.format(change=FULL.strip()))
    command = cut(rows, output, "--disk-dir", str(tmp_path))
    error = refused(forks.finish(2, [str(script), *command[2:]]))
    assert error.startswith("On rank 1 of 2 (") and "The disk is full." in error


# Says at the end what each rank has held at most.
TELLING = """
import os, re, sys
import freight.entrypoints.run_stages as run_stages
import freight.distributed.tensor.planning as planning
from freight.entrypoints.cli import main
leave, room, warm_up, done = run_stages._leave, planning.room_on_cpu, planning.warm_up, []
def warmed(*arguments, **named):
    done.append("warm")
    warm_up(*arguments, **named)
def counted(*budget):
    done.append("counted")
    return room(*budget)
planning.warm_up, planning.room_on_cpu = warmed, counted
def tell(status):
    if done:
        sys.stderr.write(f"{' and '.join(done)}\\n")
    with open("/proc/self/status") as file:
        sys.stderr.write("held " + re.search(r"VmHWM:\\s+(\\d+)", file.read())[1] + "\\n")
    leave(status)
run_stages._leave = tell
status = main()
tell(status)
"""


def test_layers_that_do_not_fit_come_from_the_ranks_disks(forks: Forks, tmp_path: Path) -> None:
    """Within the budget, and the tokens of ranks that have all in memory."""
    model, rows, weights = few_wide_layers(tmp_path, 10)
    script = tmp_path / "telling.py"
    script.write_text(TELLING)

    def run(output: str, *more: str) -> tuple[int, str]:
        flags = ["--model", str(model), "--dummy-weights", "--pin-layout", "megatron", *more]
        command = cut(rows, tmp_path / output, *flags, "--max-tokens", "3")
        return forks.finish(2, [str(script), *command[2:]])

    status, told = run("whole.jsonl")
    assert status == 0, told
    error = refused(run("none.jsonl", "--cpu-memory", "450MiB"))
    assert "--disk-dir" in error
    needed = re.search(r"needs ([\d.]+) MiB at least .* has ([\d.]+) MiB beside", error)
    assert needed is not None, error
    budget = int(450 + float(needed[1]) - float(needed[2]) - weights / 2**20 / 4)
    limits = ["--cpu-memory", f"{budget}MiB", "--disk-dir", str(tmp_path)]
    status, told = run("disk.jsonl", *limits)
    assert status == 0, told
    away = re.search(r"(\d+) of 10 layers come from its disk in every sweep", told)
    assert away is not None and 2 <= int(away[1]) <= 8, told
    assert re.search(r"read by all ranks from their disks: [\d.]+ [MG]iB", told), told
    held = [int(size) / 2**10 for size in re.findall(r"held (\d+)", told)]
    assert len(held) == 2 and max(held) <= budget, (held, budget)
    assert (tmp_path / "disk.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    budget = 450 - int(float(needed[2])) + 9
    error = refused(run("least.jsonl", "--cpu-memory", f"{budget}MiB", *limits[2:]))
    assert "--disk-dir" not in error and "Raise --cpu-memory" in error


def test_ranks_hold_what_one_cannot_and_no_more_than_they_may(forks: Forks, tmp_path: Path) -> None:
    """Under the same budget for each process."""
    model, rows, weights = few_wide_layers(tmp_path, 10)
    script = tmp_path / "telling.py"
    script.write_text(TELLING)

    def run(budget: str, output: str) -> tuple[int, str]:
        flags = ["--model", str(model), "--dummy-weights", "--cpu-memory", budget]
        command = cut(rows, tmp_path / output, *flags, "--max-tokens", "3")
        return forks.finish(2, [str(script), *command[2:]])

    error = refused(run("450MiB", "none.jsonl"))
    assert "Raise --cpu-memory, start more ranks" in error and "weights" in error
    needed = re.search(r"needs ([\d.]+) MiB at least .* has ([\d.]+) MiB beside", error)
    assert needed is not None, error
    budget = 450 + float(needed[1]) - float(needed[2]) + 30
    assert budget < 450 - float(needed[2]) + weights / 2**20
    status, told = run(f"{int(budget)}MiB", "two.jsonl")
    assert status == 0, told
    assert told.count("warm and counted") == 2, "loops are compiled before memory is planned"
    held = [int(size) / 2**10 for size in re.findall(r"held (\d+)", told)]
    assert len(held) == 2 and max(held) <= budget, held
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == 4
