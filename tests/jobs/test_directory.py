"""A job's directory: what it removes is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from freight.errors import JobError
from freight.jobs.directory import DoneRecord, JobDirectory
from freight.jobs.journal import Journal

RECORD = DoneRecord(fingerprint={"a": "b"}, num_rows=1, num_failed=0, output_bytes=1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("spool/mine.txt", "precious"),
        ("spool", "a file"),
        ("journal.jsonl", '{"my": "data"}\n'),
        ("done.json", '{"my": "data"}\n'),
        ("done.json/mine.txt", "precious"),
    ],
)
def test_what_is_not_of_a_job_is_refused_and_stays(name: str, content: str, tmp_path: Path) -> None:
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text(content)
    with pytest.raises(JobError, match=f"{name.split('/')[0]} in it is not of a job"):
        JobDirectory(tmp_path)
    assert own.read_text() == content
    with pytest.raises(JobError):  # the lock was given back
        JobDirectory(tmp_path)


def test_what_lies_beside_a_job_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with JobDirectory(tmp_path) as directory:
        directory.empty_spool()
        directory.finish(RECORD)
    with JobDirectory(tmp_path) as directory:
        assert directory.read_done() == RECORD
        directory.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_a_killed_job_left_is_taken_up(tmp_path: Path) -> None:
    """At any moment: a spool without a journal, files that were being written, a torn journal."""
    for name in ("spool/tokens.bin", "spool/spool.json.new", "journal.jsonl.new", "done.json.new"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("half")
    with JobDirectory(tmp_path) as directory:
        directory.empty_spool()
        Journal(directory.journal_path, fingerprint={"a": "b"}, num_rows=2).close()
    with JobDirectory(tmp_path):
        pass
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:7])
    with JobDirectory(tmp_path) as directory:
        directory.clear()
    journal.touch()
    with JobDirectory(tmp_path):
        pass
