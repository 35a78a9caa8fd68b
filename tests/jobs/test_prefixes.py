"""Beginnings that prompts share, against a search by hand over small datasets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.jobs.prefixes import PREFIX_BLOCK, SharedPrefixes, find_prefixes

Prompt = list[int]


def find(prompts: Sequence[Prompt]) -> SharedPrefixes:
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    return find_prefixes(tokens, np.cumsum(lengths) - lengths, lengths)


def by_hand(prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """For each prompt the beginning at which most is spared in all, the shorter of equal ones."""
    chosen = []
    for prompt in prompts:
        best, spared = (), 64
        for length in range(PREFIX_BLOCK, len(prompt), PREFIX_BLOCK):
            first = prompt[:length]
            alike = sum(len(own) > length and own[:length] == first for own in prompts)
            if (alike - 1) * length > spared:
                best, spared = tuple(first), (alike - 1) * length
        chosen.append(best)
    return [own if chosen.count(own) > 1 else () for own in chosen]


# Blocks of one token each, so that prompts often agree for a while.
blocks = st.lists(st.sampled_from([1, 2]), max_size=6)
prompts = st.builds(
    lambda own, rest: [token for token in own for _ in range(PREFIX_BLOCK)] + [9] * rest,
    blocks,
    st.integers(0, 20),
)


@settings(deadline=None, max_examples=200)
@given(dataset=st.lists(prompts, min_size=1, max_size=12))
def test_each_prompt_takes_what_spares_most(dataset: list[Prompt]) -> None:
    found = find(dataset)
    expected = by_hand(dataset)
    spared = sum(map(len, expected)) - sum(len(own) for own in set(expected))
    if spared < 0.05 * sum(map(len, dataset)) or not spared:
        assert not found.are_any
        return
    assert found.num_tokens.tolist() == [len(own) for own in expected]
    keys = dict(zip(expected, found.keys.tolist(), strict=True))
    assert found.keys.tolist() == [keys[own] for own in expected]
    assert sorted(key for own, key in keys.items() if own) == list(range(len(keys) - (() in keys)))
    assert keys.get((), -1) == -1


def test_a_common_beginning_of_all() -> None:
    common = list(range(100, 484))
    dataset = [[*common, *range(row, row + 32)] for row in range(50)]
    found = find(dataset)
    assert set(found.keys.tolist()) == {0} and set(found.num_tokens.tolist()) == {384}


def test_a_prompt_is_never_all_beginning() -> None:
    found = find([[1] * 64] * 8)
    assert set(found.num_tokens.tolist()) == {48}


def test_little_to_spare_is_left_alone() -> None:
    dataset = [[7] * 48 + [row] * 2000 for row in range(3)]
    assert not find(dataset).are_any
    assert not find([[1, 2, 3]]).are_any and not find([[], [1] * 40, []]).are_any
