"""How long answers are expected to be, and what rows are expected to grow to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.plan.admission import MARGIN, Lengths, Outlook, Pages, fit
from freight.plan.room import Room


@pytest.mark.parametrize("longest", [2, 7, 128])
def test_where_nothing_is_known_any_length_is_as_likely(longest: int) -> None:
    lengths = Lengths(expected=(longest + 1) / 2, longest=longest)
    expected = 1 - np.arange(longest + 1) / longest
    np.testing.assert_allclose(np.exp(lengths.log_survival()), expected, atol=1e-9)


def test_answers_that_are_expected_to_be_as_long_as_they_may() -> None:
    lengths = Lengths(expected=9, longest=9)
    assert lengths.log_survival()[:-1].tolist() == [0.0] * 9


def test_a_row_that_has_outlived_what_was_expected_may_go_on() -> None:
    """Of answers of 9 tokens on average nobody expects one of 2000, but there it is."""
    survival = Lengths(expected=9, longest=2048).log_survival()
    outlook = Outlook(2048, 16, survival)
    curve = outlook.curve([2100], [48], [2000])
    assert np.isfinite(curve).all() and curve[0, 0] == -(-2100 // 16)
    assert outlook.fits(curve, 200) and not outlook.fits(curve, 100)


def test_rows_that_cannot_stop_say_nothing_of_those_that_can() -> None:
    lengths = Lengths(expected=8.5, longest=16)
    for before in range(16):
        lengths.note(before, ends=before == 15, may_stop=False, stops=False)
    alone = Lengths(expected=8.5, longest=16).log_survival()
    np.testing.assert_array_equal(lengths.log_survival(), alone)
    assert lengths.mean() > 8.5


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=200, max_size=300),
)
def test_shares_that_outlive_a_length_are_learnt_although_some_are_cut(
    rows: list[tuple[int, int]],
) -> None:
    """(how long it would be, how long it may be): by the estimator's definition, product by
    product, with one more row at each length that goes as was expected."""
    lengths = Lengths(expected=6.5, longest=12)
    for own, most in rows:
        for before in range(min(own, most)):
            stops = before == own - 1
            lengths.note(before, ends=stops or before == most - 1, may_stop=True, stops=stops)
    share, expected = 1.0, [1.0]
    for before in range(12):
        reached = sum(min(own, most) > before for own, most in rows)
        ended = sum(own == before + 1 <= most for own, most in rows)
        share *= 1 - (ended + 1 / (12 - before)) / (reached + 1)
        expected.append(share)
    np.testing.assert_allclose(np.exp(lengths.log_survival()), expected, atol=1e-9)
    answers = [min(own, most) for own, most in rows]
    assert lengths.mean() == pytest.approx(sum(answers) / len(answers), rel=0.05)


def test_the_mean_is_right_although_short_answers_end_first() -> None:
    """Of answers of 1 to 100 tokens, those of a few rows at every sweep: when a third has ended the
    others, which are longer, are under way."""
    lengths = Lengths(expected=50.5, longest=100)
    answers = [(37 * row) % 100 + 1 for row in range(400)]
    for sweep in range(60):
        for row, answer in enumerate(answers):
            made = sweep - row // 8
            if 0 <= made < answer:
                ends = made == answer - 1
                lengths.note(made, ends=ends, may_stop=True, stops=ends)
    assert 100 < lengths.num_ended < 200
    assert lengths.mean() == pytest.approx(50.5, rel=0.1)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 19), st.integers(1, 20), st.booleans()),
        max_size=6,
    ),
    expected=st.floats(1.5, 20),
    page_tokens=st.sampled_from([1, 4, 16]),
)
def test_an_outlook_is_never_below_what_rows_are_expected_to_hold(
    rows: list[tuple[int, int, int, bool]], expected: float, page_tokens: int
) -> None:
    """Sweep by sweep, by brute force; where stretches are one sweep long it is just that."""
    longest, deviations = 20, MARGIN
    survival = Lengths(expected=expected, longest=longest).log_survival()
    outlook = Outlook(longest, page_tokens, survival)
    rows = [(tokens, made, min(left, longest - made), known) for tokens, made, left, known in rows]
    held, variance, most = np.zeros(longest), np.zeros(longest), np.zeros(longest)
    for tokens, made, left, known in rows:
        for sweep in range(left):
            outlived = survival[min(longest, made + sweep)] - survival[made]
            share = 1.0 if known else np.exp(outlived)
            pages = -(-(tokens + sweep) // page_tokens)
            held[sweep] += share * pages
            variance[sweep] += share * (1 - share) * pages**2
            most[sweep] += pages
    curve = outlook.curve(
        [tokens for tokens, _, _, _ in rows],
        [left for _, _, left, _ in rows],
        [-1 if known else made for _, made, _, known in rows],
    )
    np.testing.assert_allclose(curve[:, :8], [held[:8], variance[:8], most[:8]], atol=1e-9)
    assert curve[0].max() >= held.max() - 1e-9 and curve[2].max() >= most.max() - 1e-9
    for num_pages in range(int(most.max()) + 2):
        needed = held + deviations * np.sqrt(variance)
        # To a millionth of a page, as it rounds: the root of a variance magnifies what is lost.
        fits = (needed <= num_pages + 1.001e-6) | (most <= num_pages)
        assert outlook.fits(curve, num_pages) <= fits.all()
    assert outlook.fits(curve, int(curve[2].max()))


@st.composite
def taken(draw: st.DrawFn, most: int, stretches: int) -> Pages:
    """Pages that are expected, their variance, and the most, [3, stretches]; the first and the last
    are the same where answers are known."""
    pages = np.array(draw(st.lists(st.integers(0, most), min_size=stretches, max_size=stretches)))
    share = draw(st.sampled_from([1.0, 0.9, 0.31, 0.0]))
    return np.stack([share * pages, share * (1 - share) * pages, pages.astype(np.float64)])


@settings(deadline=None, max_examples=300)
@given(data=st.data(), stretches=st.integers(1, 5), num_pages=st.integers(0, 300))
def test_as_many_rows_of_a_kind_fit_as_fit_one_by_one(
    data: st.DataObject, stretches: int, num_pages: int
) -> None:
    there, curve = data.draw(taken(200, stretches)), data.draw(taken(9, stretches))
    is_known = all((own[0] == own[2]).all() for own in (there, curve))
    room = Room(num_pages, there[2] if is_known else there, is_known=is_known)
    own, count = curve[2] if is_known else curve, 0
    while count < 400 and fit(there + (count + 1) * curve, num_pages):
        assert room.fits(own)
        room.take(own)
        count += 1
    assert room.fits(own) == (count == 400)
