"""Where a job reads, writes and keeps its state; refuses paths that cannot work before any work.

Knows no contents.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from freight.errors import InputError

__all__ = ["check_paths", "job_directory_of"]


def check_paths(source: Path | BinaryIO, sink: Path | int, trace: Path | None = None) -> None:
    """Refuse an input that is no file, an output that cannot be one, and a trace in the same."""
    if isinstance(source, Path):
        _check_source(source)
    if isinstance(sink, Path):
        _check_sink(sink)
    if isinstance(source, Path) and isinstance(sink, Path):
        if sink.exists() and sink.samefile(source):
            raise InputError(
                f"{sink} was given as the input and as the output.",
                "The output would overwrite the rows that are still to be read.",
                "Choose another output.",
            )
    if trace is not None and isinstance(sink, Path) and trace.resolve() == sink.resolve():
        raise InputError(
            f"{sink} was given as --output and as --trace.",
            "A file is one or the other.",
            "Choose another file for the trace.",
        )


def job_directory_of(sink: Path | int, job_dir: Path | None) -> Path | None:
    """``job_dir``, else OUTPUT.freight beside the output, else ``None``: a temporary one."""
    if job_dir is not None or isinstance(sink, int):
        return job_dir
    return sink.with_name(sink.name + ".freight")


def _check_source(source: Path) -> None:
    if not source.exists():
        raise InputError(
            f"The input {source} was given.",
            "It does not exist.",
            "Check the path, or give - for standard input.",
        )
    if source.is_dir():
        raise InputError(
            f"The input {source} was given.",
            "It is a directory.",
            "Name a JSONL file in it, or give - for standard input.",
        )


def _check_sink(sink: Path) -> None:
    if sink.is_dir():
        raise InputError(
            f"The output {sink} was given.",
            "It is a directory.",
            "Name a file in it, or give - for standard output.",
        )
    if not sink.parent.is_dir():
        raise InputError(
            f"The output {sink} was given.",
            f"There is no directory {sink.parent}.",
            "Make it first, or choose another output.",
        )
    if sink.exists() and not sink.is_file():
        raise InputError(
            f"The output {sink} was given.",
            "It is a device or a pipe, in which finished rows cannot be found again.",
            "Name a file, or give - for standard output and send that there.",
        )
