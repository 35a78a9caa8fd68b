"""What tests with ranks as processes share: where these come from, rows, and their answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freight.demo import EXAMPLES

from .commands import NUM_ROWS, job
from .forks import Forks


@pytest.fixture(scope="session")
def forks(no_profile: None) -> Iterator[Forks]:
    started = Forks()
    yield started
    started.close()


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:NUM_ROWS]))
    return path


@pytest.fixture(scope="session")
def alone(rows: Path, forks: Forks) -> bytes:
    """What one process makes of the rows."""
    output = rows.with_name("alone.jsonl")
    status, told = forks.finish(1, job(rows, output))
    assert status == 0, told
    return output.read_bytes()
