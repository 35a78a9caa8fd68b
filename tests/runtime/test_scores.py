"""Log-probabilities against log-softmax, whole and merged over chunks of the head."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.runtime import scores
from freight.runtime.scores import (
    STATE_COLUMNS,
    RunningScores,
    ScoreLog,
    Scores,
    join_states,
    score,
)


def random_logits(num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 5


def check(found: Scores, logits: torch.Tensor, targets: list[int], num_top: int) -> None:
    expected = logits.double().log_softmax(-1)
    own = expected.gather(1, torch.tensor(targets)[:, None])[:, 0]
    np.testing.assert_allclose(found.logprobs, own.numpy(), atol=1e-5)
    top = expected.topk(num_top, dim=-1)
    np.testing.assert_allclose(found.top_logprobs, top.values.numpy(), atol=1e-5)
    assert (found.top_ids == top.indices.numpy()).all()


@settings(deadline=None)
@given(st.data())
def test_running_scores_are_those_of_the_whole(data: st.DataObject) -> None:
    num_rows, vocab = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 60))
    num_top = data.draw(st.integers(1, min(6, vocab)))
    logits = random_logits(num_rows, vocab, data.draw(st.integers(0, 99)))
    targets = data.draw(st.lists(st.integers(0, vocab - 1), min_size=num_rows, max_size=num_rows))
    chunk, step = data.draw(st.integers(1, vocab)), data.draw(st.integers(1, num_rows))
    state = torch.full((num_rows, STATE_COLUMNS + 2 * num_top), torch.nan)
    running = RunningScores(state)
    running.clear()
    for first in range(0, vocab, chunk):
        for start in range(0, num_rows, step):
            part = logits[start : start + step, first : first + chunk].clone()
            running.merge(start, part, first, torch.tensor(targets[start : start + step]))
    found = running.result()
    check(found, logits, targets, num_top)
    ranks = (logits > logits.gather(1, torch.tensor(targets)[:, None])).sum(-1) + 1
    for rank, known in zip(ranks.tolist(), found.ranks.tolist(), strict=True):
        assert known == (rank if rank <= num_top else 0)


@settings(deadline=None)
@given(st.integers(0, 99), st.sampled_from([1, 50, 10**6]), st.integers(0, 5))
def test_scores_of_new_tokens(seed: int, chunk: int, num_top: int) -> None:
    logits = random_logits(4, 30, seed)
    places, token_ids = [0, 1, 1, 3, 2], [5, 0, 29, int(logits[3].argmax()), 7]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "_CHUNK_VALUES", chunk)
        found = score(logits, places, token_ids, num_top)
    check(found, logits[places], token_ids, num_top)
    ranks = [int((logits[p] > logits[p, t]).sum()) + 1 for p, t in zip(places, token_ids)]  # noqa: B905
    assert found.ranks.tolist() == ranks and ranks[3] == 1


def test_a_log_keeps_what_its_row_asks_for() -> None:
    logits = random_logits(2, 30, 1)
    log = ScoreLog(5, 2)
    for step in range(3):
        log.append(score(logits, [0, 1], [step, 4], 6), 1 if step == 2 else 0)
    kept = log.result()
    expected = score(logits, [0, 0, 1], [0, 1, 4], 2)
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(kept, name), getattr(expected, name))
    assert len(kept) == 3


@pytest.mark.parametrize("num_top", [0, 1, 4])
@pytest.mark.parametrize("borders", [(), (7,), (2, 2, 9), (0, 11)])
def test_states_of_parts_are_that_of_the_whole(borders: tuple[int, ...], num_top: int) -> None:
    """Of parts of any size, which may have nothing; of equal logits the first is the highest."""
    torch.manual_seed(3)
    logits = torch.randn(6, 11) if num_top > 1 else torch.randint(-2, 3, (6, 11)).float()
    targets = torch.tensor([0, 1, 6, 7, 10, -1])
    states = []
    for first, last in pairwise([0, *borders, 11]):
        states.append(torch.empty(6, STATE_COLUMNS + 2 * num_top))
        own = RunningScores(states[-1])
        own.clear()
        if first < last:
            own.merge(0, logits[:, first:last].clone(), first, targets)
    found = RunningScores(join_states(states)).result()
    expected = score(logits, [*range(6)], targets.clamp(min=0).tolist(), num_top)
    known = slice(0, 5)
    assert found.logprobs[known] == pytest.approx(expected.logprobs[known], abs=1e-6)
    assert np.isneginf(found.logprobs[5])
    assert np.array_equal(found.top_ids, _first_of(logits, num_top))


def _first_of(logits: torch.Tensor, num_top: int) -> np.ndarray:
    return logits.argsort(dim=-1, descending=True, stable=True)[:, :num_top].numpy()


def test_logits_that_are_no_numbers_have_no_scores_and_others_beside_them_have() -> None:
    running = RunningScores(torch.zeros(2, STATE_COLUMNS + 2))
    running.clear()
    logits = torch.tensor([[0.0, torch.nan, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0]])
    running.merge(0, logits.clone(), 0, torch.tensor([3, 1]))
    found = running.result().logprobs
    assert not np.isfinite(found[0])
    assert found[1] == pytest.approx(float(logits[1].log_softmax(0)[1]))
