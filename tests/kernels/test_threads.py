"""Sharing out over threads: everything once, in ranges that weigh enough."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.kernels.threads import share


@given(
    weights=st.lists(st.integers(0, 50), max_size=60),
    least=st.integers(1, 100),
    turns=st.integers(1, 5),
)
def test_everything_is_done_once(weights: list[int], least: int, turns: int) -> None:
    found: list[tuple[int, int]] = []
    share(np.array(weights, np.int64), lambda *own: found.append(own), least, turns=turns)
    done = [place for first, last in found for place in range(first, last)]
    assert sorted(done) == list(range(len(weights)))
    assert len(found) <= max(1, sum(weights) // least)


def test_a_core_that_is_held_up_is_not_waited_for() -> None:
    """One range waits until all others are done."""
    others_done, left = threading.Semaphore(0), 7

    def work(first: int, last: int) -> None:
        if first == 0:
            for _ in range(left):
                assert others_done.acquire(timeout=60)
        else:
            others_done.release()

    share(np.ones(8, np.int64), work, 1, turns=4)


def test_an_error_of_any_thread_is_raised() -> None:
    def work(first: int, last: int) -> None:
        if last == 8:
            raise ValueError("the last one")

    with pytest.raises(ValueError, match="the last one"):
        share(np.ones(8, np.int64), work, 1)
