"""Guesses at what comes next: where they are found, how many are tried, and what is remembered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.runtime.answers import Answer, Row
from freight.runtime.drafts import Drafts, Guesses, find_continuation
from freight.runtime.request import Request, SamplingParams

BORDER = -1


def row(prompt: Sequence[int], *new_ids: int, index: int = 0) -> Row:
    request = Request(index=index, prompt_ids=prompt, params=SamplingParams(max_tokens=100))
    (own,) = Answer(request, tokenizer=None).start(1)
    own.new_ids += new_ids
    return own


def drafts(most: int = 4) -> Drafts:
    return Drafts(most, Guesses())


@given(
    text=st.lists(st.integers(BORDER, 2), max_size=40),
    context=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    most=st.integers(1, 6),
)
def test_the_longest_match_that_is_last_against_brute_force(
    text: list[int], context: list[int], most: int
) -> None:
    best, place = 0, None
    for end in range(len(text) - 1):  # something must stand behind it
        alike = 0
        while alike < len(context) and alike <= end and text[end - alike] == context[-1 - alike]:
            alike += 1
        if alike and alike >= best:
            best, place = alike, end
    wanted: list[int] = []
    if place is not None:
        behind = text[place + 1 :]
        wanted = (behind * most)[:most]
        if BORDER in wanted:
            wanted = wanted[: wanted.index(BORDER)]
    found = find_continuation(
        np.array(text, dtype=np.int32), np.array(context, dtype=np.int32), most
    )
    assert found == (best, wanted)


def test_a_row_quotes_its_prompt_and_goes_on_in_circles() -> None:
    assert drafts().propose(row([5, 6, 7, 8, 9, 1, 5], 6), 4) == [7, 8, 9, 1]
    assert drafts().propose(row([5, 6, 7, 8, 9, 1, 5], 6), 2) == [7, 8]
    assert drafts(6).propose(row([1], 2, 3, 4, 2, 3, 4), 6) == [2, 3, 4, 2, 3, 4]
    # One token alike is not enough.
    assert drafts().propose(row([5, 6, 7], 5), 4) == []
    assert drafts().propose(row([5]), 4) == []


def test_the_longest_match_wins_in_its_own_text_or_in_answers_before() -> None:
    found = drafts()
    found.keep(row([50, 51], 1, 2, 3, 4, 5))
    assert found.propose(row([60, 51], 1, 2), 9) == [3, 4, 5]
    assert found.propose(row([2, 8, 51], 1, 2), 9) == [3, 4, 5]
    assert found.propose(row([1, 2, 8, 51], 7, 1, 2), 2) == [8, 51]
    # As an answer began after the same end of a prompt; and nothing behind its own end.
    assert found.propose(row([9, 9, 50, 51]), 2) == [1, 2]
    assert found.propose(row([9], 4, 5), 4) == []


def test_fewer_are_tried_where_they_fail() -> None:
    guesses = Guesses()
    found = Drafts(8, guesses)
    own = row([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 5], 6)
    assert len(found.propose(own, 20)) == 8
    found.note(own, 8, 2)
    assert len(found.propose(own, 20)) == 3
    found.note(own, 3, 3)
    assert len(found.propose(own, 20)) == 6
    found.note(own, 6, 0)
    assert len(found.propose(own, 20)) == 1
    found.note(own, 0, 0)  # none was tried
    found.note(own, 1, 1)
    assert len(found.propose(own, 20)) == 2
    assert (guesses.num_tried, guesses.num_true) == (18, 6)
    # Another row starts anew.
    assert len(found.propose(row([5, 6, 7, 8, 5], 6, index=1), 20)) == 8


@pytest.mark.parametrize("length", [1, 1000, 100_000])
def test_what_is_remembered_is_bounded_and_the_newest(length: int) -> None:
    found = drafts()
    for number in range(300):
        found.keep(row([number], *range(1000, 1000 + length), number, number + 1, number + 2))
    assert len(found._past) == 1 << 15
    assert found.propose(row([1], 299, 300), 1) == [301]
    assert found.propose(row([1], 298, 299), 1) == [300]
