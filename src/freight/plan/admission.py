"""When rows may enter a block in which others are under way: what the run and its forecast share.

How long answers will be, what rows will grow to, and how fast they may enter so that those of equal
length are still spread in age. Knows counts of tokens and pages, no rows and no tiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from freight.plan.policy import Policy

__all__ = ["Lengths", "Outlook", "Pace", "Pages"]

Pages = npt.NDArray[np.int32]

_NEAR_SWEEPS: Final = 8


@dataclass(kw_only=True, slots=True)
class Lengths:
    """How long answers are, from those that have ended and those under way.

    Tokens made per answer ended, as if one more had made ``expected``: until many have ended, the
    short ones among them would count too much otherwise. None is longer than ``longest``.
    """

    expected: float
    longest: int
    num_made: int = 0
    num_ended: int = 0

    def mean(self) -> float:
        if not self.num_ended:
            return max(1.0, self.expected)
        return max(1.0, min(self.longest, (self.num_made + self.expected) / (self.num_ended + 1)))

    def left(self, num_made: int, most: int, *, ends_early: bool) -> int:
        """Tokens that a row is expected to make yet, of at most ``most`` in all."""
        if not ends_early:
            return max(1, most - num_made)
        mean = self.mean()
        return max(1, min(most - num_made, math.ceil(max(mean - num_made, mean / 2))))


class Outlook:
    """Pages of one tier that its rows take now and at later sweeps, as far as is expected: sweep by
    sweep at first, then in stretches that grow, each as if none of its rows ended before the last
    of it."""

    def __init__(self, longest: int, page_tokens: int) -> None:
        self._starts = _stretches(max(1, longest))
        self._lasts = np.append(self._starts[1:] - 1, np.int32(max(1, longest) - 1))
        self._page_tokens = page_tokens
        self._pages: Pages = np.zeros(len(self._starts), dtype=np.int32)

    def curve(self, num_tokens: Sequence[int] | Pages, left: Sequence[int] | Pages) -> Pages:
        """Pages that rows take together, by stretches."""
        pages: Pages = self.curves(num_tokens, left).sum(axis=0, dtype=np.int32)
        return pages

    def curves(self, num_tokens: Sequence[int] | Pages, left: Sequence[int] | Pages) -> Pages:
        """Pages that each row takes, [rows, stretches]; it makes ``left`` more tokens, of which
        the last is never attended."""
        tokens = np.asarray(num_tokens, dtype=np.int32)[:, None]
        more = np.asarray(left, dtype=np.int32)[:, None] - 1
        most = tokens + np.minimum(self._lasts, more)
        most += self._page_tokens - 1
        most //= self._page_tokens
        most *= more >= self._starts
        return most

    def fits(self, curve: Pages, num_pages: int) -> bool:
        return bool((self._pages + curve <= num_pages).all())

    def add(self, curve: Pages) -> None:
        self._pages = self._pages + curve

    def add_always(self, num_pages: int) -> None:
        """Pages that stay as they are."""
        self._pages = self._pages + np.int32(num_pages)


@cache
def _stretches(longest: int) -> Pages:
    """Where they begin."""
    starts = [0]
    while (start := starts[-1] + max(1, starts[-1] // _NEAR_SWEEPS)) < longest:
        starts.append(start)
    return np.array(starts, dtype=np.int32)


class Pace:
    """Rows that may enter, sweep by sweep: as many as end when ages are spread evenly, or
    ``entry_pace`` times as many."""

    def __init__(self, policy: Policy, mean_answer: float) -> None:
        self._policy = policy
        self._credit = max(0.0, 1.0 - self._rate(mean_answer))

    def begin_sweep(self, mean_answer: float) -> None:
        rate = self._rate(mean_answer)
        self._credit = min(self._credit + rate, 1.0 + rate)

    def allows(self) -> bool:
        return self._credit >= 1.0

    def take(self, count: int) -> None:
        self._credit -= count

    def _rate(self, mean_answer: float) -> float:
        return self._policy.entry_pace * self._policy.block_rows / mean_answer
