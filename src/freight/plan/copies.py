"""Work in copies of this process, side by side, where that is safe.

A copy has all that this process knows, and gives back one value. Only a process with one thread is
copied: another thread might hold a lock, which in the copy nobody would ever release.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["side_by_side", "useful_copies"]

_MOST: Final = 4
_THREADS: Final = Path("/proc/self/task")

T = TypeVar("T")


def useful_copies() -> int:
    """How many tasks are worth doing at once: one for each core, or one where this process cannot
    be copied."""
    if sys.platform != "linux" or not _THREADS.is_dir() or len([*_THREADS.iterdir()]) > 1:
        return 1
    return min(_MOST, len(os.sched_getaffinity(0)))


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What each task returns, in order: the first is done here, the others each in a copy, or here
    where a copy could not."""
    copies = [_start(task) for task in tasks[1:]]
    try:
        found = [task() for task in tasks[:1]]
        for task in tasks[1:]:
            made: tuple[T] | None = _take(*copies.pop(0))
            found.append(made[0] if made else task())
        return found
    finally:  # something went wrong
        for copy in copies:
            _give_up(*copy)


def _start(task: Callable[[], T]) -> tuple[int, int]:
    """Begin a task in a copy: its number, and where the result can be read."""
    source, sink = os.pipe()
    number = os.fork()
    if number:
        os.close(sink)
        return number, source
    # Nothing that this process has begun ends here: no file is flushed, no message printed.
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.close(source)
        with os.fdopen(sink, "wb") as pipe:
            pickle.dump((task(),), pipe, pickle.HIGHEST_PROTOCOL)
        os._exit(0)
    finally:
        os._exit(1)


def _take(number: int, source: int) -> tuple[T] | None:
    """The result in a tuple; None where there is none."""
    with os.fdopen(source, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(number, 0)
    return pickle.loads(content) if status == 0 else None


def _give_up(number: int, source: int) -> None:
    os.close(source)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
