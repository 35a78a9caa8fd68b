"""What a job tells people while it runs, all of it on standard error.

Knows counts and a status text; no rows, no engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from freight.jobs.spec import JobReport

__all__ = ["Progress", "format_report"]

_REFRESH_S = 1.0
_LINE_S = 60.0
_READING_S = 10.0
"""Between lines while a dataset is read: nothing else happens then."""


class Progress:
    """A progress bar on a terminal, elsewhere, as in a log, a line from time to time.

    A thread keeps them fresh: with offloading, minutes can pass between two rows.
    """

    def __init__(self, file: TextIO, *, is_quiet: bool, line_every_s: float = _LINE_S) -> None:
        self._line_every_s = line_every_s
        self._file = file
        self._is_quiet = is_quiet
        self._bar: Any = None
        self._status: Callable[[], str] = str
        self._started_s = 0.0
        self._told_s = time.monotonic()
        self._num_new_tokens = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_rows: int | None = None  # not known before the engine is ready
        self.num_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.on_end()

    def say(self, text: str) -> None:
        """A line for people, unless they asked for quiet."""
        if not self._is_quiet:
            print(f"freight: {text}", file=self._file, flush=True)

    def on_reading(self, num_rows: int) -> None:
        if self._bar is None:
            self._bar = self._make_bar(desc="reading", unit=" rows")
        if self._bar is not None:
            self._bar.update(num_rows - self._bar.n)
        elif time.monotonic() - self._told_s >= min(_READING_S, self._line_every_s):
            self._told_s = time.monotonic()
            self.say(f"{num_rows} rows read")

    def on_remark(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self.say(text)

    def on_start(self, *, num_rows: int, num_done: int, status: Callable[[], str]) -> None:
        self.on_end()
        self.num_rows, self.num_done = num_rows, num_done
        if num_done:
            self.say(f"going on: {num_done} of {num_rows} rows are done")
        self._status = status
        self._started_s = time.monotonic()
        self._bar = self._make_bar(total=num_rows, initial=num_done, unit="row")
        if not self._is_quiet:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._keep_fresh, daemon=True)
            self._thread.start()

    def on_row(self, *, num_new_tokens: int) -> None:
        self.num_done += 1
        self._num_new_tokens += num_new_tokens
        if self._bar is not None:
            self._bar.update(1)

    def on_end(self) -> None:
        """Take the bar down. The thread ends first: it asks the engine, which is about to close."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _make_bar(self, **settings: Any) -> Any:
        if self._is_quiet or not self._file.isatty():
            return None
        from tqdm import tqdm

        return tqdm(file=self._file, dynamic_ncols=True, leave=False, **settings)

    def _keep_fresh(self) -> None:
        while not self._stopped.wait(self._line_every_s if self._bar is None else _REFRESH_S):
            rate = self._num_new_tokens / (time.monotonic() - self._started_s)
            made = f"{rate:.1f} token/s, " if self._num_new_tokens else ""
            state = f"{made}{self._status()}"
            if self._bar is not None:
                self._bar.set_postfix_str(state)
            else:
                self.say(f"{self.num_done} of {self.num_rows} rows done, {state}")


def format_report(report: JobReport) -> list[str]:
    """The closing lines of a job."""
    num_answered = report.num_rows - report.num_failed
    rows = f"{report.num_rows} rows: {num_answered} answered, {report.num_failed} with an error"
    if report.already_complete:
        return [f"already complete, nothing to do; {rows}"]
    if report.num_resumed:
        rows += f"; {report.num_resumed} of them by earlier runs"
    elapsed_s = max(report.elapsed_s, 1e-9)
    if report.num_new_tokens:
        tokens = (
            f"{report.num_prompt_tokens} prompt and {report.num_new_tokens} generated tokens in "
            f"{report.elapsed_s:.1f} s, {report.num_new_tokens / elapsed_s:.1f} generated token/s"
        )
    else:
        tokens = (
            f"{report.num_prompt_tokens} prompt tokens in {report.elapsed_s:.1f} s, "
            f"{report.num_prompt_tokens / elapsed_s:.1f} prompt token/s"
        )
    return [rows, tokens, *report.engine_summary.splitlines()]
