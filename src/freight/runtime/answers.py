"""What becomes of a request: its samples as rows, and what they have made so far.

A request is answered when the last of its samples has ended, however many micro-batches they were
in. Knows tokens and scores, no pages and no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, repeat
from math import fsum

import numpy as np
import numpy.typing as npt

from freight.model.batch import RowKey
from freight.runtime.guide import Guide
from freight.runtime.params import SamplingParams
from freight.runtime.request import (
    Completion,
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    Vector,
)
from freight.runtime.sampler import sample_seed
from freight.runtime.scores import ScoreLog, Scores
from freight.runtime.structured_outputs import StructuredOutputs
from freight.runtime.tokenizer import Detokenizer, Tokenizer

__all__ = ["Answer", "Ending", "NewTokens", "Row"]

Ending = tuple[FinishReason, int | str | None]
"""Why a row has ended, and the stop token or stop string where it was one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """What was made of a micro-batch: a token for each row that makes one, the scores of those
    whose rows ask for them, and the scores of the prompts' tokens, each in the order of the rows;
    or in place of tokens ``vectors`` [rows, n], what a readout has made of their last ones.
    """

    token_ids: Sequence[int] = ()
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    vectors: Vector | None = None


@dataclass(kw_only=True, slots=True)
class Row:
    """A row in the block: its tokens that are computed, and how many of them have keys.

    ``params`` are the request's, with the seed of this sample; ``guide`` keeps its answer to what
    it must look like. ``entry`` counts the rows that came before it; ``seat`` is the place among
    its micro-batch's, by where its keys and values are; one that ``is_moving`` is brought from
    there in the next sweep, or to there.
    ``prefix`` is the row that computes the beginning of its prompt, where that is shared; such a
    row ``is_prefix`` and answers nothing. ``draft`` are guesses that it brings to this sweep behind
    its tokens; of ``written_len`` tokens there are keys, those behind ``kv_len`` of guesses that
    were wrong. ``vector`` is what a readout has made of its last token.
    """

    key: RowKey
    answer: Answer
    params: SamplingParams
    detokenizer: Detokenizer | None
    score_log: ScoreLog | None
    guide: Guide | None = None
    new_ids: list[int] = field(default_factory=list)
    kv_len: int = 0
    entry: int = -1
    seat: int = 0
    is_moving: bool = False
    prefix: Row | None = None
    is_prefix: bool = False
    vector: Vector | None = None
    draft: Sequence[int] = ()
    written_len: int = 0

    @property
    def num_tokens(self) -> int:
        """Those of the prompt and those made."""
        return self.answer.request.num_computed + len(self.new_ids)

    @property
    def num_shared_tokens(self) -> int:
        """Those whose keys another row computes."""
        return 0 if self.prefix is None else self.prefix.num_tokens

    @property
    def decodes(self) -> bool:
        """Whether all its tokens but the one made last have keys."""
        return bool(self.new_ids) and self.kv_len == self.num_tokens - 1

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, whatever the model says."""
        return () if self.guide is None else self.guide.forced()

    def pending(self, count: int) -> Sequence[int]:
        """The first ``count`` tokens that have no keys yet, guesses behind them."""
        prompt = self.answer.request.prompt_ids
        first, last = self.kv_len, self.kv_len + count
        behind = len(prompt)
        if first >= behind:
            return [*self.new_ids[first - behind :], *self.draft][:count]
        return [*prompt[first:last], *self.new_ids[: max(0, last - behind)]]

    @property
    def most_tokens(self) -> int:
        return len(self.answer.request.prompt_ids) + self.params.max_tokens


class Answer:
    """A request and the outputs of its samples, as they end. ``num_waiting`` samples are to be
    started yet."""

    def __init__(self, request: Request, *, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.num_waiting = request.params.n
        self._tokenizer = tokenizer
        self._outputs: dict[int, CompletionOutput] = {}
        self._prompt_scores: list[Scores] = []

    @property
    def is_scored(self) -> bool:
        return self.request.params.prompt_logprobs is not None

    @property
    def next_scored(self) -> int:
        """The first token of the prompt whose score is still wanted."""
        return self.request.score_from + sum(len(scores) for scores in self._prompt_scores)

    @cached_property
    def prompt_set(self) -> npt.NDArray[np.int64]:
        """The tokens of the prompt, each once: what the repetition penalty asks for."""
        if self.request.params.repetition_penalty == 1:
            return np.empty(0, dtype=np.int64)
        return np.unique(np.asarray(self.request.prompt_ids, dtype=np.int64))

    @cached_property
    def prompt_array(self) -> npt.NDArray[np.int32]:
        """The tokens of the prompt."""
        return np.asarray(self.request.prompt_ids, dtype=np.int32)

    def start(self, count: int) -> list[Row]:
        """The next ``count`` samples as rows."""
        first = self.request.params.n - self.num_waiting
        self.num_waiting -= count
        return [self._row(sample) for sample in range(first, first + count)]

    def _row(self, sample: int) -> Row:
        params = self.request.params
        detokenizer = score_log = guide = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, params.stop, params.min_tokens)
        structure = params.structured_outputs
        if self._tokenizer is not None and isinstance(structure, StructuredOutputs):
            guide = self._tokenizer.guides.start(structure)
        if params.logprobs is not None:
            score_log = ScoreLog(params.max_tokens, params.logprobs)
        return Row(
            key=RowKey(self.request.index, sample),
            answer=self,
            params=replace(params, seed=sample_seed(params.seed, sample)),
            detokenizer=detokenizer,
            score_log=score_log,
            guide=guide,
        )

    def take_prompt_scores(self, scores: Scores, first: int, last: int) -> None:
        """Take those from ``first`` to ``last``, of the tokens that follow those scored so far."""
        num_top = self.request.params.prompt_logprobs or 0
        self._prompt_scores.append(scores.part(first, last, num_top))

    def finish(self, row: Row, ending: Ending) -> Completion | None:
        """Take in a row that has ended; the completion if it was the last one."""
        if not self._are_numbers(row):
            ending = "error", None
        logprobs = None
        if row.score_log is not None:
            logprobs = self._logprobs(row.new_ids, row.score_log.result())
        self._outputs[row.key.sample] = CompletionOutput(
            text="" if row.detokenizer is None else row.detokenizer.text,
            token_ids=tuple(row.new_ids),
            finish_reason=ending[0],
            stop_reason=ending[1],
            logprobs=logprobs,
            cumulative_logprob=(
                None if logprobs is None else fsum(item.logprob for item in logprobs)
            ),
        )
        if len(self._outputs) < self.request.params.n:
            return None
        return Completion(
            index=self.request.index,
            num_prompt_tokens=len(self.request.prompt_ids),
            outputs=tuple(output for _, output in sorted(self._outputs.items())),
            prompt_logprobs=self._prompt_logprobs(),
            vector=row.vector,
        )

    def _are_numbers(self, row: Row) -> bool:
        """Of what was computed beside tokens: scores of the prompt, what a readout has made."""
        vectors = [own.logprobs for own in self._prompt_scores]
        if row.vector is not None:
            vectors.append(row.vector)
        return all(np.isfinite(own).all() for own in vectors)

    def _prompt_logprobs(self) -> tuple[Logprob | None, ...] | None:
        if not self.is_scored:
            return None
        first = self.request.score_from
        scored = iter(self.request.prompt_ids[first:])
        found = (self._logprobs([*islice(scored, len(own))], own) for own in self._prompt_scores)
        return (*repeat(None, first), *chain.from_iterable(found))

    def _logprobs(self, token_ids: Sequence[int], scores: Scores) -> tuple[Logprob, ...]:
        return tuple(
            Logprob(
                token_id=token_id,
                text=self._text(token_id),
                raw=self._raw(token_id),
                logprob=float(scores.logprobs[i]),
                rank=int(scores.ranks[i]) or None,
                top=tuple(
                    Logprob(
                        token_id=int(other),
                        text=self._text(int(other)),
                        raw=self._raw(int(other)),
                        logprob=float(logprob),
                        rank=rank,
                    )
                    for rank, (other, logprob) in enumerate(
                        zip(scores.top_ids[i], scores.top_logprobs[i], strict=True), start=1
                    )
                ),
            )
            for i, token_id in enumerate(token_ids)
        )

    def _text(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _raw(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
