"""Runs in processes of their own, copies of one that has imported what they need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freight.entrypoints.bench import children

from . import forked_child

SOURCE = Path(children.__file__).parents[3]


@pytest.fixture(scope="session")
def server_of_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("children") / "socket"
    process = subprocess.Popen(
        [sys.executable, forked_child.__file__, "serve", str(path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    yield path
    process.communicate()


@pytest.fixture
def forked_children(server_of_children: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forked_child.WHERE, str(server_of_children))
    monkeypatch.setenv("PYTHONPATH", str(Path(forked_child.__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr(children, "_MODULE", "forked_child")


@pytest.fixture
def begun_anew(forked_children: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are what they are for people."""
    monkeypatch.setattr(children, "_MODULE", "freight.entrypoints.bench.child")
