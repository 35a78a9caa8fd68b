"""Replicas share out rows: each is answered once, as by one process; a failure shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from freight.distributed.ranks import Ranks
from freight.distributed.replicas import ReplicaEngine
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, Request, SamplingParams

from ..runtime import tiny
from .commands import SMALL, job, lose_a_rank
from .forks import Forks
from .pipeline.stages import on_ranks

STEPS = 6
PROMPTS = tiny.prompts(23, 20)
WORK = tiny.workload(PROMPTS, STEPS)
OPTIONS = EngineOptions(device="cpu", dtype="float32", micro_batch_size=2, num_micro_batches=1)


def requests() -> Iterator[Request]:
    params = SamplingParams(max_tokens=STEPS, temperature=0.8, seed=3)
    return (replace(own, index=i) for i, own in enumerate(tiny.requests(PROMPTS, params)))


def test_each_row_is_answered_once_and_alike(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    alone = build_engine(tmp_path, options=OPTIONS, workload=WORK)
    wanted = sorted(alone.run(requests()), key=lambda one: one.index)
    alone.close()
    shares: list[int] = []

    def work(ranks: Ranks) -> list[Completion]:
        own = build_engine(tmp_path, options=OPTIONS, workload=WORK)
        seen: set[int] = set()
        engine = ReplicaEngine(own, ranks)
        run = own.run

        def counted(rows: Iterator[Request]) -> Iterator[Completion]:
            for completion in run(rows):
                seen.add(completion.index)
                yield completion

        own.run = counted  # type: ignore[method-assign]
        done = list(engine.run(requests() if ranks.rank == 0 else iter(())))
        shares.append(len(seen))
        engine.close()
        return done

    first, *others = on_ranks(3, work)
    assert isinstance(first, list) and others == [[], []]
    assert sorted(first, key=lambda one: one.index) == wanted
    assert sum(shares) == len(PROMPTS) and min(shares) > 0


def test_what_breaks_the_first_rank_is_raised(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)

    def broken() -> Iterator[Request]:
        yield from list(requests())[:3]
        raise OSError("the spool is gone")

    def work(ranks: Ranks) -> None:
        own = build_engine(tmp_path, options=OPTIONS, workload=WORK)
        list(ReplicaEngine(own, ranks).run(broken() if ranks.rank == 0 else iter(())))

    with pytest.raises(OSError, match="the spool is gone"):
        on_ranks(2, work)


def test_ranks_write_the_output_of_one(
    rows: Path, alone: bytes, forks: Forks, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    status, told = forks.finish(2, job(rows, output, "--split", "rows"))
    assert status == 0, told
    assert "replica 2 of 2" in told and output.read_bytes() == alone


def test_rows_that_cannot_be_used_tell_in_the_status(forks: Forks, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text('{"prompt": "Name: Ann", "max_tokens": 2}\n{"prompt": ""}\n')
    for flags, wanted in (["--fail-on-error"], 1), ([], 0):  # torchrun says 1 for any other
        status, told = forks.finish(2, job(rows, output, "--split", "rows", *flags))
        assert status == wanted and "2 rows: 1 answered, 1 with an error" in told, told
        assert len(output.read_text().splitlines()) == 2


def test_a_lost_rank_ends_the_run_and_another_number_goes_on(
    rows: Path, alone: bytes, forks: Forks, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    command = job(rows, output, "--split", "rows", *SMALL)
    assert "It ran replica 2 of 2" in lose_a_rank(forks, 2, command, output)
    status, told = forks.finish(3, command)
    assert status == 0, told
    assert "going on: " in told and output.read_bytes() == alone
