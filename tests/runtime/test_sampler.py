"""Sampling against naive numpy, transformers' filters and exact distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from freight.model.batch import RowKey
from freight.runtime import sampler
from freight.runtime.penalties import History
from freight.runtime.request import SamplingParams
from freight.runtime.sampler import Draw, uniform

VOCAB = 37
NOTHING = History(prompt=np.empty(0, dtype=np.int64), output=())


def sample(logits: Any, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token per row, of rows that have no tokens yet."""
    draws = [
        Draw(row=RowKey(row), place=row, position=position, params=own, history=NOTHING)
        for row, (own, position) in enumerate(zip(params, positions, strict=True))
    ]
    return sampler.sample(logits, draws)


def naive_probabilities(logits: Any, params: SamplingParams) -> Any:
    """Temperature, top-k, top-p as their definitions say, ties with the last kept."""
    scaled = np.asarray(logits, dtype=np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    if params.top_k:
        weights[weights < np.sort(weights)[::-1][min(params.top_k, len(weights)) - 1]] = 0
    weights /= weights.sum()
    if params.top_p < 1:
        descending = np.sort(weights)[::-1]
        gathered, last = 0.0, 0
        while gathered < params.top_p and last < len(descending):
            gathered += descending[last]
            last += 1
        weights[weights < descending[last - 1]] = 0
    return weights / weights.sum()


def naive_token(logits: Any, params: SamplingParams, position: int) -> int:
    sums = np.cumsum(naive_probabilities(logits, params))
    return int(np.searchsorted(sums, uniform(params.seed, position) * sums[-1], side="right"))


settings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.2, 1e-9]),
    seed=st.integers(0, 2**63 - 1),
)


def random_logits(num_rows: int, seed: int, ties: bool = False, vocab: int = VOCAB) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if ties else logits


@given(st.lists(settings, min_size=1, max_size=8), st.integers(0, 1000), st.booleans())
def test_tokens_equal_the_naive_ones(rows: list[SamplingParams], seed: int, ties: bool) -> None:
    logits = random_logits(len(rows), seed, ties)
    tokens = sample(logits, rows, range(len(rows)))
    for row, params in enumerate(rows):
        if params.temperature == 0:
            assert tokens[row] == int(np.argmax(logits[row].numpy()))
        else:
            assert tokens[row] == naive_token(logits[row].numpy(), params, row)


@given(st.data(), st.lists(settings, min_size=2, max_size=9), st.integers(0, 1000), st.booleans())
def test_a_row_does_not_see_its_batch(
    data: st.DataObject, rows: list[SamplingParams], seed: int, ties: bool
) -> None:
    logits = random_logits(len(rows), seed, ties)
    positions = data.draw(st.lists(st.integers(0, 99), min_size=len(rows), max_size=len(rows)))
    together = sample(logits, rows, positions)
    order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
    apart = sample(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert apart == [together[i] for i in order]


@pytest.mark.parametrize("chunk", [1, VOCAB * 2, 10**6])
def test_chunks_and_wide_nuclei_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(64, 5)
    rows = [SamplingParams(temperature=2.0, top_p=0.9, seed=seed) for seed in range(64)]
    expected = [naive_token(logits[row].numpy(), rows[row], 3) for row in range(64)]
    monkeypatch.setattr(sampler, "_CHUNK_VALUES", chunk)
    monkeypatch.setattr(sampler, "_NUCLEUS_GUESS", 4)
    assert sample(logits, rows, [3] * 64) == expected


@pytest.mark.parametrize("seed", range(20))
def test_filters_keep_what_transformers_keeps(seed: int) -> None:
    logits = random_logits(1, seed, vocab=500)
    params = SamplingParams(temperature=0.7, top_k=1 + 17 * seed, top_p=1 - 0.04 * (seed + 1))
    scores = logits / params.temperature
    scores = TopKLogitsWarper(params.top_k)(None, scores)
    scores = TopPLogitsWarper(params.top_p)(None, scores)
    theirs = scores.softmax(-1)[0].double().numpy()
    ours = naive_probabilities(logits[0].numpy(), params)
    assert ((ours > 0) == (theirs > 0)).all()
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# 99.9 % quantiles of chi-square; by Wilson and Hilferty's approximation, good to 1 % here.
def chi_square_limit(freedom: int) -> float:
    spread = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - spread + 3.0902 * math.sqrt(spread)) ** 3)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=6),
        SamplingParams(temperature=1.7, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9),
    ],
)
@pytest.mark.parametrize("by_seed", [True, False], ids=["seeds", "positions"])
def test_frequencies_follow_the_distribution(params: SamplingParams, by_seed: bool) -> None:
    num_draws = 20_000
    logits = random_logits(1, 11) / 2
    seeds = range(num_draws) if by_seed else [4] * num_draws
    positions = [9] * num_draws if by_seed else range(num_draws)
    rows = [
        SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=seed
        )
        for seed in seeds
    ]
    tokens = sample(logits.expand(num_draws, VOCAB), rows, positions)
    expected = naive_probabilities(logits[0].numpy(), params) * num_draws
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 5)
    often = expected >= 5
    observed = np.append(counts[often], counts[rare].sum())
    wanted = np.append(expected[often], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_limit(len(wanted) - 1)


def test_uniform_numbers_are_pinned_and_spread() -> None:
    """The values are part of what a seed means: they must never change."""
    assert uniform(0, 0) == 0.0564663990004608
    assert uniform(2**63 - 1, 5) != uniform(2**63 - 2, 5) != uniform(5, 2**63 - 2)
    numbers = np.array([uniform(seed, 2 * seed) for seed in range(4096)])
    assert 0 <= numbers.min() and numbers.max() < 1
    observed = np.histogram(numbers, bins=64, range=(0, 1))[0]
    assert (((observed - 64) ** 2) / 64).sum() < chi_square_limit(63)


def test_largest_draw_stays_inside_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: 1 - 2.0**-52)
    rows = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)] * 50
    for seed in range(20):
        logits = random_logits(100, seed)
        assert max(sample(logits, rows, [0] * 100)) < VOCAB


def test_extremes() -> None:
    cold = SamplingParams(temperature=1e-300)
    hot = SamplingParams(temperature=1e300, top_k=2)
    masked = torch.tensor([[-math.inf, 1.0, -math.inf, 0.5]] * 3)
    tokens = sample(masked, [cold, hot, SamplingParams()], [0, 1, 2])
    assert tokens[0] == 1 and tokens[1] in (1, 3) and tokens[2] == 1
    assert sample(torch.empty(0, 5), [], []) == []
    assert sample(torch.ones(1, 5), [SamplingParams()], [0]) == [0]


@pytest.mark.parametrize("penalty", [5e-324, 1e-45, 1e-40, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_no_penalty_leads_out_of_the_vocabulary(penalty: float, top_p: float) -> None:
    own = SamplingParams(repetition_penalty=penalty, temperature=1.0, top_p=top_p)
    history = History(prompt=np.arange(3), output=(4,))
    for values in (torch.linspace(-9, 9, 8), torch.zeros(8)):
        draws = [
            Draw(row=RowKey(0), place=0, position=at, params=own, history=history)
            for at in range(20)
        ]
        tokens = sampler.sample(values[None].clone(), draws)
        assert all(0 <= token < 8 for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_bans_that_leave_nothing_count_for_nothing(temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_tokens=2, max_tokens=5)
    logits = torch.tensor([[0.0, 0.0, 50.0, 0.0]])
    draw = Draw(row=RowKey(0), place=0, position=3, params=params, history=NOTHING)
    for banned, wanted in (((0, 1, 2, 3), 2), ((3, 2, 2, 1, 0, 0), 2)):
        assert sampler.sample(logits.clone(), [replace(draw, banned=banned)]) == [wanted]
    one = sampler.sample(logits.clone(), [replace(draw, banned=(2, 2, 2, 1, 0))])
    assert one == [3]
    biased = replace(params, logit_bias={2: -100})
    none = replace(draw, params=biased, banned=(0, 1, 2, 3))
    assert sampler.sample(logits.clone(), [none])[0] != 2


def test_seeds_are_numbers_of_64_bits() -> None:
    assert uniform(-1, 5) == uniform(2**64 - 1, 5) != uniform(1, 5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_logits_that_are_no_numbers_no_token_is_chosen(value: float, temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2], logits[2, 3] = value, 50.0
    found = sample(logits, [SamplingParams(temperature=temperature)] * 3, [0, 0, 0])
    assert found[0] != sampler.NO_TOKEN == found[1] and found[2] == 3
