"""Beginnings that prompts share, against a search by hand over small datasets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from operator import mul

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.jobs.prefixes import PREFIX_BLOCK, SharedPrefixes, find_prefixes

Prompt = list[int]


def find(prompts: Sequence[Prompt], samples: Sequence[int] | None = None) -> SharedPrefixes:
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    rows = None if samples is None else np.array(samples, dtype=np.int64)
    return find_prefixes(tokens, np.cumsum(lengths) - lengths, lengths, rows)


def most_spared(prompts: Sequence[Prompt], samples: Sequence[int]) -> tuple[int, int]:
    """By all choices of beginnings, each of which costs what it has and 64 tokens more: what is
    spared, and how many tokens those beginnings that spare most save at least."""
    beginnings = {
        tuple(prompt[:length])
        for prompt in prompts
        for length in range(PREFIX_BLOCK, len(prompt), PREFIX_BLOCK)
    }
    alike = [
        own
        for own in sorted(beginnings)
        if sum(n for p, n in zip(prompts, samples, strict=True) if has(p, own)) > 1
    ]
    found = [
        (own, own + 64 * count)
        for count in range(len(alike) + 1)
        for chosen in combinations(alike, count)
        for own in [spared(prompts, samples, chosen)]
    ]
    best = max(own for own, _ in found)
    return best, min(saved for own, saved in found if own == best)


def has(prompt: Prompt, beginning: tuple[int, ...]) -> bool:
    return len(prompt) > len(beginning) and tuple(prompt[: len(beginning)]) == beginning


def spared(
    prompts: Sequence[Prompt], samples: Sequence[int], chosen: Sequence[tuple[int, ...]]
) -> int:
    kept = sum(
        count * max((len(own) for own in chosen if has(prompt, own)), default=0)
        for prompt, count in zip(prompts, samples, strict=True)
    )
    return kept - sum(len(own) + 64 for own in chosen)


# Blocks of one token each, so that prompts often agree for a while.
blocks = st.lists(st.sampled_from([1, 2]), max_size=4)
prompts = st.builds(
    lambda own, rest: [token for token in own for _ in range(PREFIX_BLOCK)] + [9] * rest,
    blocks,
    st.integers(0, 20),
)
datasets = st.lists(st.tuples(prompts, st.integers(1, 5)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(dataset=datasets, all_alone=st.booleans())
def test_no_other_beginnings_spare_more(dataset: list[tuple[Prompt, int]], all_alone: bool) -> None:
    own = [prompt for prompt, _ in dataset]
    samples = [1 if all_alone else count for _, count in dataset]
    found = find(own, None if all_alone else samples)
    beginnings: dict[int, tuple[int, ...]] = {}
    for prompt, key, count in zip(own, found.keys.tolist(), found.num_tokens.tolist(), strict=True):
        assert (key >= 0) == (count > 0)
        if key >= 0:
            assert count % PREFIX_BLOCK == 0 and has(prompt, tuple(prompt[:count]))
            assert beginnings.setdefault(key, tuple(prompt[:count])) == tuple(prompt[:count])
    assert sorted(beginnings) == list(range(len(beginnings)))
    best, least_saved = most_spared(own, samples)
    if not beginnings:
        assert least_saved < 0.05 * sum(map(mul, samples, map(len, own))) or not least_saved
    else:
        assert spared(own, samples, [*beginnings.values()]) == best
        held = sum(map(mul, samples, found.num_tokens.tolist()))
        assert held == best + sum(len(beginning) + 64 for beginning in beginnings.values())


def test_documents_with_questions_behind_one_system_prompt() -> None:
    """What all share spares more tokens than any one document, but fewer of each row."""
    system = list(range(32))
    documents = [[*system, *range(1000 * d, 1000 * d + 480)] for d in range(20)]
    dataset = [[*document, 7, q, d] for d, document in enumerate(documents) for q in range(10)]
    found = find(dataset)
    assert set(found.num_tokens.tolist()) == {512}
    assert len(set(found.keys.tolist())) == 20


def test_samples_share_their_prompt() -> None:
    dataset = [[*range(100 * row, 100 * row + 90 + row)] for row in range(6)]
    found = find(dataset, [8, 8, 1, 2, 8, 2])
    assert found.num_tokens.tolist() == [80, 80, 0, 80, 80, 80]
    assert found.keys.tolist() == [0, 1, -1, 2, 3, 4]
    # Not where it is short, and nothing else is shared.
    assert not find([[1] * 30, [2] * 30], [4, 4]).are_any


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
