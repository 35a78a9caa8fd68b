"""Runs a dataset through an engine and loses no row, whenever it is stopped.

Rows are tokenised into a spool, answered longest first, recorded in a journal, and copied to the
output. Knows no model and no device: the engine is anything that turns requests into completions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from freight.errors import JobError
from freight.jobs.batch_rows import batch_error_row, batch_reading_row, batch_row
from freight.jobs.directory import DoneRecord, JobDirectory
from freight.jobs.formats import RowLimits, completion_row, error_row, reading_row, score_row
from freight.jobs.journal import Journal
from freight.jobs.output import Output
from freight.jobs.paths import check_paths, job_directory_of
from freight.jobs.readings import Reading
from freight.jobs.resume import Resumption
from freight.jobs.spec import Engine, JobReport, JobSpec, Observer
from freight.jobs.spool import Indices, Spool
from freight.plan.workload import Workload
from freight.runtime.failures import no_numbers, refuse_where_all_fail
from freight.runtime.request import Completion, Request
from freight.runtime.tokenizer import Tokenizer

__all__ = ["Engine", "JobReport", "JobSpec", "Observer", "run_job"]


def run_job(
    spec: JobSpec,
    *,
    tokenizer: Tokenizer | None,
    limits: RowLimits,
    identity: Mapping[str, str],
    build_engine: Callable[[Workload], Engine],
    observer: Observer,
) -> JobReport:
    """Answer every row of ``spec.source`` once, going on where an earlier run was stopped.

    Without a tokenizer, rows of token ids are answered and rows of text become errors.
    ``identity`` says whose answers they are: ``model_identity`` and what else changes tokens. The
    engine is built only if a row is still to be answered. Raises ``FreightError``; whatever is
    raised, finished rows are kept.
    """
    check_paths(spec.source, spec.sink)
    with JobDirectory(job_directory_of(spec.sink, spec.job_dir)) as directory:
        if spec.restart:
            directory.clear()
        resumption = Resumption(
            spec=spec, directory=directory, tokenizer=tokenizer, limits=limits, identity=identity
        )
        finished = resumption.find_finished()
        if finished is not None:
            return finished
        resumption.refuse_foreign_output()
        with (
            closing(resumption.open_spool(observer)) as spool,
            closing(resumption.open_journal(spool)) as journal,
        ):
            order = spool.order()
            pending = order[~journal.done[order]]
            _remark_failed(spool, observer)
            engine = build_engine(spool.workload(pending)) if len(pending) else _Idle()
            # The output is touched only now: a job whose engine is refused leaves none behind.
            with closing(engine), closing(_open_output(spec, resumption, journal)) as output:
                write = _writer(spool, limits.reading)
                report = _answer(engine, pending, spool, journal, output, observer, write)
                output.sync()
                journal.sync()
            if isinstance(spec.sink, Path):
                directory.finish(_done_record(report, journal, output, spec.sink))
        return report


def _open_output(spec: JobSpec, resumption: Resumption, journal: Journal) -> Output:
    resumption.refuse_foreign_output()  # written by another job while this one was made ready
    return Output(spec.sink, journal=journal, unordered=spec.unordered)


def _done_record(report: JobReport, journal: Journal, output: Output, sink: Path) -> DoneRecord:
    if not sink.exists():
        raise JobError(
            f"The output {sink} was complete.",
            "It was removed while it was being written.",
            "Run the same command again: all rows are kept, and it is written anew.",
        )
    return DoneRecord(
        fingerprint=journal.fingerprint,
        num_rows=report.num_rows,
        num_failed=report.num_failed,
        output_bytes=sink.stat().st_size,
        output_hash=output.digest,
        output_path=str(sink.resolve()),
    )


class _Idle:
    """The engine of a job in which no row is left to answer."""

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        return iter(())

    def status(self) -> str:
        return ""

    def summary(self) -> str:
        return ""

    def close(self) -> None:
        pass


def _answer(
    engine: Engine,
    pending: Indices,
    spool: Spool,
    journal: Journal,
    output: Output,
    observer: Observer,
    write: Callable[[Completion], bytes],
) -> JobReport:
    """Answer the rows that the journal does not hold yet."""
    num_resumed, tally, started_s = journal.num_done, _Tally(), time.monotonic()
    observer.on_start(num_rows=spool.num_rows, num_done=num_resumed, status=engine.status)
    try:
        _record_failed(spool, journal, output, observer)
        requests = (spool.request(int(index)) for index in pending)
        has_answers = journal.num_done > journal.num_failed
        for completion in refuse_where_all_fail(engine.run(requests), has_answers=has_answers):
            failed = completion.has_failed
            journal.append(completion.index, write(completion), failed=failed)
            output.emit()
            tally.add(completion)
            observer.on_row(num_new_tokens=completion.num_new_tokens)
    finally:
        observer.on_end()
    if journal.num_done != spool.num_rows:
        raise RuntimeError(f"{spool.num_rows - journal.num_done} rows came to no answer")
    return JobReport(
        num_rows=spool.num_rows,
        num_failed=journal.num_failed,
        num_resumed=num_resumed,
        num_prompt_tokens=tally.num_prompt_tokens,
        num_new_tokens=tally.num_new_tokens,
        elapsed_s=time.monotonic() - started_s,
        engine_summary=engine.summary(),
    )


def _writer(spool: Spool, reading: Reading | None) -> Callable[[Completion], bytes]:
    """What makes output rows of answers."""
    written = partial(_answer_row, spool) if reading is None else partial(_read_row, spool, reading)

    def write(completion: Completion) -> bytes:
        if completion.has_failed:
            error = str(no_numbers("The row was computed."))
            return _error_row(spool, completion.index, error, code="server_error")
        return written(completion)

    return write


def _answer_row(spool: Spool, completion: Completion) -> bytes:
    row_id, batch = spool.row_id(completion.index), spool.batch(completion.index)
    if batch is not None:
        return batch_row(str(row_id), batch, completion)
    if spool.has_continuation(completion.index):
        return score_row(row_id, completion, num_cut=spool.num_cut(completion.index))
    return completion_row(row_id, completion)


def _read_row(spool: Spool, reading: Reading, completion: Completion) -> bytes:
    row_id, batch = spool.row_id(completion.index), spool.batch(completion.index)
    form = spool.form(completion.index) or reading.form
    if batch is not None:
        return batch_reading_row(str(row_id), batch, completion, reading, form)
    return reading_row(row_id, completion, reading, form)


def _error_row(spool: Spool, index: int, error: str, code: str = "invalid_request") -> bytes:
    if spool.batch(index) is not None:
        return batch_error_row(index, spool.own_id(index), error, code=code)
    return error_row(spool.row_id(index), error)


@dataclass(kw_only=True, slots=True)
class _Tally:
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0

    def add(self, completion: Completion) -> None:
        self.num_prompt_tokens += completion.num_prompt_tokens
        self.num_new_tokens += completion.num_new_tokens


def _remark_failed(spool: Spool, observer: Observer) -> None:
    """Said before the engine takes its time: a file of another format has no row that is usable."""
    failed = spool.failed()
    if len(failed):
        error = spool.row_error(int(failed[0]))
        observer.on_remark(
            f"{len(failed)} of {spool.num_rows} rows cannot be used, and become errors. {error}"
        )


def _record_failed(spool: Spool, journal: Journal, output: Output, observer: Observer) -> None:
    """Rows with an error come to an end without the engine.

    Called after it was built: a journal without rows binds nobody, so a job whose engine could
    not be built can be tried again with other parameters.
    """
    for index in map(int, spool.failed()):
        error = spool.row_error(index)
        if error is not None and not journal.is_done(index):
            journal.append(index, _error_row(spool, index, error), failed=True)
            observer.on_row(num_new_tokens=0)
    output.emit()
