"""Work shared out over threads: Python's, which help the caller's, or, where there are more than a
few, OpenMP's, which compiled loops call by themselves.

A thread of Python needs the interpreter's lock before it helps and after; a few of them are had one
after the other sooner than all of OpenMP's, which are waited for however late they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.team import work_together

__all__ = [
    "Team",
    "ranges_alike",
    "share",
    "share_alike",
    "take_turns",
    "team_threads",
    "together",
    "without_team",
]

_SHORTEST = 16
"""Of ranges that cores take in turns: a core's share over this."""
_MOST_HELPERS = 4
"""Threads that Python wakes one after the other about as fast as OpenMP wakes them all: too late
for work that is short."""
_WITHOUT_TEAM = [False]
_TEAM_TURNS = 4
"""Ranges for each of OpenMP's threads, which are all waited for."""

Team = Callable[[int, npt.NDArray[np.int64], npt.NDArray[np.int64]], None]
"""Work on ranges from each border to the next with so many of OpenMP's threads, by a counter."""


def team_threads(shares: int, *, is_short: bool = False) -> int:
    """How many of OpenMP's threads are to do the work that is worth so many shares; 0 where
    Python's are as fast. Always as many as torch has: others would be ended and begun anew.
    ``is_short``: what one thread has done within a few times what it takes to wake another."""
    threads = torch.get_num_threads()
    fewest = 1 if is_short else _MOST_HELPERS
    is_wanted = shares > 1 and threads > fewest and not _WITHOUT_TEAM[0]
    return threads if is_wanted and _has_open_mp() else 0


@cache
def _has_open_mp() -> bool:
    try:
        from freight.kernels import open_mp
    except ImportError:
        return False
    return open_mp.IS_THERE


@contextmanager
def without_team() -> Iterator[None]:
    """Leave OpenMP's threads out: what is too little for them is done without."""
    _WITHOUT_TEAM[0] = True
    try:
        yield
    finally:
        _WITHOUT_TEAM[0] = False


def share(
    weights: npt.NDArray[np.int64],
    work: Callable[[int, int], None],
    least: int,
    team: Team | None = None,
) -> None:
    """Call ``work`` for ranges that make up all of ``weights`` and weigh the same, one for each
    core, but for none that weighs less than ``least``; or have a ``team`` work on more."""
    grown = np.concatenate((np.zeros(1, np.int64), np.cumsum(weights)))
    whole = int(grown[-1])
    is_team = team is not None and team_threads(whole // least) > 0
    most = torch.get_num_threads() * (_TEAM_TURNS if is_team else 1)
    shares = max(1, min(most, whole // least))
    inner = np.searchsorted(grown, [whole * number // shares for number in range(1, shares)])
    _take_turns([0, *inner.tolist(), len(weights)], work, team)


def share_alike(
    count: int,
    work: Callable[[int, int], None],
    least: int,
    *,
    in_turns: bool = False,
    team: Team | None = None,
) -> None:
    """As ``share``, of ``count`` that weigh 1. ``in_turns``: in more ranges, the first ones long
    and later ones shorter, that cores take as they come: one that is held up, or begins late, is
    not waited for long."""
    _take_turns(ranges_alike(count, least, in_turns=in_turns), work, team)


def ranges_alike(count: int, least: int, *, in_turns: bool) -> list[int]:
    """Where they begin, and where the last one ends."""
    cores = torch.get_num_threads()
    borders = [0]
    if in_turns:
        shortest = max(least, count // (_SHORTEST * cores))
        while count - borders[-1] >= 2 * shortest and cores > 1:
            left = count - borders[-1]
            borders.append(borders[-1] + max(shortest, left // (2 * cores)))
    else:
        shares = max(1, min(cores, count // least))
        borders.extend(count * number // shares for number in range(1, shares))
    return [*borders, count]


def _take_turns(
    borders: list[int], work: Callable[[int, int], None], team: Team | None = None
) -> None:
    """Work from each border to the next, the first come first served."""
    if team is not None and (threads := team_threads(len(borders) - 1)):
        team(threads, np.zeros(1, np.int64), np.array(borders, np.int64))
        return
    ranges = iter(list(itertools.pairwise(borders)))

    def take_turns() -> None:
        # Taking the next one is a single step of the interpreter.
        for first, last in ranges:
            work(first, last)

    together(take_turns, len(borders) - 1)


def take_turns(
    alone: Callable[..., None],
    on_team: Callable[..., None],
    shares: int,
    counters: npt.NDArray[np.int64],
    *arguments: Any,
) -> None:
    """Call a compiled loop whose threads take turns by ``counters`` on as many as the work is worth
    ``shares``; ``on_team`` is the same on OpenMP's, of which it is told how many first."""
    if threads := team_threads(shares):
        on_team(threads, counters, *arguments)
        return
    together(lambda: alone(counters, *arguments), shares, waits=False)


def together(work: Callable[[], None], most: int, *, waits: bool = True) -> None:
    """Have as many cores as there are, but for ``most``, do the same work, which they share out
    themselves. Another one than the caller's may come late, or not at all; unless this ``waits``,
    it may also leave late, with nothing done after the caller's has returned."""
    work_together(work, min(torch.get_num_threads(), most) - 1, waits=waits)
