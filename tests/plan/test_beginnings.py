"""What rows begin with alike, in numbers, against counting it row by row."""

from __future__ import annotations

from dataclasses import replace
from operator import add, mul, ne
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.plan.beginnings import Beginnings, Shared
from freight.plan.workload import RowLength, Workload, evenly


class Asked(NamedTuple):
    """A request whose prompt begins with ``shared`` tokens of the beginning ``key``, or of none."""

    key: int
    shared: int
    own: int
    new: int
    rows: int


@st.composite
def datasets(draw: st.DrawFn) -> list[Asked]:
    """Those with the same beginning follow one another."""
    asked: list[Asked] = []
    for key in range(draw(st.integers(1, 6))):
        has_one = draw(st.booleans()) or not key
        shared = draw(st.sampled_from([16, 32, 48, 100])) if has_one else 0
        for _ in range(draw(st.integers(1, 4))):
            own, new = draw(st.integers(1, 40)), draw(st.integers(1, 30))
            asked.append(Asked(key if has_one else -1, shared, own, new, draw(st.integers(1, 5))))
    return asked


def beginnings_of(asked: list[Asked]) -> Beginnings:
    keys, shared, own, new, rows = map(np.array, zip(*asked, strict=True))
    return Beginnings.of(
        (Shared(round(np.average(shared, weights=rows)), len({*keys.tolist()} - {-1})),),
        keys=keys,
        tokens=shared,
        prompts=shared + own,
        totals=shared + own + new,
        rows=rows,
    )


def work_of(lengths: tuple[tuple[int, int, int], ...], beginnings: Beginnings) -> Workload:
    rows, prompts, new = zip(*lengths, strict=True)
    return Workload(
        num_rows=sum(rows),
        max_prompt_tokens=max(prompts),
        max_new_tokens=max(new),
        max_total_tokens=max(map(add, prompts, new)),
        total_prompt_tokens=sum(map(mul, rows, prompts)),
        total_new_tokens=sum(map(mul, rows, new)),
        lengths=lengths,
        beginnings=beginnings,
    )


@settings(deadline=None, max_examples=200)
@given(asked=datasets(), page=st.sampled_from([1, 4, 16, 32, 64]))
def test_bounds_hold_for_any_rows_in_succession(asked: list[Asked], page: int) -> None:
    told = beginnings_of(asked)
    rows = [one for one in asked for _ in range(one.rows)]
    for count in range(1, len(rows) + 1):
        most_begun = most_tokens = 0
        for first in range(len(rows) - count + 1):
            met = {one.key: one.shared for one in rows[first : first + count] if one.key >= 0}
            most_begun, most_tokens = max(most_begun, len(met)), max(most_tokens, sum(met.values()))
        held = told.most_held(count)
        assert held.beginnings >= most_begun and held.tokens >= most_tokens
        if count & (count - 1) == 0 or count == len(rows):
            assert (held.beginnings, held.tokens) == (most_begun, most_tokens)
    left = [one.shared % page + one.own for one in asked]
    most = told.own_prompt_tokens(page)
    assert max(left) <= most < max(one.own for one in asked) + page
    assert told.own_total_tokens(page) >= max(
        own + one.new for own, one in zip(left, asked, strict=True)
    )


@settings(deadline=None, max_examples=100)
@given(asked=datasets(), turns=st.integers(2, 4))
def test_bounds_hold_for_rows_that_are_dealt_out(asked: list[Asked], turns: int) -> None:
    """One request in turn to each, or what was left of one and then a stretch of others."""
    told = beginnings_of(asked)
    apart = told.apart(told.groups, min(one.rows for one in asked))
    rows = [one for one in asked[::turns] for _ in range(one.rows)]
    for count in range(1, len(rows) + 1):
        for first in range(len(rows) - count + 1):
            met = {one.key: one.shared for one in rows[first : first + count] if one.key >= 0}
            held = apart.most_held(count)
            assert held.beginnings >= len(met) and held.tokens >= sum(met.values())
    beside = told.beside(told.groups)
    rows = [one for one in asked for _ in range(one.rows)]
    for count in range(1, len(rows)):
        stretch = [asked[0], *rows[len(rows) - count :]]
        met = {one.key: one.shared for one in stretch if one.key >= 0}
        held = beside.most_held(count)
        assert held.beginnings >= len(met) and held.tokens >= sum(met.values())
    assert apart.all.beginnings <= told.all.beginnings >= beside.all.beginnings


def test_what_all_have_is_told_to_the_token() -> None:
    told = Beginnings.of_all(100, 500, 140, 150)
    assert [told.own_prompt_tokens(page) for page in (1, 16, 64)] == [40, 44, 76]
    assert told.own_total_tokens(16) == 54
    assert {told.most_held(rows)[1:] for rows in (1, 3, 100, 500, 900)} == {(1, 100)}


@given(
    count=st.integers(1, 60),
    begun=st.integers(0, 20),
    cut=st.integers(0, 60),
    base=st.integers(0, 5),
)
def test_beginnings_have_equal_parts_of_rows(count: int, begun: int, cut: int, base: int) -> None:
    """Whichever part of the rows is asked for."""
    begun, cut = min(begun, count), min(cut, count)
    alike = RowLength(50, 3, 32)
    rows = [*evenly(alike, count, begun, range(count), base)]
    assert rows == [
        *evenly(alike, count, begun, range(cut), base),
        *evenly(alike, count, begun, range(cut, count), base),
    ]
    assert sum(row.computes for row in rows) == begun
    numbers = [row.beginning for row in rows]
    assert numbers == sorted(numbers)
    if not begun:
        assert {*numbers} == {base - 1}
        return
    sizes = [numbers.count(base + number) for number in range(begun)]
    assert max(sizes) - min(sizes) <= 1
    before = [-2, *numbers[:-1]]
    assert [row.computes for row in rows] == [*map(ne, numbers, before)]


def test_what_rows_hold_is_never_less_than_a_token() -> None:
    """Long beginnings of rows that soon end, beside rows that stay and have none."""
    asked = [Asked(0, 1984, 16, 2, 1)] * 32 + [Asked(-1, 0, 32, 100, 1)] * 32
    told = beginnings_of(asked)
    lengths = (32, 2000, 2), (32, 32, 100)
    work = work_of(lengths, replace(told, groups=(Shared(1984, 1), Shared(0, 0))))
    alone = replace(work, beginnings=None, lengths=((32, 16, 2), (32, 32, 100)))
    assert work.held_tokens(16, 16) == pytest.approx(alone.held_tokens(16))
    assert work.held_tokens(16) > work.held_tokens(16, 16) > 80


@pytest.mark.parametrize("page", [0, 16, 32])
def test_rows_of_a_workload_share_in_whole_pages(page: int) -> None:
    """Of groups of rows, each with its own mean; numbers begin at the first that is asked for."""
    asked = [Asked(0, 48, 10, 4, 3), Asked(1, 48, 10, 4, 3), Asked(-1, 0, 30, 4, 2)]
    told = beginnings_of(asked)
    groups = Shared(48, 2), Shared(0, 0)
    work = work_of(((6, 58, 4), (2, 30, 4)), replace(told, groups=groups))
    kept = 48 // page * page if page else 0
    assert work.mean_shared_tokens(page) == 6 * kept / 8
    assert work.mean_computed_tokens(page) == (58 * 6 + 60 - 6 * kept + 2 * kept) / 8
    alone = [RowLength(30, 4)] * 2
    if not page:
        assert work.row_lengths(0, 8) == [RowLength(58, 4)] * 6 + alone
        return
    three = [RowLength(58, 4, kept, 0, True), *[RowLength(58, 4, kept, 0)] * 2]
    more = [row._replace(beginning=1) for row in three]
    assert work.row_lengths(0, 8, page) == [*three, *more, *alone]
    assert work.row_lengths(3, 8, page) == [*three, *alone]
    assert work.row_lengths(2, 5, page) == [three[2], *more[:2]]
