"""Biases, bans and penalties against transformers' processors and OpenAI's formula; and that what
is drawn after them follows the exact distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from freight.model.batch import RowKey
from freight.runtime.penalties import History, adjust, is_adjusted
from freight.runtime.request import SamplingParams
from freight.runtime.sampler import Draw, sample

from .test_sampler import chi_square_limit, naive_probabilities, random_logits

VOCAB = 24
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def history(prompt: list[int], output: list[int]) -> History:
    return History(prompt=np.unique(np.asarray(prompt, dtype=np.int64)), output=output)


def adjusted(params: SamplingParams, past: History, seed: int, banned: Any = ()) -> torch.Tensor:
    logits = random_logits(1, seed, vocab=VOCAB)[0].clone()
    adjust(logits, params, past, banned)
    return logits


@settings(deadline=None)
@given(tokens, tokens, st.integers(0, 99), st.sampled_from([0.5, 1.3, 2.0]))
def test_repetition_penalty_of_transformers(
    prompt: list[int], output: list[int], seed: int, penalty: float
) -> None:
    ours = adjusted(SamplingParams(repetition_penalty=penalty), history(prompt, output), seed)
    theirs = random_logits(1, seed, vocab=VOCAB)
    ids = torch.tensor([prompt + output], dtype=torch.long)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, theirs)
    torch.testing.assert_close(ours, theirs[0])


@settings(deadline=None)
@given(tokens, tokens, st.integers(0, 99), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_of_openai(
    prompt: list[int], output: list[int], seed: int, presence: float, frequency: float
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    ours = adjusted(params, history(prompt, output), seed)
    expected = random_logits(1, seed, vocab=VOCAB)[0].double()
    for token, count in Counter(output).items():
        expected[token] -= count * frequency + presence
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)


def test_the_order_is_bias_then_ban_then_penalties() -> None:
    params = SamplingParams(
        logit_bias={0: 3.0, 2: 5.0, 4: -100},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    logits = torch.tensor([-1.0, -4.0, 1.0, 2.0, 7.0])
    adjust(logits, params, history([0, 1], [3, 3]), [2])
    expected = [(-1.0 + 3.0) / 2, -4.0 * 2, -np.inf, 2.0 / 2 - 2 * 0.25 - 0.5, -93.0]
    assert logits.tolist() == pytest.approx(expected)


def test_rows_that_need_no_change() -> None:
    assert not is_adjusted(SamplingParams(temperature=2, top_k=3, min_p=0.1), 5)
    assert is_adjusted(SamplingParams(min_tokens=3), 2)
    assert not is_adjusted(SamplingParams(min_tokens=3), 3)
    assert is_adjusted(SamplingParams(presence_penalty=1), 1)
    assert not is_adjusted(SamplingParams(frequency_penalty=1), 0)
    assert is_adjusted(SamplingParams(repetition_penalty=1.1), 0)


@pytest.mark.parametrize("seed", range(10))
def test_min_p_keeps_what_transformers_keeps(seed: int) -> None:
    logits = random_logits(1, seed, vocab=200)
    least, temperature = 0.02 * (seed + 1), 1.3
    theirs = MinPLogitsWarper(least)(None, logits / temperature).softmax(-1)[0]
    drawn = draw_many(logits, SamplingParams(temperature=temperature, min_p=least), 4000)
    kept = set((theirs > 0).nonzero().flatten().tolist())
    assert set(drawn) <= kept
    assert {token for token in kept if theirs[token] > 0.01} <= set(drawn)


def draw_many(
    logits: torch.Tensor,
    params: SamplingParams,
    num_draws: int,
    past: History | None = None,
    banned: Any = (),
) -> list[int]:
    """Draws of one row of logits, at as many positions."""
    draws = [
        Draw(
            row=RowKey(0),
            place=0,
            position=position,
            params=params,
            history=past or history([], []),
            banned=banned,
        )
        for position in range(num_draws)
    ]
    return sample(logits, draws)


SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=1.4, top_p=0.8),
    "min-p": SamplingParams(temperature=1.4, min_p=0.1),
    "min-p and the rest": SamplingParams(temperature=1.8, min_p=0.02, top_k=9, top_p=0.9),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.7),
    "bias": SamplingParams(temperature=1.0, logit_bias={1: 2.0, 5: -100, 9: -1.0}),
    "min-tokens": SamplingParams(temperature=1.0, min_tokens=9),
    "all": SamplingParams(
        temperature=1.5,
        min_p=0.03,
        top_k=12,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={2: 1.0},
        min_tokens=9,
    ),
}
PAST = history([0, 1, 4, 4], [2, 2, 7])
BANNED = (0, 11)


def exact(logits: Any, params: SamplingParams) -> Any:
    """The distribution by the settings' definitions, in float64."""
    values = np.asarray(logits, dtype=np.float64).copy()
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if params.min_tokens:
        values[list(BANNED)] = -np.inf
    for token in {*PAST.prompt.tolist(), *PAST.output}:
        factor = params.repetition_penalty
        values[token] *= factor if values[token] < 0 else 1 / factor
    for token, count in Counter(PAST.output).items():
        values[token] -= count * params.frequency_penalty + params.presence_penalty
    scaled = values / params.temperature
    weights = np.exp(scaled - scaled.max())
    values[weights < params.min_p] = -np.inf
    return naive_probabilities(values, params)


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_follow_the_exact_distribution(name: str) -> None:
    num_draws = 20_000
    logits = random_logits(1, 3, vocab=VOCAB) / 2
    params = SETTINGS[name]
    banned = BANNED if params.min_tokens else ()
    drawn = draw_many(logits, params, num_draws, PAST, banned)
    expected = exact(logits[0].numpy(), params) * num_draws
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    rare = ~often & (expected > 0)
    observed = np.append(counts[often], counts[rare].sum())
    wanted = np.append(expected[often], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_limit(len(wanted) - 1)


def test_greedy_rows_are_adjusted_and_others_are_left_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    before = logits.clone()
    params = [SamplingParams(), SamplingParams(logit_bias={0: 9}), SamplingParams(min_tokens=1)]
    draws = [
        Draw(row=RowKey(i), place=0, position=0, params=own, history=history([], []), banned=banned)
        for i, (own, banned) in enumerate(zip(params, [(), (), (2,)], strict=True))
    ]
    assert sample(logits, draws) == [2, 0, 1]
    assert torch.equal(logits, before)
