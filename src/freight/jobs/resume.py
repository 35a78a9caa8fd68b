"""Finds what an earlier run of the same job left, and refuses to mix it with other work.

Knows the job directory, the spool and fingerprints; no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from freight.errors import InputError, JobError
from freight.jobs.directory import DoneRecord, JobDirectory
from freight.jobs.formats import RowLimits
from freight.jobs.identity import job_fingerprint
from freight.jobs.journal import (
    Fingerprint,
    Journal,
    compare_fingerprints,
    read_fingerprint,
)
from freight.jobs.lines import hash_stream, open_input
from freight.jobs.spec import JobReport, JobSpec, Observer
from freight.jobs.spool import Spool, open_spool
from freight.jobs.spool_writer import write_spool
from freight.runtime.tokenizer import Tokenizer

__all__ = ["Resumption"]

_SPOOL_VERSION: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """One run's view of what lies in its job directory."""

    spec: JobSpec
    directory: JobDirectory
    tokenizer: Tokenizer | None
    limits: RowLimits
    identity: Mapping[str, str]

    def find_finished(self) -> JobReport | None:
        """The report of a job that is complete already; ``None`` if there is work to do."""
        done = self.directory.read_done()
        if done is None:
            return None
        sink = self.spec.sink
        if isinstance(sink, int) or not sink.exists():
            self._refuse_elsewhere(done)
            self.directory.clear()  # its output was removed: the rows are wanted again
            return None
        self._compare(done.fingerprint, self._hash_input())
        if not _is_unchanged(sink, done):
            raise JobError(
                f"The output {sink} was to be completed.",
                "It was complete, and has been changed since.",
                "Give --restart to compute it again, or choose another output.",
            )
        self.directory.drop_work()  # in case the run that finished was killed before it could
        return JobReport(
            num_rows=done.num_rows,
            num_failed=done.num_failed,
            num_resumed=done.num_rows,
            already_complete=True,
        )

    def _refuse_elsewhere(self, done: DoneRecord) -> None:
        """A job whose output stands somewhere else is finished: its record is worth keeping."""
        output = Path(done.output_path)
        if not done.output_path or not _is_unchanged(output, done):
            return
        raise JobError(
            f"The job in {self.directory.path} was to be run.",
            f"It is finished, and its rows are in {output}.",
            "Read them there, or choose another --job-dir; --restart computes them again.",
        )

    def refuse_foreign_output(self) -> None:
        """An output with content that no journal stands behind is somebody's work."""
        sink = self.spec.sink
        if isinstance(sink, int) or self.spec.restart or not sink.exists():
            return
        if sink.stat().st_size > 0 and read_fingerprint(self.directory.journal_path) is None:
            raise JobError(
                f"The output {sink} was to be written.",
                "It exists already, and no job that could be continued stands behind it.",
                "Give --restart to overwrite it, or choose another output.",
            )

    def open_spool(self, observer: Observer) -> Spool:
        """The spool of an earlier run if it was made of the same input, else a new one."""
        recorded = read_fingerprint(self.directory.journal_path)
        spool_path = self.directory.spool_path
        if isinstance(self.spec.source, Path) and spool_path.exists():
            input_hash = self._hash_input()
            if recorded is not None:
                self._compare(recorded, input_hash)
            key = self._spool_key(input_hash)
            found = open_spool(
                spool_path, key=key, defaults=self.spec.sampling, input_hash=input_hash
            )
            if found is not None:
                return found
        return self._write_spool(observer)

    def open_journal(self, spool: Spool) -> Journal:
        """The journal of an earlier run of the same job, else a new one."""
        path = self.directory.journal_path
        fingerprint = self._fingerprint(spool.input_hash)
        recorded = read_fingerprint(path)
        if recorded is None:
            path.unlink(missing_ok=True)  # without a row in it, its fingerprint binds nobody
        else:
            self._compare(recorded, spool.input_hash)
        return Journal(path, fingerprint=fingerprint, num_rows=spool.num_rows)

    def _write_spool(self, observer: Observer) -> Spool:
        with self._open_source() as (name, file):
            spool = write_spool(
                file,
                self.directory.empty_spool(),
                name=name,
                key=self._spool_key,
                tokenizer=self.tokenizer,
                limits=self.limits,
                defaults=self.spec.sampling,
                on_rows=observer.on_reading,
                on_remark=observer.on_remark,
            )
        if spool.num_rows == 0:
            spool.close()
            raise InputError(
                f"The input {name} was read.",
                "It has no rows.",
                'Give it one JSON object per line, like {"prompt": "..."}.',
            )
        return spool

    @contextmanager
    def _open_source(self) -> Iterator[tuple[str, BinaryIO]]:
        """The input's name for messages and the input itself; a stream stays open afterwards."""
        source = self.spec.source
        if isinstance(source, Path):
            with open_input(source) as file:
                yield source.name, file
        else:
            yield "standard input", source

    def _hash_input(self) -> str:
        with self._open_source() as (_, file):
            return hash_stream(file)

    def _fingerprint(self, input_hash: str) -> Fingerprint:
        return job_fingerprint(
            self.identity,
            input_hash=input_hash,
            sampling=self.spec.sampling,
            unordered=self.spec.unordered,
        )

    def _compare(self, recorded: Fingerprint, input_hash: str) -> None:
        source = self.spec.source
        compare_fingerprints(
            recorded,
            self._fingerprint(input_hash),
            where=self.directory.path,
            source=str(source) if isinstance(source, Path) else "standard input",
        )

    def _spool_key(self, input_hash: str) -> str:
        parts = (_SPOOL_VERSION, asdict(self.limits), dict(self._fingerprint(input_hash)))
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _is_unchanged(output: Path, done: DoneRecord) -> bool:
    """Whether a file is the output that a finished job left; its size is told first."""
    if not output.is_file() or output.stat().st_size != done.output_bytes:
        return False
    if not done.output_hash:
        return True
    with open_input(output) as file:
        return hash_stream(file) == done.output_hash
