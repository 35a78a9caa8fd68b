"""Tasks in copies of a process: what they give back, what becomes of those that fail, and that a
search finds the same with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from freight.plan.copies import side_by_side

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
"""Tests may run beside threads of those who run them."""

HERE = os.getpid()


def squared(number: int) -> tuple[int, bool]:
    return number * number, os.getpid() == HERE


def only_here(number: int) -> int:
    """Fails in a copy."""
    if os.getpid() != HERE:
        raise ValueError(number)
    return number


def killed_elsewhere(number: int) -> int:
    if os.getpid() != HERE:
        os.kill(os.getpid(), 9)
    return number


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_all_but_the_first_are_done_in_copies(count: int) -> None:
    tasks = [partial(squared, number) for number in range(count)]
    assert side_by_side(tasks) == [(n * n, n == 0) for n in range(count)]


@pytest.mark.parametrize("task", [only_here, killed_elsewhere])
def test_what_a_copy_cannot_do_is_done_here(
    task: Callable[[int], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert side_by_side([partial(task, number) for number in range(3)]) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


def test_none_is_left_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever runs tests may have children of their own: only these copies are looked for.
    copies = []
    fork = os.fork

    def noted() -> int:
        copies.append(fork())
        return copies[-1]

    def fail() -> int:
        raise ValueError("here")

    monkeypatch.setattr(os, "fork", noted)
    with pytest.raises(ValueError, match="here"):
        side_by_side([fail, partial(only_here, 1), partial(only_here, 2)])
    assert len(copies) == 2
    for copy in copies:
        with pytest.raises(ChildProcessError):
            os.waitpid(copy, os.WNOHANG)


def test_a_large_result_comes_whole() -> None:
    text = "x" * 5_000_000
    assert side_by_side([lambda: "", lambda: text])[1] == text


PLANNED = """
import contextlib, io, sys
from freight.entrypoints.cli import main
import freight.plan.copies as copies
asked = []
for at_once in (1, 3):
    copies.useful_copies = lambda: at_once
    import freight.entrypoints.plan as plan
    plan.useful_copies = copies.useful_copies
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(sys.argv[1:]) == 0
    asked.append(out.getvalue())
assert asked[0] == asked[1], asked
print(asked[0])
"""


@pytest.mark.parametrize("model", ["llama-3-8b", "opt-30b"])
def test_a_search_finds_the_same_with_copies(model: str) -> None:
    command = ["plan", "--model", model, "--machine", "t4", "--workload", "256:32", "--rows", "200"]
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, *command], capture_output=True, text=True, check=True
    )
    assert "--micro-batch-size" in done.stdout


def test_a_process_with_threads_is_not_copied() -> None:
    code = """
import threading
from freight.plan.copies import useful_copies
alone = useful_copies()
wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start()
print(alone, useful_copies())
wait.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    alone, beside = map(int, done.stdout.split())
    assert beside == 1
    if sys.platform == "linux":
        assert alone == min(4, len(os.sched_getaffinity(0)))
