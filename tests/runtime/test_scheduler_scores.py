"""What is scored of prompts: each token that is asked for once, in chunks and over again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.model.batch import MicroBatch
from freight.runtime.answers import NewTokens
from freight.runtime.request import Request, SamplingParams
from freight.runtime.scores import Scores

from .test_scheduler import Bench, Case, cases


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored(Case):
    """Prompts of tokens that differ, scored from one of them on; the score of a token is itself.
    Every third row makes none."""

    score_from: tuple[int, ...]

    def requests(self) -> Iterator[Request]:
        for index, (length, most, _) in enumerate(self.rows):
            yield Request(
                index=index,
                prompt_ids=range(1, length + 1),
                params=SamplingParams(max_tokens=most if index % 3 else 0, prompt_logprobs=0),
                score_from=self.first(index),
            )

    def first(self, row: int) -> int:
        wished = self.score_from[row % len(self.score_from)]
        return min(wished, self.rows[row][0])


class ScoredBench(Bench):
    def _tokens(self, batch: MicroBatch) -> NewTokens:
        targets = np.array(batch.scored_targets(), dtype=np.float32)
        scores = Scores(
            logprobs=-targets,
            ranks=np.zeros(len(targets), dtype=np.int32),
            top_ids=np.zeros((len(targets), 0), dtype=np.int32),
            top_logprobs=np.zeros((len(targets), 0), dtype=np.float32),
        )
        token_ids = super()._tokens(batch).token_ids
        return NewTokens(token_ids=token_ids, prompt_scores=scores if len(targets) else None)


@settings(deadline=None, max_examples=100)
@given(case=cases, score_from=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_each_token_that_is_asked_for_is_scored_once(case: Case, score_from: list[int]) -> None:
    fields = {name: getattr(case, name) for name in Case.__slots__}
    scored = Scored(**fields, score_from=tuple(score_from))
    bench = ScoredBench(scored)
    bench.run()
    assert len(bench.completions) == len(case.rows)
    for completion in bench.completions:
        length, _, _ = case.rows[completion.index]
        first = scored.first(completion.index)
        assert completion.prompt_logprobs is not None
        assert len(completion.prompt_logprobs) == length
        assert all(item is None for item in completion.prompt_logprobs[:first])
        found = [(item.token_id, item.logprob) for item in completion.scored]
        assert found == [(token, -float(token)) for token in range(first + 1, length + 1)]
        assert completion.log_likelihood == -sum(range(first + 1, length + 1))
    last = {
        span.row.request: span.total_len
        for batches in bench.batches
        for batch in batches
        for span in batch.rows
    }
    for row, (length, _, _) in enumerate(case.rows):
        assert row % 3 or last[row] == max(1, length - 1), "the last token is never computed"
