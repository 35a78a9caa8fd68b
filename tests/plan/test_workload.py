"""What a planner expects of answers whose length nobody knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.plan.workload import RowLength, Workload


def _workload(lengths: tuple[tuple[int, int, int], ...], *, ends_early: bool) -> Workload:
    rows = sum(count for count, _, _ in lengths)
    return Workload(
        num_rows=rows,
        max_prompt_tokens=max(prompt for _, prompt, _ in lengths),
        max_new_tokens=max(new for _, _, new in lengths),
        max_total_tokens=max(prompt + new for _, prompt, new in lengths),
        total_prompt_tokens=sum(count * prompt for count, prompt, _ in lengths),
        total_new_tokens=sum(count * new for count, _, new in lengths),
        lengths=lengths,
        ends_early=ends_early,
    )


groups = st.lists(
    st.tuples(st.integers(1, 400), st.integers(1, 50), st.integers(1, 200)), min_size=1, max_size=4
).map(tuple)


@given(lengths=groups)
def test_expected_answers_are_spread_evenly(lengths: tuple[tuple[int, int, int], ...]) -> None:
    work = _workload(lengths, ends_early=True)
    rows = work.row_lengths(0, work.num_rows)
    bounds = [(prompt, new) for count, prompt, new in lengths for _ in range(count)]
    assert all(
        prompt == most_prompt and 1 <= new <= most
        for (prompt, new, *_), (most_prompt, most) in zip(rows, bounds, strict=True)
    )
    begin = 0
    for count, _, most in lengths:
        own = [row.new for row in rows[begin : begin + count]]
        # Multiples of the golden ratio: the error of a mean falls nearly as 1 / n.
        slack = most * (2 + 2 * count.bit_length()) / count + 1
        assert sum(own) / count == pytest.approx((most + 1) / 2, abs=slack)
        begin += count
    assert work.row_lengths(3, work.num_rows) == rows[3:]


@given(lengths=groups, page=st.sampled_from([1, 16, 32]))
def test_held_tokens_are_those_of_all_lengths(
    lengths: tuple[tuple[int, int, int], ...], page: int
) -> None:
    """The closed form against rows of every length that an answer may have."""
    work = _workload(lengths, ends_early=True)
    every = tuple(
        (count * (10**9 // most), prompt, new)
        for count, prompt, most in lengths
        for new in range(1, most + 1)
    )
    brute = _workload(every, ends_early=False)
    held = work.held_tokens(page)
    assert held == pytest.approx(
        min(brute.held_tokens(page), work.max_total_tokens + page), rel=1e-5
    )


@given(lengths=groups, ends=st.booleans(), data=st.data())
def test_some_rows_are_those_of_all(
    lengths: tuple[tuple[int, int, int], ...], ends: bool, data: st.DataObject
) -> None:
    work = _workload(lengths, ends_early=ends)
    first = data.draw(st.integers(0, work.num_rows + 2))
    last = data.draw(st.integers(first, work.num_rows + 5))
    assert work.row_lengths(first, last) == work.row_lengths(0, work.num_rows)[first:last]


def test_known_answers_are_as_long_as_told() -> None:
    work = _workload(((3, 5, 7), (2, 4, 9)), ends_early=False)
    assert work.row_lengths(0, 5) == [RowLength(5, 7)] * 3 + [RowLength(4, 9)] * 2
    assert work.expected_new_tokens == 39


def test_bounds_stay_bounds() -> None:
    """Memory is sized for the longest answer, whatever is expected."""
    work = _workload(((8, 5, 100),), ends_early=True)
    assert (work.max_new_tokens, work.max_total_tokens, work.total_new_tokens) == (100, 105, 800)
    assert work.expected_new_tokens == 404
    assert work.mean_new_tokens == 50.5
