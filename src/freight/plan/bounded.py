"""The fastest plan of a chip under a bound on what all chips take together.

A search bounds the blocks of one chip; what chips send each other comes on top, and grows with the
rows of a block. Where what is best for the chip alone then takes too long, block shapes from the
shortest on are looked at, and the fastest is taken that keeps to the bound with what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from freight.errors import BudgetError
from freight.plan.search import Choice, Search

__all__ = ["best_within"]

_LOOKED_AT: Final = 12


class _Timed(Protocol):
    """``block_s`` is from a block's prompts to its last token, ``seconds`` is all the work."""

    @property
    def block_s(self) -> float: ...

    @property
    def seconds(self) -> float: ...


_T = TypeVar("_T", bound=_Timed)


def best_within(
    search: Search,
    told: Callable[[Choice], _T],
    max_block_s: float,
    in_flight: int,
    *,
    is_rough: bool,
) -> _T:
    """What is ``told`` of the fastest choice that keeps to the bound, of which a chip has one of
    ``in_flight`` parts; of the shortest block where none does. ``is_rough``: sketched only.
    BudgetError where nothing fits."""
    first = _found(search, max_block_s / in_flight, is_rough)
    if first is not None and (answer := told(first)).block_s <= max_block_s:
        return answer
    others = [(choice, told(choice)) for choice in search.frontier(_LOOKED_AT)]
    kept = [(choice, own) for choice, own in others if own.block_s <= max_block_s]
    if not kept:
        shortest = [own for _, own in others[:1]] or [told(first or search.best())]
        return shortest[0]
    choice, answer = min(kept, key=lambda pair: pair[1].seconds)
    whole = answer if is_rough else told(search.price(choice.plan))
    return whole if whole.block_s <= max_block_s else answer


def _found(search: Search, bound_s: float, is_rough: bool) -> Choice | None:
    """None where the search finds nothing under a bound; BudgetError where there was none."""
    own = search.within(bound_s)
    try:
        return own.sketch() if is_rough else own.best()
    except BudgetError:
        if bound_s == math.inf:
            raise
        return None
