"""What ``freight plan --workload`` makes of lengths, of ranges of them, and of a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.demo import EXAMPLES, MODEL_DIR
from freight.entrypoints.bench.work import parse_shape
from freight.entrypoints.cli import main
from freight.jobs.dataset import dataset_workload
from freight.jobs.formats import RowLimits
from freight.plan import forecast as forecasts
from freight.runtime.params import SamplingParams
from freight.runtime.tokenizer import Tokenizer

LIMITS = RowLimits(max_positions=512, vocab_size=1024)
OPT = ("-m", "opt-6.7b", "--machine", "t4")
POLICY = ("--weights", "20/80", "--kv", "0/100", "--micro-batch-size", "64")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status = main(["plan", "--json", *arguments])
    told = capsys.readouterr()
    assert status == 0, told.err
    record: dict[str, Any] = json.loads(told.out)
    return record


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("shape", ["64:8", "16-64:2-8"])
def test_a_billion_rows_take_a_thousand_times_a_million(
    shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told by as many numbers."""
    work = parse_shape(shape, 10**9).workload()
    assert work.num_rows == 10**9 and len(work.lengths) < 10**5
    assert sum(count * prompt for count, prompt, _ in work.lengths) == work.total_prompt_tokens
    one, other = (
        planned(capsys, *OPT, *POLICY, "--workload", shape, "--rows", rows)
        for rows in ("1000000", "1000000000")
    )
    assert other["policy"] == one["policy"]
    times = [own["seconds"]["generate"] for own in (one, other)]
    assert times[1] == pytest.approx(1000 * times[0], rel=0.01)
    moved = [own["moved_bytes"]["host to device"] for own in (one, other)]
    assert moved[1] == pytest.approx(1000 * moved[0], rel=0.01)


@given(count=st.integers(1, 3000), most=st.integers(1, 50), size=st.integers(1, 9))
def test_of_many_blocks_some_count_for_others(count: int, most: int, size: int) -> None:
    starts = range(0, count * size, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecasts, "_MOST_COUNTED", most)
        found = [*forecasts._counted(starts)]
    assert sum(times for _, times in found) == count and len(found) <= most + 1
    assert found[-1] == (starts[-1], 1)
    begin = 0
    for start, times in found:
        assert starts[begin] <= start <= starts[begin + times - 1]
        begin += times


def test_a_dataset_is_counted_as_a_run_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that say how many tokens they want, several samples, and rows that cannot be used."""
    rows: list[Any] = [
        {"prompt": "copy: abc ->", "max_tokens": 5},
        {"prompt": [5, 6, 7, 8], "n": 3, "temperature": 0.5},
        {"nothing": 1},
        {"prompt": "add 12 34 =", "max_tokens": 9},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = Tokenizer(MODEL_DIR)
    prompts = [len(tokenizer.encode(rows[row]["prompt"])) for row in (0, 3)] + [4]
    said: list[str] = []
    work = dataset_workload(
        source,
        tokenizer=tokenizer,
        limits=LIMITS,
        defaults=SamplingParams(max_tokens=7),
        say=said.append,
    )
    assert work.num_rows == 1 + 1 + 3
    assert work.max_prompt_tokens == max(prompts) and work.total_prompt_tokens == sum(prompts)
    assert work.max_new_tokens == 9 and work.total_new_tokens == 5 + 9 + 3 * 7
    assert len(said) == 1 and "1 of 4 rows cannot be used" in said[0]
    record = planned(
        capsys, *("-m", "demo", "--machine", "laptop", "--workload", str(source)), "--max-tokens=7"
    )
    assert record["num_rows"] == 5 and record["new_tokens"] == 9
    assert record["prompt_tokens"] == max(prompts)


def test_the_examples_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """In words: lengths differ, and answers may end before they are as long as they may be."""
    assert main(["plan", "-m", "demo", "--machine", "laptop", "--workload", str(EXAMPLES)]) == 0
    told = capsys.readouterr().out
    assert "500 rows of up to " in told and "prompt and up to " in told


def test_what_rows_begin_with_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = list(range(5, 101))
    source = write_rows(
        tmp_path / "few.jsonl",
        [{"prompt": [*common, 200 + i, 7 * i], "max_tokens": 4} for i in range(20)],
    )
    record = planned(capsys, *("-m", "demo", "--machine", "laptop", "--workload", str(source)))
    assert record["shared_prefix_tokens"] == len(common)
    assert record["mean_prompt_tokens"] == record["prompt_tokens"] == len(common) + 2


def test_ranges_of_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-m", "opt-6.7b", "--machine", "t4", "--rows", "300"]
    record = planned(capsys, *flags, "--workload", "16-256:4-128")
    assert record["prompt_tokens"] <= 256 and 110 < record["mean_prompt_tokens"] < 160
    assert record["new_tokens"] == 128 and 60 < record["expected_new_tokens"] < 70
    assert main(["plan", *flags, "--workload", "16-256:4-128"]) == 0
    assert "rows of up to 25" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--kv", "0/100/0", "--cpu-attention", "0"]])
def test_a_common_beginning_is_worth_something(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where rows' own keys are not on the device."""
    asked = ["-m", "opt-30b", "--machine", "t4", "--workload", "512:32", "--rows", "400", *flags]
    alone = planned(capsys, *asked)
    shared = planned(capsys, *asked, "--shared-prefix", "384")
    assert shared["shared_prefix_tokens"] == 384
    assert shared["seconds"]["generate"] < 0.8 * alone["seconds"]["generate"]


ENDLESS = {"ignore_eos": True}


def test_samples_share_their_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Described, or in a file: the same work, and the same plan. What all prompts begin with is
    shared where it spares more."""
    asked = ["-m", "llama-3-8b", "--machine", "t4"]
    source = write_rows(
        tmp_path / "samples.jsonl",
        [
            {"prompt": [(i * j) % 997 for j in range(513)], "n": 8, "temperature": 1, **ENDLESS}
            for i in range(3, 53)
        ],
    )
    described = [*asked, "--workload", "513:32", "--rows", "50", "--samples", "8"]
    told = planned(capsys, *described)
    assert told["num_rows"] == 400 and told["shared_prefix_tokens"] == 512
    of_file = planned(capsys, *asked, "--workload", str(source), "--max-tokens", "32")
    assert of_file["num_rows"] == 400 and of_file["shared_prefix_tokens"] == 512
    assert of_file["policy"] == told["policy"]
    assert of_file["seconds"] == pytest.approx(told["seconds"], rel=0.02)
    apart = planned(capsys, *described, "--no-shared-prefixes")
    assert told["seconds"]["generate"] < 0.9 * apart["seconds"]["generate"]
    few = [*asked, "--workload", "513:32", "--samples", "2", "--shared-prefix", "480"]
    assert planned(capsys, *few)["shared_prefix_tokens"] == 480


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workload", "nowhere.jsonl"], ["neither", "like 512:32"]),
        (["--workload", "0:3"], ["neither", "like 512:32"]),
        (["--workload", "256-16:4"], ["neither"]),
        (["--workload", "16:4", "--shared-prefix", "16"], ["0 to 15"]),
        (["--workload", "8-16:4", "--shared-prefix", "9"], ["0 to 7"]),
        (["--workload", "16:4", "--shared-prefix", "-1"], ["--shared-prefix -1"]),
        (["--workload", "16:4", "--max-tokens", "9"], ["--max-tokens 9", "a file with rows"]),
        (["--workload", "16:4", "--rows", "0"], ["--rows 0", "Give 1 or more"]),
        (["--workload", "16:4", "--samples", "0"], ["--samples 0", "Give 1 or more"]),
        (
            ["--workload", "16:4", "--samples", "2", "--rows", "10000001"],
            ["--samples 2 was given for 10000001 rows", "Give fewer rows"],
        ),
        (["--workload", "{rows}", "--samples", "5"], ["--samples 5", "Leave --samples out"]),
        (["--workload", "{rows}", "--rows", "5"], ["--rows 5", "Leave --rows out"]),
        (["--workload", "{rows}", "--shared-prefix", "5"], ["--shared-prefix 5"]),
        (["--workload", "{rows}"], ["No row can be used", "tokenizer"]),
        (["--workload", "{empty}"], ["It has no rows"]),
    ],
)
def test_work_that_cannot_be(
    flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text needs a tokenizer, and a bundled configuration has none."""
    files = {
        "rows": write_rows(tmp_path / "rows.jsonl", [{"prompt": "text"}]),
        "empty": write_rows(tmp_path / "empty.jsonl", []),
    }
    given = [flag.format(**files) for flag in flags]
    assert main(["plan", "-m", "opt-6.7b", "--machine", "t4", *given]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("freight: error: ") and len(error.strip().splitlines()) == 3
    for word in words:
        assert word in error
