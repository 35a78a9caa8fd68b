"""A run as a picture: when each lane was busy with what, beside what was predicted. For Perfetto or
chrome://tracing.

Times are from when the first operation that is told of began. What is written is not kept: memory
is planned without it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

from freight.errors import BudgetError, InputError
from freight.plan.operation import Lane, Operation
from freight.plan.simulate import Step

__all__ = ["Trace", "open_trace"]

_PREDICTED: Final = 1
_MEASURED: Final = 2
_BEGINNING: Final = b"[\n"
_FIRST_EVENT: Final = b'{"pid": '


def open_trace(path: Path) -> TextIO:
    """The file of a trace, begun. InputError where it cannot be written, or is there and is none:
    a slip would overwrite a dataset or a model."""
    if str(path) == "-":
        raise InputError(
            "--trace - was given.",
            "A trace is written to a file.",
            "Name one.",
        )
    try:
        if path.is_file():
            with path.open("rb") as existing:
                begun = existing.read(len(_BEGINNING + _FIRST_EVENT))
            if begun not in (b"", _BEGINNING, _BEGINNING + b"{}]\n", _BEGINNING + _FIRST_EVENT):
                raise InputError(
                    f"--trace {path} was given.",
                    "There is such a file, and it is no trace.",
                    "Name another one, or remove it first.",
                )
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--trace {path} was given.",
            f"It cannot be written: {error.strerror}.",
            "Name a file in a directory that can be written.",
        ) from error
    with _writing(path):
        file.write(_BEGINNING.decode())
    return file


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BudgetError(
            f"The trace {path} was being written.",
            f"The system refused: {error.strerror}.",
            "Name a file where there is room, or leave --trace out; rows that are done are kept.",
        ) from error


class Trace:
    """Collects operations from all lanes; ``close`` ends the file."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._path, self._file = path, open_trace(path)
        self._first_s: float | None = None
        self._lanes = {lane: number for number, lane in enumerate(Lane)}

    def predict(self, steps: Iterable[Step]) -> None:
        """What is expected, to be shown beside what is measured, from the same beginning."""
        with self._lock:
            self._name_lanes(_PREDICTED, "predicted")
            for step in steps:
                self._write_span(_PREDICTED, step.operation, step.start_s, step.end_s)

    def record(self, operation: Operation, started_s: float, ended_s: float) -> None:
        """One operation, done between these times (``time.perf_counter``)."""
        with self._lock:
            if self._first_s is None:
                self._first_s = started_s
                self._name_lanes(_MEASURED, "measured")
            first_s = self._first_s
            self._write_span(_MEASURED, operation, started_s - first_s, ended_s - first_s)

    def close(self) -> None:
        with self._lock:
            with _writing(self._path):
                self._file.write("{}]\n")
                self._file.close()

    def _name_lanes(self, process: int, name: str) -> None:
        self._write({"name": "process_name", "ph": "M", "args": {"name": name}}, process, 0)
        for lane, number in self._lanes.items():
            event = {"name": "thread_name", "ph": "M", "args": {"name": lane.value}}
            self._write(event, process, number)

    def _write_span(
        self, process: int, operation: Operation, started_s: float, ended_s: float
    ) -> None:
        event = {
            "name": operation.kind.value,
            "ph": "X",
            "ts": started_s * 1e6,
            "dur": (ended_s - started_s) * 1e6,
            "args": {
                "sweep": operation.sweep,
                "unit": operation.unit,
                "micro-batch": None if operation.batch is None else operation.batch.index,
                "bytes": operation.num_bytes,
            },
        }
        self._write(event, process, self._lanes[operation.lane])

    def _write(self, event: dict[str, Any], process: int, lane: int) -> None:
        with _writing(self._path):
            self._file.write(json.dumps({"pid": process, "tid": lane, **event}) + ",\n")
