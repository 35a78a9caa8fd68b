"""Queries and the keys that they see, where these are kept as a state, against counting them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freight.plan.state_cost import _pairs

from ..model.test_kept_attention import make_step


@given(
    first=st.integers(0, 300),
    count=st.integers(1, 300),
    window=st.integers(2, 140),
    rate=st.sampled_from([0, 1, 4, 128]),
)
def test_pairs_are_counted(first: int, count: int, window: int, rate: int) -> None:
    positions = range(first, first + count)
    wanted = sum(min(at + 1, window) + ((at + 1) // rate if rate else 0) for at in positions)
    assert _pairs(make_step(window, rate, False), first, first + count) == wanted
