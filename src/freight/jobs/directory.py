"""The directory beside an output in which a job keeps what it needs to go on.

Holds ``journal.jsonl`` and ``spool/`` while the job runs and ``done.json`` after it. Locked while
open, so that two runs cannot write the same rows. Removes only what it made itself. Knows paths,
not contents.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from freight.errors import JobError
from freight.jobs.durable import disk_errors, sync_directory, write_atomically
from freight.jobs.journal import Fingerprint
from freight.jobs.spool import SPOOL_FILES

__all__ = ["DoneRecord", "JobDirectory"]

_JOURNAL: Final = b'{"freight_journal"'
_DONE: Final = b'{"fingerprint"'


@dataclass(frozen=True, kw_only=True, slots=True)
class DoneRecord:
    """What stays of a finished job: whose rows they were, how many, where and what the output is.

    Records of earlier versions have neither the output's hash nor its path.
    """

    fingerprint: Fingerprint
    num_rows: int
    num_failed: int
    output_bytes: int
    output_hash: str = ""
    output_path: str = ""


class JobDirectory:
    """A locked job directory; ``None`` as path makes a temporary one that vanishes on exit."""

    def __init__(self, path: Path | None) -> None:
        self.is_temporary = path is None
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="freight-"))
        self.path = path
        self.journal_path = path / "journal.jsonl"
        self.spool_path = path / "spool"
        self._done_path = path / "done.json"
        self._descriptor = _make_and_lock(path)
        if foreign := self._foreign():
            os.close(self._descriptor)
            raise JobError(
                f"{path} was to keep what the job needs to go on.",
                f"{', '.join(foreign)} in it is not of a job, and would be removed.",
                "Move it away, or choose another place: --job-dir, or another output.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        elif not self.journal_path.exists() and not self._done_path.exists():
            self.clear()  # nothing to go on from: leave no litter
            try:
                self.path.rmdir()
            except OSError:
                pass  # the user keeps other things in it
        os.close(self._descriptor)

    def _foreign(self) -> list[str]:
        """What bears a name of ours there, and is not: users may keep other things beside."""
        found = []
        if not _begins(self.journal_path, _JOURNAL):
            found.append(self.journal_path.name)
        if not _begins(self._done_path, _DONE):
            found.append(self._done_path.name)
        try:
            kept = [*self.spool_path.iterdir()]
        except FileNotFoundError:
            kept = []
        except NotADirectoryError:
            kept = [self.spool_path]
        if any(own.name.removesuffix(".new") not in SPOOL_FILES for own in kept):
            found.append(self.spool_path.name)
        return found

    def clear(self) -> None:
        """Throw away all that an earlier run left."""
        with disk_errors(self.path):
            self.journal_path.unlink(missing_ok=True)
            self._done_path.unlink(missing_ok=True)
            if self.spool_path.exists():
                shutil.rmtree(self.spool_path)
            sync_directory(self.path)

    def empty_spool(self) -> Path:
        """An empty directory for a new spool."""
        with disk_errors(self.spool_path):
            if self.spool_path.exists():
                shutil.rmtree(self.spool_path)
            self.spool_path.mkdir()
        return self.spool_path

    def read_done(self) -> DoneRecord | None:
        """The record of the job that was finished here, if one was."""
        try:
            return DoneRecord(**json.loads(self._done_path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise JobError(
                f"The record {self._done_path} was opened.",
                "It is damaged, so nobody can tell what was finished.",
                "Give --restart to compute the job again, or choose another output.",
            ) from error

    def finish(self, record: DoneRecord) -> None:
        """Keep the record alone. Once it is durable, journal and spool are only in the way."""
        write_atomically(self._done_path, json.dumps(asdict(record)).encode() + b"\n")
        self.drop_work()

    def drop_work(self) -> None:
        """Remove the journal and the spool of a job that is finished."""
        self.journal_path.unlink(missing_ok=True)
        shutil.rmtree(self.spool_path, ignore_errors=True)


def _begins(path: Path, beginning: bytes) -> bool:
    """Whether the file begins so, as far as it goes: it may be damaged. Also if there is none."""
    try:
        with open(path, "rb") as file:
            return beginning.startswith(file.read(len(beginning)))
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        return False


def _make_and_lock(path: Path) -> int:
    while True:
        with disk_errors(path):
            path.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise JobError(
                f"The job in {path} was to be run.",
                "Another run is at it now.",
                "Wait for that run, or stop it; the rows that it has finished are kept.",
            ) from error
        if _is_still(path, descriptor):
            return descriptor
        os.close(descriptor)  # the run before us removed it between our two calls


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
