"""Which rows are in the block: admission, and what becomes of each row's tokens.

The rule here is the zig-zag block: micro-batches are filled, run until the last of their rows has
ended, then the next block is admitted; row-by-row is a block of one micro-batch. Rows that end
leave at once. A row is a sample: those of one request in one micro-batch share the computation of
its prompt, and a request with more of them than a micro-batch takes comes in several families.
Knows tokens and pages, no weights and no operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from freight.memory.kv_cache import Home, KVCache
from freight.model.batch import MicroBatch, RowSpan
from freight.plan.policy import Policy, Tier
from freight.plan.sweep import BatchWork, Sweep
from freight.runtime.answers import Answer, Ending, NewTokens, Row
from freight.runtime.penalties import History
from freight.runtime.request import Completion, Request
from freight.runtime.sampler import Draw
from freight.runtime.tokenizer import Tokenizer

__all__ = ["Row", "Scheduler"]


class Scheduler:
    """Admits rows, makes sweeps, takes in tokens.

    ``describe`` prices a micro-batch: what it moves in a sweep.
    """

    def __init__(
        self,
        requests: Iterator[Request],
        *,
        policy: Policy,
        kv_cache: KVCache,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        describe: Callable[[int, MicroBatch, bool], BatchWork],
    ) -> None:
        self._requests = requests
        self._policy = policy
        self._kv = kv_cache
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._describe = describe
        self._block: list[list[Row]] = []
        self._held: Answer | None = None
        self._next_sweep = 0
        self.num_generated_tokens = 0

    # -- sweeps ------------------------------------------------------------------------------

    def sweeps(self) -> Iterator[Sweep]:
        """Sweeps for as long as there are rows. Tokens of one are taken in before the next."""
        while self._has_rows() or self._admit_block():
            works = []
            for k, rows in enumerate(self._block):
                if rows:
                    continues = rows[0].kv_len > 0
                    works.append(
                        self._describe(self._next_sweep, self._micro_batch(k, rows), continues)
                    )
            yield Sweep(index=self._next_sweep, works=tuple(works))
            self._next_sweep += 1

    def expects_more(self) -> bool:
        """Whether another sweep follows, unless every row ends early in this one."""
        if self._peek() is not None:
            return True
        return any(
            len(row.new_ids) + 1 < row.params.max_tokens for rows in self._block for row in rows
        )

    def _has_rows(self) -> bool:
        return any(self._block)

    def _micro_batch(self, k: int, rows: Sequence[Row]) -> MicroBatch:
        spans = []
        token_ids: list[int] = []
        for family in _families(rows):
            row = family[0]
            pending = row.pending
            makes_tokens = row.params.max_tokens > 0
            is_scored = not row.kv_len and not row.key.sample and row.answer.is_scored
            span = RowSpan(
                row=row.key,
                start=len(token_ids),
                num_new=len(pending),
                kv_len=row.kv_len,
                logit_positions=(len(pending) - 1,) if makes_tokens else (),
                scored=range(len(pending) - 1) if is_scored else range(0),
                siblings=tuple(sibling.key for sibling in family[1:]),
            )
            spans.append(span)
            token_ids += pending
        return MicroBatch(index=k, rows=tuple(spans), token_ids=token_ids)

    def draws(self, batch: MicroBatch) -> list[Draw]:
        """The tokens to choose after ``batch``: one for each row that makes tokens."""
        draws = []
        place = -1
        for span, row in _walk(batch, self._block[batch.index]):
            if not span.logit_positions:
                continue
            place += row.key == span.row
            is_short = len(row.new_ids) < row.params.min_tokens
            draws.append(
                Draw(
                    row=row.key,
                    place=place,
                    position=span.total_len,
                    params=row.params,
                    history=History(prompt=row.answer.prompt_set, output=row.new_ids),
                    banned=(*self._eos_ids, *row.params.stop_token_ids) if is_short else (),
                )
            )
        return draws

    # -- admission ---------------------------------------------------------------------------

    def _peek(self) -> Answer | None:
        """The request at the head of the queue, of which samples are still to be admitted."""
        if self._held is None and (request := next(self._requests, None)) is not None:
            self._held = Answer(request, tokenizer=self._tokenizer)
        return self._held

    def _admit_block(self) -> bool:
        self._block = []
        while len(self._block) < self._policy.num_micro_batches and self._peek() is not None:
            self._block.append(self._admit_micro_batch())
        return self._has_rows()

    def _admit_micro_batch(self) -> list[Row]:
        """As many of the next rows as the micro-batch and the free pages take.

        Samples of one request stay together unless there are more than a micro-batch takes.
        """
        size = self._policy.micro_batch_size
        rows: list[Row] = []
        tokens = 0
        while len(rows) < size and (answer := self._peek()):
            tokens += len(answer.request.prompt_ids)
            count = min(answer.num_waiting, size)
            is_full = tokens > self._policy.max_batch_tokens or len(rows) + count > size
            if rows and is_full:
                break
            rows += answer.start(count)
            if not answer.num_waiting:
                self._held = None
        self._reserve(rows)
        return rows

    def _reserve(self, rows: Sequence[Row]) -> None:
        """Pages for the rows' whole lives, on the tiers by the policy's shares."""
        first = 0
        for tier, is_delegated, count in self._policy.homes(len(rows)):
            members = rows[first : first + count]
            wanted = [(row.key, row.most_tokens) for row in members]
            if wanted:
                self._kv.admit(self._home(tier), wanted, is_delegated=is_delegated)
            first += count

    def _home(self, tier: Tier) -> Home:
        if tier == self._policy.compute_tier:
            return "compute"
        assert tier != "gpu"
        return tier

    # -- tokens ------------------------------------------------------------------------------

    def update(self, batch: MicroBatch, made: NewTokens) -> list[Completion]:
        """Take in what was made of ``batch``; returns the requests that are answered now."""
        self._take_prompt_scores(batch, made)
        token_ids, num_scored = iter(made.token_ids), 0
        completions = []
        left = []
        for span, row in _walk(batch, self._block[batch.index]):
            row.kv_len = span.total_len
            ending: Ending | None = ("length", None)
            if span.logit_positions:
                ending = self._append(row, next(token_ids), made, num_scored)
                num_scored += row.score_log is not None
            if ending is None:
                left.append(row)
                continue
            self._kv.release(row.key)
            if (completion := row.answer.finish(row, ending)) is not None:
                completions.append(completion)
        self._block[batch.index] = left
        return completions

    def _take_prompt_scores(self, batch: MicroBatch, made: NewTokens) -> None:
        if made.prompt_scores is None:
            return
        first = 0
        for span, row in _walk(batch, self._block[batch.index]):
            if span.scored and span.row == row.key:
                last = first + len(span.scored)
                row.answer.take_prompt_scores(made.prompt_scores, first, last)
                first = last

    def _append(self, row: Row, token_id: int, made: NewTokens, place: int) -> Ending | None:
        """Take one token, whose scores are at ``place``; how the row ends, if it does."""
        params = row.params
        self.num_generated_tokens += 1
        if len(row.new_ids) >= params.min_tokens:
            if token_id in self._eos_ids and not params.ignore_eos:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        row.new_ids.append(token_id)
        if row.score_log is not None:
            assert made.scores is not None
            row.score_log.append(made.scores, place)
        if row.detokenizer is not None and row.detokenizer.append(token_id):
            return "stop", row.detokenizer.stop_string
        return ("length", None) if len(row.new_ids) >= params.max_tokens else None


def _families(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that bring the same tokens: samples of one request before their first sweep."""
    for _, family in groupby(rows, lambda row: row.key if row.kv_len else row.key.request):
        yield list(family)


def _walk(batch: MicroBatch, rows: Sequence[Row]) -> Iterator[tuple[RowSpan, Row]]:
    """Each row with the span that brings its tokens."""
    spans = (span for span in batch.rows for _ in span.keys)
    return zip(spans, rows, strict=True)
