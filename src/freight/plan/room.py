"""How many more rows find room beside those that are there: on a tier, or in a slot.

Knows pages at later sweeps, no rows and no tiers.
"""

from __future__ import annotations

from typing import Final

from freight.plan.admission import Pages, fit, most_known, most_of

__all__ = ["Room"]

_ANY: Final = 1 << 24


class Room:
    """Pages of which some are ``taken``, now and at later sweeps. Many rows in turn have one curve:
    how many more of it fit is counted once. Where it ``is_known`` how long answers are it is the
    most that rows take, otherwise all that an outlook says of them."""

    def __init__(self, num_pages: int, taken: Pages, *, is_known: bool) -> None:
        self._num_pages = num_pages
        self._taken = taken
        self._is_known = is_known
        self._curve: Pages | None = None
        self._left = self._count = 0

    def fits(self, curve: Pages) -> bool:
        """Whether a row fits whose pages follow the curve."""
        if curve is not self._curve:
            self._settle()
            self._curve = curve
            self._left = self._most()
        return self._left > 0

    def take(self, curve: Pages) -> None:
        """For a row that fits."""
        assert curve is self._curve and self._left > 0
        self._left -= 1
        self._count += 1

    def _most(self) -> int:
        """How many more rows of the curve fit: by division, or where there is a margin by
        halving."""
        assert self._curve is not None
        if self._is_known:
            return most_known(self._taken, self._curve, self._num_pages, _ANY)
        low, high = 0, most_of(self._taken, self._curve, self._num_pages, _ANY)
        count = high
        while low < high:
            if fit(self._taken + count * self._curve, self._num_pages):
                low = count
            else:
                high = count - 1
            count = (low + high + 1) // 2
        return low

    def _settle(self) -> None:
        if self._curve is not None:
            self._taken = self._taken + self._count * self._curve
        self._count = 0
