"""The values that a job is made of: what is asked, who answers, who watches, what came of it.

Plain values and two protocols; nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from freight.jobs.readings import Form
from freight.runtime.request import Completion, Request, SamplingParams

__all__ = ["Engine", "JobReport", "JobSpec", "Observer"]


class Engine(Protocol):
    """What answers the rows."""

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        """Answer each request once, in any order, taking them as there is room."""
        ...

    def status(self) -> str:
        """What each tier holds, in a few words. May be called from another thread."""
        ...

    def summary(self) -> str:
        """What the run moved and reached, for people; called after ``run``, before ``close``."""
        ...

    def close(self) -> None:
        """Give everything back; also called when ``run`` was not exhausted."""
        ...


class Observer(Protocol):
    """Who watches a job, for instance a progress bar."""

    def on_reading(self, num_rows: int) -> None:
        """So many rows of the input have been tokenised."""
        ...

    def on_remark(self, text: str) -> None:
        """Something about the input that people should know."""
        ...

    def on_start(self, *, num_rows: int, num_done: int, status: Callable[[], str]) -> None:
        """Rows begin to finish; ``num_done`` were finished by earlier runs."""
        ...

    def on_row(self, *, num_new_tokens: int) -> None:
        """One more row is finished and recorded, with an answer or an error."""
        ...

    def on_end(self) -> None:
        """No more rows come, for whatever reason; ``status`` must not be called any more."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One job. ``sink`` as an open descriptor is a stream, such as standard output.

    ``job_dir`` ``None`` means OUTPUT.freight beside a file, a temporary directory for a stream.
    ``sampling.seed`` is the job's seed, of which each row's own is derived. ``form`` is how
    embeddings are given, where the model makes them.
    """

    source: Path | BinaryIO
    sink: Path | int
    sampling: SamplingParams
    form: Form = field(default_factory=Form)
    job_dir: Path | None = None
    unordered: bool = False
    restart: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """What a run did. Tokens are those of this run; rows are those of the whole job."""

    num_rows: int
    num_failed: int
    num_resumed: int
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    elapsed_s: float = 0.0
    engine_summary: str = ""
    already_complete: bool = False
