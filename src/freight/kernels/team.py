"""Threads that help the caller's with one piece of work.

A ``ThreadPoolExecutor`` takes some 20 microseconds to hand over a call, most of them with the
interpreter's lock: with sixteen threads that is longer than many products take. Here handing over
is a few steps, and whoever comes late is not waited for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

__all__ = ["work_together"]


def _nothing() -> None: ...


class _Job:
    """One piece of work that several threads do, and share out themselves."""

    __slots__ = ("_ended", "_error", "_is_closed", "_lock", "_num_working", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._ended = threading.Lock()
        self._ended.acquire()
        self._num_working = 0
        self._is_closed = False
        self._error: BaseException | None = None

    def help(self) -> None:
        """Do it too, if it is not over."""
        with self._lock:
            if self._is_closed:
                return
            self._num_working += 1
        try:
            self._work()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._num_working -= 1
            is_last = self._is_closed and not self._num_working
        if is_last:
            self._ended.release()

    def close(self) -> None:
        """Wait for those that have begun; nobody else begins. Raises what went wrong in one."""
        with self._lock:
            self._is_closed = True
            is_over = not self._num_working
        if not is_over:
            self._ended.acquire()
        # Who comes late may come much later: what the work holds must not wait for it.
        self._work = _nothing
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Wait for nobody; nobody else begins."""
        with self._lock:
            self._is_closed = True
        self._work = _nothing


class _Team:
    """Threads that wait for jobs, as many as were ever wanted at once."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._num_threads = 0
        self._growing = threading.Lock()

    def call(self, job: _Job, count: int) -> None:
        if count > self._num_threads:
            self._grow(count)
        for _ in range(count):
            self._jobs.put(job)

    def _grow(self, count: int) -> None:
        with self._growing:
            for number in range(self._num_threads, count):
                name = f"kernel-helper-{number}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
                self._num_threads = number + 1

    def _run(self) -> None:
        while True:
            self._jobs.get().help()


_team: Final = [_Team()]


def _forget_threads() -> None:
    """A process that is forked has none of them."""
    _team[0] = _Team()


os.register_at_fork(after_in_child=_forget_threads)


def work_together(work: Callable[[], None], helpers: int, *, waits: bool = True) -> None:
    """Do ``work`` in this thread and in up to so many others at once. All that have begun are done
    when it returns; what one of them raises is raised here. Unless it ``waits``: then ``work``
    itself returns, to each, when all has been done, and touches nothing after that."""
    if helpers < 1:
        work()
        return
    job = _Job(work)
    _team[0].call(job, helpers)
    try:
        work()
    finally:
        if waits:
            job.close()
        else:
            job.leave()
