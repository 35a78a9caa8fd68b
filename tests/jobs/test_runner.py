"""A job ends with each row once, wherever it was stopped, and refuses to mix with another."""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import BudgetError, InputError, JobError
from freight.jobs.formats import RowLimits
from freight.jobs.identity import model_identity
from freight.jobs.runner import JobReport, JobSpec, run_job
from freight.plan.workload import Workload
from freight.runtime.request import Completion, Logprob, Request, SamplingParams
from freight.runtime.tokenizer import Tokenizer

from .fakes import FakeEngine, Watcher, answer

ROWS: list[dict[str, Any]] = [
    {"prompt": "the cat", "id": "a"},
    {"prompt": [5, 6, 7, 8], "max_tokens": 2},
    {"prompt": []},
    {"prompt": "freight trains move"},
    {"messages": [{"role": "user", "content": "x"}], "id": 40},
    {"nothing": 1, "id": "e"},
    {"prompt": [9], "seed": 77},
]


class ScoringEngine(FakeEngine):
    """Every token is as likely as can be."""

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        sure = Logprob(token_id=8, text="x", logprob=0.0, rank=1)
        sure = replace(sure, top=(sure,))
        for request in requests:
            scored = (sure,) * (len(request.prompt_ids) - request.score_from)
            yield replace(answer(request), prompt_logprobs=scored)


class Bench:
    """One dataset and its output, run with fake engines."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, rows: list[Any] = ROWS) -> None:
        self.directory, self.tokenizer = directory, tokenizer
        self.source, self.sink = directory / "in.jsonl", directory / "out.jsonl"
        self.job_dir = directory / "out.jsonl.freight"
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.engine_class: Callable[..., FakeEngine] = FakeEngine
        self.engines: list[FakeEngine] = []
        self.watcher = Watcher()

    def run(self, engine: dict[str, Any] | None = None, **changes: Any) -> JobReport:
        identity = changes.pop("identity", {"the weights": "w"})
        spec: dict[str, Any] = {
            "source": self.source,
            "sink": self.sink,
            "sampling": SamplingParams(max_tokens=5, seed=1),
        }
        self.watcher = Watcher()

        def build(workload: Workload) -> FakeEngine:
            self.engines.append(self.engine_class(workload, **(engine or {})))
            return self.engines[-1]

        return run_job(
            JobSpec(**(spec | changes)),
            tokenizer=self.tokenizer,
            limits=RowLimits(max_positions=64, vocab_size=320),
            identity=identity,
            build_engine=build,
            observer=self.watcher,
        )

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.sink.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Tokenizer) -> Bench:
    return Bench(tmp_path, tokenizer)


def test_a_whole_job(bench: Bench) -> None:
    report = bench.run()
    rows = bench.rows()
    assert [row["id"] for row in rows] == ["a", 1, 2, 3, 40, "e", 6]
    assert [("error" in row) for row in rows] == [False, False, True, False, False, True, False]
    assert rows[1] == {
        "id": 1,
        "text": rows[1]["text"],
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "finish_reason": "length",
    }
    assert rows[1]["text"].startswith("8 7 seed ") and rows[6]["text"] == "9 seed 77"
    assert (report.num_rows, report.num_failed, report.num_resumed) == (7, 2, 0)
    assert report.engine_summary == "fake engine\ntwo lines"
    assert report.num_new_tokens == sum(row.get("completion_tokens", 0) for row in rows)
    assert bench.watcher.started == (7, 0) and bench.watcher.num_rows == 7
    engine = bench.engines[0]
    assert engine.closed and engine.workload is not None and engine.workload.num_rows == 5
    totals = [len(r.prompt_ids) + r.params.max_tokens for r in engine.requests]
    assert totals == sorted(totals, reverse=True)
    assert os.listdir(bench.job_dir) == ["done.json"]


def test_what_a_scored_row_lost_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Once for all of them, and beside the score of each."""
    rows = [
        {"prompt": [7] * 100, "continuation": [8] * 4},
        {"prompt": [7] * 61, "continuation": [8] * 4},
        {"prompt": [7] * 62, "continuation": [8] * 4},
        {"prompt": [7] * 100, "continuation": [320]},
    ]
    bench = Bench(tmp_path, tokenizer, rows)
    bench.engine_class = ScoringEngine
    bench.run()
    assert [row.get("num_cut") for row in bench.rows()] == [39, None, 1, None]
    assert "error" in bench.rows()[3]
    said = "2 of 4 rows are longer than the model's 64 positions, and are scored without their beg"
    assert sum(said in remark for remark in bench.watcher.remarks) == 1


def test_least_lengths_beyond_the_positions_are_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """They are lowered as max_tokens is, and an answer that is too short would not tell why."""
    rows: list[dict[str, Any]] = [
        {"prompt": [7] * 60, "max_tokens": 20, "min_tokens": 5},
        {"prompt": [7] * 60, "max_tokens": 20, "min_tokens": 4},
        {"prompt": [7] * 64, "max_tokens": 20, "min_tokens": 5},
    ]
    bench = Bench(tmp_path, tokenizer, rows)
    assert bench.run().num_failed == 1
    least = {request.index: request.params.min_tokens for request in bench.engines[0].requests}
    assert least == {0: 4, 1: 4}
    said = "min_tokens of 1 of 3 rows is more than the model's 64 positions leave"
    assert sum(said in remark for remark in bench.watcher.remarks) == 1


def test_a_finished_job_is_left_alone(bench: Bench) -> None:
    bench.run()
    before = bench.sink.read_bytes()
    report = bench.run()
    assert report.already_complete and (report.num_rows, report.num_failed) == (7, 2)
    assert bench.sink.read_bytes() == before and len(bench.engines) == 1
    with pytest.raises(JobError, match="max-tokens was 5, now 6") as other:
        bench.run(sampling=SamplingParams(max_tokens=6, seed=1))
    assert "added" not in other.value.advice
    with bench.source.open("a") as file:
        file.write('{"prompt": "more"}\n')
    with pytest.raises(JobError, match=r"the input was another, or .*/in\.jsonl has") as changed:
        bench.run()
    assert "Rows that were added go into a file" in changed.value.advice
    assert bench.sink.read_bytes() == before
    assert len(bench.rows()) == 7
    assert bench.run(restart=True).num_rows == 8
    assert len(bench.rows()) == 8
    bench.sink.write_text("edited")
    with pytest.raises(JobError, match="changed since"):
        bench.run()
    bench.sink.unlink()
    assert bench.run().num_rows == 8, "a removed output is wanted again"
    assert len(bench.rows()) == 8


def test_an_edit_that_keeps_the_size_is_seen(bench: Bench) -> None:
    bench.run()
    whole = bench.sink.read_bytes()
    bench.sink.write_bytes(whole.replace(b"seed", b"sead"))
    with pytest.raises(JobError, match="changed since"):
        bench.run()
    bench.sink.write_bytes(whole)
    assert bench.run().already_complete


def test_the_hash_of_an_output_that_was_continued(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="broke"):
        bench.run(engine={"fail_after": 3})
    bench.run()
    assert bench.run().already_complete


def test_a_finished_job_is_not_forgotten_for_another_output(bench: Bench, tmp_path: Path) -> None:
    bench.run()
    elsewhere = tmp_path / "elsewhere.jsonl"
    with open(tmp_path / "stream", "wb") as stream:
        for sink in (stream.fileno(), elsewhere):
            with pytest.raises(JobError, match=r"finished, and its rows are in .*out\.jsonl"):
                bench.run(sink=sink, job_dir=bench.job_dir)
    assert not elsewhere.exists() and bench.run().already_complete
    assert bench.run(sink=elsewhere, job_dir=bench.job_dir, restart=True).num_rows == 7


def test_a_finished_job_may_move(bench: Bench, tmp_path: Path) -> None:
    bench.run()
    (tmp_path / "moved").mkdir()
    for name in ("out.jsonl", "out.jsonl.freight"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert bench.run(sink=tmp_path / "moved" / "out.jsonl").already_complete


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("fail_after", range(6))
def test_an_engine_that_breaks_costs_nothing(
    bench: Bench, unordered: bool, fail_after: int
) -> None:
    if fail_after < 5:
        with pytest.raises(RuntimeError, match="the engine broke"):
            bench.run({"fail_after": fail_after, "block_size": 2}, unordered=unordered)
        assert bench.engines[0].closed and bench.watcher.ended
    report = bench.run({"block_size": 3}, unordered=unordered)
    assert report.num_resumed == (fail_after + 2 if fail_after < 5 else 0)
    answered = [row for row in bench.rows() if "error" not in row]
    assert sorted(map(str, (row["id"] for row in bench.rows()))) == sorted(
        ["a", "1", "2", "3", "40", "e", "6"]
    )
    assert len(answered) == 5
    assert sum(len(engine.requests) for engine in bench.engines) <= 5 + 2


def test_the_same_rows_as_in_one_go(bench: Bench, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "whole").mkdir()
    whole = Bench(tmp_path / "whole", tokenizer)
    whole.run()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            bench.run({"fail_after": 1})
    bench.run()
    assert bench.sink.read_bytes() == whole.sink.read_bytes()


def test_the_spool_is_used_again(bench: Bench) -> None:
    with pytest.raises(RuntimeError):
        bench.run({"fail_after": 1})
    stamp = (bench.job_dir / "spool" / "spool.json").stat().st_mtime_ns
    with pytest.raises(RuntimeError):
        bench.run({"fail_after": 1})
    assert (bench.job_dir / "spool" / "spool.json").stat().st_mtime_ns == stamp
    (bench.job_dir / "spool" / "spool.json").unlink()
    assert bench.run().num_resumed == 4


def test_other_work_is_refused(bench: Bench) -> None:
    with pytest.raises(RuntimeError):
        bench.run({"fail_after": 2})
    held = (bench.job_dir / "journal.jsonl").read_bytes()
    with pytest.raises(JobError, match=r"the weights was w, now v.*--restart"):
        bench.run(identity={"the weights": "v"})
    with pytest.raises(JobError, match="the order of the output was as the input"):
        bench.run(unordered=True)
    for other in ({"n": 2, "temperature": 1.0}, {"logit_bias": {3: 1.0}}, {"prompt_logprobs": 0}):
        sampling = SamplingParams(**{"max_tokens": 5, "seed": 1, **other})
        with pytest.raises(JobError, match=next(iter(other)).replace("_", "-") + " was"):
            bench.run(sampling=sampling)
    bench.source.write_text('{"prompt": "other"}\n')
    with pytest.raises(JobError, match="the input was"):
        bench.run()
    assert (bench.job_dir / "journal.jsonl").read_bytes() == held
    assert bench.run(restart=True).num_rows == 1 and len(bench.rows()) == 1


def test_a_job_without_rows_binds_nobody(bench: Bench) -> None:
    def refuse(workload: Workload) -> FakeEngine:
        raise BudgetError("It", "does not", "fit.")

    bench.engine_class = refuse
    with pytest.raises(BudgetError):
        bench.run()
    assert not bench.sink.exists()
    bench.engine_class = FakeEngine
    report = bench.run(sampling=SamplingParams(max_tokens=3))
    assert report.num_resumed == 0 and report.num_rows == 7


def test_somebody_elses_output_is_not_overwritten(bench: Bench) -> None:
    bench.sink.write_text("precious\n")
    with pytest.raises(JobError, match="exists already"):
        bench.run()
    assert bench.sink.read_text() == "precious\n" and not bench.job_dir.exists()
    bench.run(restart=True)
    assert len(bench.rows()) == 7


def test_two_runs_at_once_are_refused(bench: Bench) -> None:
    bench.job_dir.mkdir()
    descriptor = os.open(bench.job_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(JobError, match="Another run"):
        bench.run()
    os.close(descriptor)
    bench.run()


def test_two_jobs_on_one_output_are_refused(bench: Bench, tmp_path: Path) -> None:
    """Each with a job directory of its own, so that the lock of neither stops the other."""
    bench.sink.touch()
    with open(bench.sink) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JobError, match="Another run is writing it now"):
            bench.run(job_dir=tmp_path / "mine")
    bench.run(job_dir=tmp_path / "mine")


def test_an_output_that_another_job_has_written_meanwhile(bench: Bench, tmp_path: Path) -> None:
    def build(workload: Workload) -> FakeEngine:
        bench.sink.write_text("theirs\n")
        return FakeEngine(workload)

    bench.engine_class = build
    with pytest.raises(JobError, match="exists already"):
        bench.run(job_dir=tmp_path / "mine")
    assert bench.sink.read_text() == "theirs\n"


def test_a_stream_in_and_a_stream_out(bench: Bench, tmp_path: Path) -> None:
    text = bench.source.read_bytes()
    kept = tmp_path / "kept"

    def run(**changes: Any) -> tuple[JobReport | None, bytes]:
        with open(tmp_path / "stream", "w+b") as stream:
            report = None
            try:
                report = bench.run(
                    changes.pop("engine", None),
                    source=io.BytesIO(changes.pop("text", text)),
                    sink=stream.fileno(),
                    **changes,
                )
            except RuntimeError:
                pass
            return report, (tmp_path / "stream").read_bytes()

    report, whole = run()
    assert report is not None and whole.count(b"\n") == 7
    _, begun = run(engine={"fail_after": 3}, job_dir=kept)
    assert whole.startswith(begun)
    report, again = run(job_dir=kept)
    assert report is not None and report.num_resumed == 5 and again == whole
    report, once_more = run(job_dir=kept)
    assert report is not None and report.num_resumed == 7 and once_more == whole
    with pytest.raises(JobError, match="the input was"):
        run(job_dir=kept, text=text + b"{}\n")
    assert sorted(os.listdir(kept)) == ["journal.jsonl", "spool"]


def test_rows_flow_before_the_end(bench: Bench, tmp_path: Path) -> None:
    seen: list[int] = []

    class InOrder(FakeEngine):
        def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
            for request in sorted(requests, key=lambda request: request.index):
                seen.append(len(bench.rows()))
                yield answer(request)

    bench.engine_class = InOrder
    bench.run()
    assert seen == [0, 1, 3, 4, 6]


def test_only_errors_need_no_engine(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bench = Bench(tmp_path, tokenizer, [{"prompt": []}, "x"])
    report = bench.run()
    assert not bench.engines and (report.num_rows, report.num_failed) == (2, 2)
    assert len(bench.rows()) == 2


def test_an_engine_that_forgets_or_repeats_a_row_is_found_out(bench: Bench) -> None:
    class Forgetful(FakeEngine):
        def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
            yield from list(super().run(requests))[1:]

    class Stuttering(FakeEngine):
        def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
            completions = list(super().run(requests))
            yield from completions + completions

    for engine, message in ((Forgetful, "1 rows came to no"), (Stuttering, "finished twice")):
        bench.engine_class = engine
        with pytest.raises(RuntimeError, match=message):
            bench.run(restart=True)


def test_bad_paths(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        bench.run(source=tmp_path / "none")
    with pytest.raises(InputError, match="is a directory"):
        bench.run(source=tmp_path)
    with pytest.raises(InputError, match="is a directory"):
        bench.run(sink=tmp_path)
    with pytest.raises(InputError, match="no directory"):
        bench.run(sink=tmp_path / "none" / "out")
    with pytest.raises(InputError, match="as the input and as the output"):
        bench.run(sink=bench.source)
    with pytest.raises(InputError, match="device or a pipe"):
        bench.run(sink=Path("/dev/null"))
    bench.source.write_text("\n \n")
    with pytest.raises(InputError, match="no rows"):
        bench.run()
    assert not bench.job_dir.exists() and not bench.sink.exists()


def test_full_disk_under_the_output(bench: Bench) -> None:
    with (
        open("/dev/full", "wb") as full,
        pytest.raises(BudgetError, match=r"no room(.|\n)*kept with --job-dir"),
    ):
        bench.run(sink=full.fileno(), job_dir=bench.directory / "kept")
    with open(bench.directory / "stream", "wb") as stream:
        report = bench.run(sink=stream.fileno(), job_dir=bench.directory / "kept")
    assert report.num_resumed > 0
    assert (bench.directory / "stream").read_bytes().count(b"\n") == 7


@settings(deadline=None, max_examples=40)
@given(
    stops=st.lists(st.integers(0, 6), max_size=5),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=5, max_size=5),
    unordered=st.booleans(),
)
def test_each_row_once_after_any_stops_and_torn_files(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    stops: list[int],
    cuts: list[tuple[int, int]],
    unordered: bool,
) -> None:
    """A power cut may tear the tails of journal and output; both mend."""
    bench = Bench(tmp_path_factory.mktemp("job"), tokenizer)
    for stop, (journal_cut, output_cut) in zip(stops, cuts, strict=False):
        try:
            bench.run({"fail_after": stop, "block_size": 2}, unordered=unordered)
            break
        except RuntimeError:
            journal = bench.job_dir / "journal.jsonl"
            header = journal.read_bytes().index(b"\n") + 1
            os.truncate(journal, max(header, journal.stat().st_size - journal_cut))
            os.truncate(bench.sink, max(0, bench.sink.stat().st_size - output_cut))
            if journal.read_bytes().count(b"\n") == 1:
                bench.sink.write_bytes(b"")
    bench.run(unordered=unordered)
    ids = [row["id"] for row in bench.rows()]
    assert sorted(map(str, ids)) == sorted(["a", "1", "2", "3", "40", "e", "6"])
    assert unordered or ids == ["a", 1, 2, 3, 40, "e", 6]


def test_model_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1_000_000))
    before = model_identity(tmp_path)
    assert model_identity(tmp_path) == before
    weights.write_bytes(bytes(500_001) + b"x" + bytes(499_998))
    changed = model_identity(tmp_path)
    assert {name for name in before if before[name] != changed[name]} == {"the weights"}
    assert model_identity(tmp_path, dummy_seed=4)["the weights"] == "random with seed 4"
    (tmp_path / "config.json").write_text("{ }")
    assert (
        model_identity(tmp_path)["the model's configuration"] != before["the model's configuration"]
    )


def test_an_output_that_was_removed_is_written_again(bench: Bench) -> None:
    class Removes(FakeEngine):
        def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
            yield from super().run(requests)
            bench.sink.unlink()

    bench.engine_class = Removes
    with pytest.raises(JobError, match="It was removed while it was being written"):
        bench.run()
    bench.engine_class = FakeEngine
    assert bench.run().num_resumed == 7 and len(bench.rows()) == 7
