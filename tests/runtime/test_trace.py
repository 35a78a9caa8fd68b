"""The file of a trace: what it may overwrite, and what not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freight.errors import BudgetError, InputError
from freight.jobs.paths import check_paths
from freight.runtime.trace import Trace


@pytest.mark.parametrize(
    "content", ['{"prompt": "a"}\n', "[1, 2]\n", '[\n {"a": 1}]', "x", '{"pid": 1}']
)
def test_what_is_no_trace_is_left(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="it is no trace"):
        Trace(path)
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["", "[\n", "[\n{}]\n", '[\n{"pid": 1, "tid": 0, "na'])
def test_a_trace_is_written_over(content: str, tmp_path: Path) -> None:
    """Also one that was cut off."""
    path = tmp_path / "trace.json"
    path.write_text(content)
    trace = Trace(path)
    trace.predict([])
    trace.close()
    assert json.loads(path.read_text())[0]["name"] == "process_name"
    Trace(path).close()
    Trace(path).close()


def test_standard_output_is_no_trace() -> None:
    with pytest.raises(InputError, match="--trace - was given"):
        Trace(Path("-"))


def test_a_full_disk_is_told_by_the_trace_s_name() -> None:
    with pytest.raises(BudgetError, match="The trace /dev/full was being written"):
        Trace(Path("/dev/full")).close()


def test_an_output_is_no_trace(tmp_path: Path) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("{}")
    check_paths(source, sink, tmp_path / "trace")
    (tmp_path / "link").symlink_to(sink)
    for trace in (sink, tmp_path / "link"):
        with pytest.raises(InputError, match="as --output and as --trace"):
            check_paths(source, sink, trace)
