"""A run as a picture: when each lane was busy with what, for chrome://tracing or Perfetto.

Times are those of the host. On a CUDA stream they are when work was issued, not when it ran.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from freight.errors import InputError
from freight.plan.operation import Lane, Operation

__all__ = ["Trace"]


class Trace:
    """Collects operations from all lanes; ``close`` ends the file."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"--trace {path} was given.",
                f"It cannot be written: {error.strerror}.",
                "Name a file in a directory that can be written.",
            ) from error
        self._file.write("[\n")
        for number, lane in enumerate(Lane):
            self._write({"name": "thread_name", "ph": "M", "args": {"name": lane.value}}, number)

    def record(self, operation: Operation, started_s: float, ended_s: float) -> None:
        """One operation, done between these times (``time.perf_counter``)."""
        batch = None if operation.batch is None else operation.batch.index
        event = {
            "name": operation.kind.value,
            "ph": "X",
            "ts": started_s * 1e6,
            "dur": (ended_s - started_s) * 1e6,
            "args": {
                "sweep": operation.sweep,
                "unit": operation.unit,
                "micro-batch": batch,
                "bytes": operation.num_bytes,
            },
        }
        self._write(event, list(Lane).index(operation.lane))

    def _write(self, event: dict[str, Any], lane: int) -> None:
        line = json.dumps({"pid": 1, "tid": lane, **event})
        with self._lock:
            self._file.write(line + ",\n")

    def close(self) -> None:
        self._file.write("{}]\n")
        self._file.close()
