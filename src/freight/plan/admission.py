"""When rows may enter a block in which others are under way: what the run and its forecast share.

How long answers will be, what rows will grow to, and how fast they may enter so that those of equal
length are still spread in age. Knows counts of tokens and pages, no rows and no tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from freight.plan.policy import Policy

__all__ = [
    "MARGIN",
    "Lengths",
    "Outlook",
    "Pace",
    "Pages",
    "always",
    "fit",
    "most_known",
    "most_of",
]

Pages = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]

_NEAR_SWEEPS: Final = 8
_KNOWN: Final = -1
MARGIN: Final = 1.25
"""Deviations. Without any, a tenth more tokens of small blocks are computed again."""
_MOST_HAZARD: Final = 1 - 1e-12
"""Nothing is certain: a row that is there had survived."""
_ROUNDING: Final = 1e-6
"""Of sums of pages that are expected."""


@dataclass(kw_only=True, slots=True)
class Lengths:
    """How long answers are, from those that have ended and those under way, by the estimator of
    Kaplan and Meier: of the rows that had made so many tokens, how many ended with the next one.

    Of answers alone it would be wrong as long as few have ended, for short ones end first. What is
    expected before any is there counts as one row that makes each token. None is longer than
    ``longest``.
    """

    expected: float
    longest: int
    num_ended: int = 0
    _made: Pages = field(init=False)
    _left: Pages = field(init=False)
    _at_risk: Pages = field(init=False)
    _stopped: Pages = field(init=False)

    def __post_init__(self) -> None:
        """A share (1 - t / longest) ** k of the answers is expected to be longer than t; k is 1
        where any length is as likely as any other, and 0 where all are as long as they may be."""
        left = np.arange(self.longest, -1, -1, dtype=np.float64)
        power = max(0.0, self.longest - self.expected) / max(1e-9, self.expected - 1)
        with np.errstate(under="ignore"):
            self._stopped = 1 - (left[1:] / np.maximum(1, left[:-1])) ** power
        self._left = self._stopped.copy()
        self._made, self._at_risk = np.ones((2, self.longest))

    def mean(self) -> float:
        """Tokens of an answer, however it ends."""
        if not self.num_ended:
            return max(1.0, self.expected)
        return max(1.0, float(np.exp(_outliving(self._left / self._made)[:-1]).sum()))

    def log_survival(self) -> Pages:
        """The logarithm of the share of the answers that are longer than t tokens, [longest + 1],
        of those that may end by themselves."""
        return _outliving(self._stopped / self._at_risk)

    def note(self, num_before: int, *, ends: bool, may_stop: bool, stops: bool) -> None:
        """A row that had made so many tokens makes one more, and ``ends`` with it, or, if it
        ``may_stop`` by itself, ``stops``."""
        self.num_ended += ends
        if num_before < self.longest:
            self._made[num_before] += 1
            self._left[num_before] += ends
            self._at_risk[num_before] += may_stop
            self._stopped[num_before] += may_stop and stops


def _outliving(hazards: Pages) -> Pages:
    return np.concatenate(([0.0], np.cumsum(np.log1p(-np.minimum(hazards, _MOST_HAZARD)))))


class Outlook:
    """Pages of one tier that its rows take now and at later sweeps, as far as is expected: sweep by
    sweep at first, then in stretches that grow, each as if none of its rows ended before the last
    of it, but with those alone that are there at its begin. ``log_survival`` is that of the answers
    whose length is not known.

    What rows take is [3, stretches]: the pages that are expected, their variance, and the pages if
    none ended by itself. Rows fit if what is expected does with ``MARGIN`` deviations to spare, or
    the most that they can take.
    """

    def __init__(self, longest: int, page_tokens: int, log_survival: Pages | None = None) -> None:
        self.longest = longest
        self._starts: Ints = _stretches(max(1, longest))
        self._lasts = np.append(self._starts[1:] - 1, np.int32(max(1, longest) - 1))
        self._page_tokens = page_tokens
        self._log_survival = log_survival
        self._pages: Pages = np.zeros((3, len(self._starts)))

    def curve(
        self,
        num_tokens: Sequence[int] | Ints,
        left: Sequence[int] | Ints,
        made: Sequence[int] | Ints | None = None,
    ) -> Pages:
        """What rows take together."""
        pages: Pages = self.curves(num_tokens, left, made).sum(axis=0)
        return pages

    def curves(
        self,
        num_tokens: Sequence[int] | Ints,
        left: Sequence[int] | Ints,
        made: Sequence[int] | Ints | None = None,
    ) -> Pages:
        """What each row takes, [rows, 3, stretches]; it makes at most ``left`` more tokens, of
        which the last is never attended. Where that is all that is known it has ``made`` so many;
        -1 where it makes just as many as are left."""
        pages = self.most(num_tokens, left)
        found: Pages = np.zeros((len(pages), 3, len(self._starts)))
        most = found[:, 2]
        most[:] = pages
        if made is None or self._log_survival is None:
            found[:, 0] = most
            return found
        before = np.asarray(made, dtype=np.int32)[:, None]
        own = np.maximum(before, 0)
        later = np.minimum(own + self._starts, len(self._log_survival) - 1)
        shares = np.exp(self._log_survival[later] - self._log_survival[own])
        found[:, 0] = most * np.where(before == _KNOWN, 1.0, shares)
        found[:, 1] = found[:, 0] * (most - found[:, 0])
        return found

    def most(self, num_tokens: Sequence[int] | Ints, left: Sequence[int] | Ints) -> Pages:
        """The pages alone that each row takes at most, [rows, stretches]."""
        tokens = np.asarray(num_tokens, dtype=np.int32)[:, None]
        more = np.asarray(left, dtype=np.int32)[:, None] - 1
        pages = tokens + np.minimum(self._lasts, more)
        pages += self._page_tokens - 1
        pages //= self._page_tokens
        found: Pages = np.where(more >= self._starts, pages, 0).astype(np.float64)
        return found

    def fits(self, curve: Pages, num_pages: int) -> bool:
        return fit(self._pages + curve, num_pages)

    def add(self, curve: Pages) -> None:
        self._pages = self._pages + curve

    def add_always(self, num_pages: int) -> None:
        """Pages that stay as they are."""
        self._pages = self._pages + always(num_pages)


def always(num_pages: int) -> Pages:
    """What takes so many pages at every sweep."""
    return np.array([[num_pages], [0.0], [num_pages]])


def fit(taken: Pages, num_pages: float) -> bool:
    """Whether so many pages are enough for what is ``taken``, [3, stretches]."""
    expected, variance, most = taken
    enough = expected + MARGIN * np.sqrt(variance) <= num_pages + _ROUNDING
    return bool((enough | (most <= num_pages)).all())


def most_of(taken: Pages, curve: Pages, num_pages: float, most: int) -> int:
    """No more rows of a curve fit beside what is ``taken``, of ``most``."""
    room, each = num_pages - taken[::2], curve[::2]
    room[0] += _ROUNDING
    # Of what takes nothing any number fits.
    counts = np.where(room < 0, -1.0, np.inf)
    np.divide(room, each, out=counts, where=each > 0)
    return int(min(most, max(0.0, counts.max(axis=0).min() + _ROUNDING)))


def most_known(taken: Pages, curve: Pages, num_pages: float, most: int) -> int:
    """So many rows fit, of ``most``, whose answers are known: what they take is [stretches]."""
    room = num_pages + _ROUNDING - taken
    if room.min() < 0:
        return 0
    counts = np.full_like(room, np.inf)
    np.divide(room, curve, out=counts, where=curve > 0)
    return int(min(most, counts.min() + _ROUNDING))


@cache
def _stretches(longest: int) -> Ints:
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
