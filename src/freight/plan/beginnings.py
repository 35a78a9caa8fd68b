"""What prompts begin with that others begin with too, in numbers.

Plain values that a plan is made from. Knows no tokens, and no rows but how many follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

__all__ = ["Beginnings", "Held", "Shared"]

Ints = npt.NDArray[np.int64]


class Held(NamedTuple):
    """Of any ``rows`` one after the other, how many ``beginnings`` there are at most, and how many
    tokens these have at most."""

    rows: int
    beginnings: int
    tokens: int


class Shared(NamedTuple):
    """Of a group of rows, the ``tokens`` that beginnings have on average, and how many beginnings
    are met there first."""

    tokens: int
    begun: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginnings:
    """The beginnings that rows share; those that have the same follow one another.

    ``groups`` are as many as the workload has of rows' lengths, or one that is of them all.

    A prompt has up to ``own_prompt`` tokens behind its beginning, a row up to ``own_total`` with
    its answer. Beginnings have from ``least_tokens`` to ``most_tokens``, multiples of ``grain``;
    rows without one have ``least_tokens`` of 0. ``held`` is told for 1, 2, 4, ... rows and all.
    """

    groups: tuple[Shared, ...]
    own_prompt: int
    own_total: int
    least_tokens: int
    most_tokens: int
    grain: int
    held: tuple[Held, ...]

    @classmethod
    def of_all(cls, tokens: int, num_rows: int, max_prompt: int, max_total: int) -> Self:
        """One that all of these rows have."""
        return cls(
            groups=(Shared(tokens, 1),),
            own_prompt=max_prompt - tokens,
            own_total=max_total - tokens,
            least_tokens=tokens,
            most_tokens=tokens,
            grain=tokens,
            held=tuple(Held(rows, 1, tokens) for rows in _windows(num_rows)),
        )

    @classmethod
    def of(
        cls,
        groups: tuple[Shared, ...],
        *,
        keys: Ints,
        tokens: Ints,
        prompts: Ints,
        totals: Ints,
        rows: Ints,
    ) -> Self:
        """Of requests in their order, each that of so many ``rows``: by the number of what it
        begins with, -1 for none, and how many tokens that has. Some have one."""
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        counts = np.add.reduceat(rows, first)
        return cls(
            groups=groups,
            own_prompt=int((prompts - tokens).max()),
            own_total=int((totals - tokens).max()),
            least_tokens=int(tokens.min()),
            most_tokens=int(tokens.max()),
            grain=int(np.gcd.reduce(tokens)),
            held=tuple(_held(counts, keys[first] >= 0, tokens[first])),
        )

    def beside(self, groups: tuple[Shared, ...]) -> Self:
        """Of rows of these groups that follow one another but for some that were left of a request
        before: one beginning more."""
        return replace(self, groups=groups, held=tuple(self._at_most(own, 1) for own in self.held))

    def apart(self, groups: tuple[Shared, ...], samples: int) -> Self:
        """Of rows of these groups of which only as many ``samples`` follow one another."""
        none = (Held(own.rows, 0, 0) for own in self.held)
        return replace(
            self,
            groups=groups,
            held=tuple(self._at_most(own, -(-own.rows // samples) + 1) for own in none),
        )

    def _at_most(self, held: Held, more: int) -> Held:
        """With so many beginnings more, but no more than all."""
        return Held(
            held.rows,
            min(held.beginnings + more, self.all.beginnings),
            min(held.tokens + more * self.most_tokens, self.all.tokens),
        )

    def own_prompt_tokens(self, page_tokens: int) -> int:
        """The most tokens of a prompt behind whole pages of its beginning."""
        return self.own_prompt + self._left_over(page_tokens)

    def own_total_tokens(self, page_tokens: int) -> int:
        """Likewise of a row."""
        return self.own_total + self._left_over(page_tokens)

    def _left_over(self, page_tokens: int) -> int:
        """The most tokens of a beginning behind its whole pages."""
        if self.least_tokens == self.most_tokens:
            return self.most_tokens % page_tokens
        return page_tokens - gcd(page_tokens, self.grain)

    @property
    def all(self) -> Held:
        """The rows of the whole work."""
        return self.held[-1]

    def most_held(self, rows: int) -> Held:
        """Of so many rows one after the other: no more than of a few more, and no more than of two
        parts of them."""
        above = next((own for own in self.held if own.rows >= rows), self.all)
        if above.rows <= rows:
            return above._replace(rows=rows)
        below = next(own for own in reversed(self.held) if own.rows <= rows)
        rest = self.most_held(rows - below.rows) if rows > below.rows else Held(0, 0, 0)
        return Held(
            rows,
            min(above.beginnings, below.beginnings + rest.beginnings),
            min(above.tokens, below.tokens + rest.tokens),
        )


def _windows(num_rows: int) -> Sequence[int]:
    """1, 2, 4, ... and all."""
    return [*(1 << i for i in range((num_rows - 1).bit_length())), num_rows]


def _held(counts: Ints, is_one: npt.NDArray[np.bool_], tokens: Ints) -> list[Held]:
    """Of runs of so many rows with one beginning each, or none."""
    ends = np.cumsum(counts)
    beginnings = np.append(0, np.cumsum(is_one))
    reached = np.append(0, np.cumsum(np.where(is_one, tokens, 0)))
    held = []
    for rows in _windows(int(ends[-1])):
        # Most are met by those who begin at the last row of a run.
        last = np.minimum(np.searchsorted(ends, ends - 2 + rows, side="right"), len(ends) - 1)
        found = (int((sums[last + 1] - sums[:-1]).max()) for sums in (beginnings, reached))
        held.append(Held(rows, *found))
    return held
