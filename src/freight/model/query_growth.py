"""Queries that grow with their position, so that attention over long rows stays as sharp as over
short ones: the values, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from freight.model.families.table import Key
from freight.model.raw_config import RawConfig

__all__ = ["QueryGrowth", "read_growth"]

_LARGE: Final = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryGrowth:
    """By ``rate`` times the logarithm of how many whole spans of so many tokens come before, and
    one (Llama 4). Or by the logarithm of the position, times what each head has learnt, and what it
    adds: where there is no rate."""

    rate: float | None
    span: int

    @property
    def is_learnt(self) -> bool:
        return self.rate is None

    def changes(self, longest: int) -> bool:
        """Whether rows of so many tokens have a query that it changes."""
        return self.is_learnt or longest > self.span

    def problems(self) -> list[str]:
        """What cannot be."""
        if self.span < 1 or (self.rate is not None and not 0 <= self.rate < _LARGE):
            return [f"queries grow by a rate of {self.rate} every {self.span} tokens"]
        return []


def read_growth(config: RawConfig, keys: Mapping[str, Key]) -> QueryGrowth | None:
    """Where the family says so. What is wrong goes to ``config``."""
    rate, span = config.number(keys["growth_rate"]), config.count(keys["growth_span"])
    is_learnt = config.flag(keys["growth_learnt"])
    if rate is None and not is_learnt:
        return None
    return QueryGrowth(rate=None if is_learnt else rate, span=1 if is_learnt else span or 0)
