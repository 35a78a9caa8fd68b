"""Sharing out over threads: everything once, in ranges that weigh enough."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.kernels.sharing import share, share_alike


@given(weights=st.lists(st.integers(0, 50), max_size=60), least=st.integers(1, 100))
def test_everything_is_done_once(weights: list[int], least: int) -> None:
    found: list[tuple[int, int]] = []
    share(np.array(weights, np.int64), lambda *own: found.append(own), least)
    done = [place for first, last in found for place in range(first, last)]
    assert sorted(done) == list(range(len(weights)))
    assert len(found) <= max(1, sum(weights) // least)


@given(count=st.integers(0, 3000), least=st.integers(1, 100), in_turns=st.booleans())
def test_alike_work_is_done_once(count: int, least: int, in_turns: bool) -> None:
    found: list[tuple[int, int]] = []
    share_alike(count, lambda *own: found.append(own), least, in_turns=in_turns)
    found.sort()
    assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
    assert found[-1][1] == count
    assert all(last - first >= min(least, count) for first, last in found)


def test_a_core_that_is_held_up_is_not_waited_for() -> None:
    """The first range waits until the last is done; later ones are shorter."""
    if torch.get_num_threads() == 1:
        pytest.skip("there is one core")
    begun: list[tuple[int, int]] = []
    all_later_done = threading.Event()

    def work(first: int, last: int) -> None:
        begun.append((first, last))
        if last == 1000:
            all_later_done.set()
        if first == 0:
            assert all_later_done.wait(timeout=60)

    share_alike(1000, work, 1, in_turns=True)
    begun.sort()
    lengths = [last - first for first, last in begun]
    assert lengths == sorted(lengths[:-1], reverse=True) + lengths[-1:]
    assert lengths[-1] < lengths[0] / 2


def test_an_error_of_any_thread_is_raised() -> None:
    def work(first: int, last: int) -> None:
        if last == 8:
            raise ValueError("the last one")

    with pytest.raises(ValueError, match="the last one"):
        share_alike(8, work, 1)
