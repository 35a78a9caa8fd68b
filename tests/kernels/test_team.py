"""Threads that help: all that have begun are done, and nobody waits for one that has not."""

from __future__ import annotations

import os
import threading
import time

import pytest

from freight.kernels import team
from freight.kernels.team import work_together


def test_others_help_and_all_are_done_in_the_end() -> None:
    met = threading.Barrier(4)
    done: list[str] = []

    def work() -> None:
        met.wait(timeout=30)
        time.sleep(0.01)
        done.append(threading.current_thread().name)

    for _ in range(20):
        done.clear()
        work_together(work, 3)
        assert len(set(done)) == 4


def test_who_has_not_begun_is_not_waited_for() -> None:
    """All helpers are held up elsewhere."""
    work_together(lambda: None, 2)
    count = team._team[0]._num_threads
    begun, ends = threading.Barrier(count + 2), threading.Event()

    def hold() -> None:
        begun.wait(timeout=30)
        ends.wait(timeout=30)

    first = threading.Thread(target=lambda: work_together(hold, count))
    first.start()
    begun.wait(timeout=30)
    calls: list[int] = []
    work_together(lambda: calls.append(1), count)
    assert calls == [1]
    ends.set()
    first.join(timeout=30)
    assert not first.is_alive()


def test_work_that_says_itself_when_all_is_done() -> None:
    """A helper that has nothing more to do may leave late, and what it does next waits for it."""
    met, ends, left = threading.Barrier(2), threading.Event(), threading.Event()
    caller = threading.current_thread()

    def work() -> None:
        met.wait(timeout=30)
        if threading.current_thread() is not caller:
            ends.wait(timeout=30)
            left.set()

    work_together(work, 1, waits=False)
    assert not left.is_set()
    ends.set()
    assert left.wait(timeout=30)
    names: set[str] = set()
    both = threading.Barrier(2)

    def again() -> None:
        both.wait(timeout=30)
        names.add(threading.current_thread().name)

    work_together(again, 1)
    assert len(names) == 2


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_goes_wrong_is_raised(count: int) -> None:
    caller = threading.current_thread()
    turn = threading.Barrier(count + 1)

    def work() -> None:
        turn.wait(timeout=30)
        if not count or threading.current_thread() is not caller:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work_together(work, count)


def test_a_forked_process_has_helpers_of_its_own() -> None:
    work_together(lambda: None, 2)
    child = os.fork()
    if not child:
        met = threading.Barrier(2)
        try:
            work_together(lambda: met.wait(timeout=10) and None, 1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
