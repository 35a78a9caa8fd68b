"""What the block's rows bring to each sweep, and what becomes of their tokens.

Who is in the block is the admission's business. A row brings its prompt, whole or in chunks where a
sweep takes no more, then one token a sweep; rows that end leave at once. A row is a sample: those
of one request that bring the same tokens share their computation. Knows tokens, no pages, no
weights and no operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice, takewhile

import numpy as np
import numpy.typing as npt

from freight.memory.kv_cache import KVCache
from freight.model.batch import MicroBatch, RowKey, RowSpan
from freight.plan.admission import Lengths
from freight.plan.policy import Policy
from freight.plan.sweep import BatchWork, Sweep
from freight.runtime.admission import Admission, Continuous
from freight.runtime.answers import Ending, NewTokens, Row
from freight.runtime.drafts import Drafts, Guesses
from freight.runtime.penalties import History
from freight.runtime.request import Completion, Request
from freight.runtime.sampler import NO_TOKEN, Draw
from freight.runtime.tokenizer import Tokenizer
from freight.runtime.waiting import Waiting
from freight.runtime.zigzag import ZigZag

__all__ = ["Row", "Scheduler"]


class Scheduler:
    """Makes sweeps, takes in tokens.

    ``describe`` prices a micro-batch: what it moves in a sweep. ``lengths`` is what is expected of
    answers, and learns from them. ``slot_pages`` are those that a micro-batch's offloaded rows may
    have together; ``shares_elsewhere``: such rows may share what their prompts begin with. Where
    answers are planned to be structured, rows go on with what must follow at once; where the policy
    has room for guesses, they bring these too, which ``guesses`` counts.
    """

    def __init__(
        self,
        requests: Iterator[Request],
        *,
        policy: Policy,
        kv_cache: KVCache,
        slot_pages: int,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        lengths: Lengths,
        describe: Callable[[int, MicroBatch, bool], BatchWork],
        shares_elsewhere: bool = False,
        is_structured: bool = False,
        guesses: Guesses | None = None,
    ) -> None:
        self._waiting = Waiting(requests, tokenizer)
        self._forces = is_structured
        self._lengths = lengths
        self._admission: Admission = ZigZag(
            self._waiting, policy, kv_cache, shares_elsewhere=shares_elsewhere
        )
        if policy.is_continuous:
            self._admission = Continuous(
                self._waiting,
                policy,
                kv_cache,
                slot_pages=slot_pages,
                lengths=lengths,
                has_end=bool(eos_ids),
                shares_elsewhere=shares_elsewhere,
            )
        self._policy = policy
        self._eos_ids = eos_ids
        self._describe = describe
        self._drafts = Drafts(policy.draft_tokens, guesses or Guesses())
        self._attended_seats = [is_delegated for _, is_delegated, _ in policy.homes(0)]
        self._running: dict[int, list[Row]] = {}
        self._reached: dict[RowKey, int] = {}
        self._next_sweep = 0

    # -- sweeps ------------------------------------------------------------------------------

    def sweeps(self) -> Iterator[Sweep]:
        """Sweeps for as long as there are rows. Tokens of one are taken in before the next."""
        while True:
            self._admission.tokens_per_sweep = self._drafts.tokens_per_sweep
            self._admission.admit()
            if not self._admission.has_rows():
                assert self._waiting.is_empty(), "a row has no room in an empty block"
                return
            works = []
            self._reached = {}
            for k, rows in enumerate(self._admission.block):
                if rows:
                    batch = self._micro_batch(k, [*rows.values()])
                    continues = any(span.brings_made for span in batch.rows)
                    if batch.rows:
                        works.append(self._describe(self._next_sweep, batch, continues))
            yield Sweep(index=self._next_sweep, works=tuple(works))
            self._next_sweep += 1

    def expects_more(self) -> bool:
        """Whether another sweep follows, unless every row ends early in this one."""
        return not self._waiting.is_empty() or self.goes_on()

    def goes_on(self) -> bool:
        """Likewise, by the rows that are here alone: no request is drawn."""
        return self._waiting.has_at_hand() or any(
            len(row.new_ids) + 1 < row.params.max_tokens
            or row.num_tokens > self._reached.get(row.key, 0)
            for rows in self._admission.block
            for row in rows.values()
        )

    def _micro_batch(self, k: int, rows: Sequence[Row]) -> MicroBatch:
        families, brought = self._brought(k, rows)
        families = sorted(
            (family for family in families if brought[family[0].key]),
            key=lambda family: self._order(family, brought[family[0].key]),
        )
        self._running[k] = [row for family in families for row in family]
        spans: list[RowSpan] = []
        token_ids: list[int] = []
        for family in families:
            count = brought[family[0].key]
            spans.append(self._span(family, len(token_ids), count))
            self._reached.update({row.key: row.kv_len + count for row in family})
            token_ids += family[0].pending(count)
        return MicroBatch(index=k, rows=tuple(spans), token_ids=token_ids)

    def _brought(self, k: int, rows: Sequence[Row]) -> tuple[list[list[Row]], dict[RowKey, int]]:
        """Rows in families, and how many tokens each family brings: the one made last, or of the
        prompt what there is room for, those first that came first, then guesses."""
        left = self._policy.max_batch_tokens - sum(row.decodes for row in rows)
        brought: dict[RowKey, int] = {}
        for row in sorted((row for row in rows if row.is_prefix), key=lambda row: row.entry):
            brought[row.key] = count = min(row.num_tokens - row.kv_len, left)
            self._reached[row.key] = row.kv_len + count
            left -= count
        for row in rows:
            self._take_over(row)
        families = [*_families(rows)]
        for row in sorted((family[0] for family in families), key=lambda row: row.entry):
            if row.key in brought:
                continue
            waits = row.prefix is not None and not row.kv_len
            count = 0 if waits else row.num_tokens - row.kv_len
            if not row.decodes:
                count = min(count, left)
                left -= count
            brought[row.key] = count
        if self._policy.draft_tokens:
            for row in sorted((row for row in rows if row.decodes), key=lambda row: row.entry):
                left -= len(self._draft(k, row, left))
                brought[row.key] = 1 + len(row.draft)
        return families, brought

    def _draft(self, k: int, row: Row, most: int) -> Sequence[int]:
        """Guesses for a row that makes a token; not of one that moves, or that the CPU attends."""
        row.draft = ()
        if row.is_moving or self._attended_seats[row.seat]:
            return ()
        most = min(most, row.params.max_tokens - len(row.new_ids) - 1)
        draft = self._drafts.propose(row, most)
        if draft and row.guide is not None:
            draft = draft[: row.guide.possible(draft)]
        if draft:
            row.draft = draft[: self._admission.lend(k, row, len(draft))]
        return row.draft

    def _take_over(self, row: Row) -> None:
        """The keys of its prompt's beginning, if they are there or are computed before its own in
        this sweep: micro-batches are computed in turn, and such rows come first in theirs."""
        prefix = row.prefix
        if prefix is not None and not row.kv_len:
            reached = self._reached.get(prefix.key, prefix.kv_len)
            row.kv_len = prefix.num_tokens if reached == prefix.num_tokens else 0

    def _order(self, family: Sequence[Row], count: int) -> tuple[bool, bool, int, bool, int]:
        """Beginnings of prompts come first and rows that the CPU attends last, single tokens of a
        tier before its prompts, and those with equally many guesses together."""
        row = family[0]
        is_single = count == 1 and row.kv_len > 0 and len(family) == 1
        is_attended = self._attended_seats[row.seat] and is_single and not row.is_moving
        return not row.is_prefix, is_attended, row.seat, not is_single, len(row.draft)

    def _span(self, family: Sequence[Row], start: int, count: int) -> RowSpan:
        row = family[0]
        end = row.kv_len + count
        num_known = count - len(row.draft)
        makes_token = row.kv_len + num_known == row.num_tokens
        makes_token &= row.params.max_tokens > 0 and not row.is_prefix
        prompt = row.answer.request.prompt_ids
        scored = range(0)
        if row.answer.is_scored and not min(own.key.sample for own in family):
            last = min(end, len(prompt) - 1)
            scored = range(row.answer.next_scored - 1 - row.kv_len, last - row.kv_len)
        return RowSpan(
            row=row.key,
            start=start,
            num_new=count,
            kv_len=row.kv_len,
            logit_positions=tuple(range(num_known - 1, count)) if makes_token else (),
            scored=scored if len(scored) else range(0),
            next_id=prompt[end] if end < len(prompt) else -1,
            prompt_len=len(prompt),
            siblings=tuple(sibling.key for sibling in family[1:]),
            prefix=None if row.prefix is None else row.prefix.key,
            shared_len=row.num_shared_tokens,
            written_len=row.written_len,
        )

    def draws(self, batch: MicroBatch) -> list[Draw]:
        """The tokens to choose after ``batch``: one for each row that makes one, and one for each
        of its guesses, as if those before it were right."""
        draws: list[Draw] = []
        place = 0
        for span, row in _walk(batch, self._running[batch.index]):
            if not span.logit_positions:
                continue
            if row.key == span.row:
                first, place = place, place + len(span.logit_positions)
            draws += self._draws(row, span, first)
        return draws

    def _draws(self, row: Row, span: RowSpan, first: int) -> Iterator[Draw]:
        masks: Sequence[npt.NDArray[np.uint8] | None] = [None] * len(span.logit_positions)
        if row.guide is not None:
            masks = row.guide.allowed_along(row.draft)
        for number, allowed in enumerate(masks):
            output = [*row.new_ids, *row.draft[:number]] if number else row.new_ids
            is_short = len(output) < row.params.min_tokens
            yield Draw(
                row=row.key,
                place=first + number,
                position=span.total_len - len(row.draft) + number,
                params=row.params,
                history=History(prompt=row.answer.prompt_set, output=output),
                banned=(*self._eos_ids, *row.params.stop_token_ids) if is_short else (),
                allowed=allowed,
            )

    # -- tokens ------------------------------------------------------------------------------

    def update(self, batch: MicroBatch, made: NewTokens) -> list[Completion]:
        """Take in what was made of ``batch``; returns the requests that are answered now."""
        k = batch.index
        self._take_prompt_scores(batch, made)
        token_ids, num_scored = iter(made.token_ids), 0
        vectors = iter(() if made.vectors is None else made.vectors)
        completions = []
        for span, row in _walk(batch, self._running[k]):
            row.written_len = span.total_len
            row.kv_len = span.total_len - len(row.draft)
            ending: Ending | None = None
            if span.logit_positions and made.vectors is not None:
                row.vector, ending = next(vectors), ("stop", None)
            elif count := len(span.logit_positions):
                ending = self._append(row, [*islice(token_ids, count)], made, num_scored)
                num_scored += count if row.score_log is not None else 0
            elif row.kv_len == row.num_tokens:
                ending = "length", None
            if ending is None:
                continue
            if row.is_prefix:
                self._admission.keep(k, row)
                continue
            self._admission.end(k, row)
            if self._policy.draft_tokens:
                self._drafts.keep(row)
            if (completion := row.answer.finish(row, ending)) is not None:
                completions.append(completion)
        return completions

    def _take_prompt_scores(self, batch: MicroBatch, made: NewTokens) -> None:
        if made.prompt_scores is None:
            return
        first = 0
        for span, row in _walk(batch, self._running[batch.index]):
            if span.scored and span.row == row.key:
                last = first + len(span.scored)
                row.answer.take_prompt_scores(made.prompt_scores, first, last)
                first = last

    def _append(
        self, row: Row, token_ids: Sequence[int], made: NewTokens, first: int
    ) -> Ending | None:
        """Take the token that a row makes, and those after it for as long as its guesses say the
        same; their scores begin at ``first``. How the row ends, if it does."""
        draft, row.draft = row.draft, ()
        num_true, ending = 0, None
        while ending is None:
            num_before = len(row.new_ids)
            ending = self._take_one(row, token_ids[num_true], made, first + num_true)
            taken = row.new_ids[num_before:]
            num_alike = _num_alike(taken, draft[num_true:])
            num_true += num_alike
            if num_alike < len(taken):
                break
        row.kv_len += num_true
        self._drafts.note(row, len(draft), num_true)
        return ending

    def _take_one(self, row: Row, token_id: int, made: NewTokens, place: int) -> Ending | None:
        """Take one token, whose scores are at ``place``, and those that must follow it; how the row
        ends, if it does."""
        if token_id == NO_TOKEN:
            return "error", None
        num_before = len(row.new_ids)
        ending = self._take(row, token_id)
        if row.score_log is None and self._forces:
            # Of what must follow nobody asks the model, so it has no scores; the row brings it all.
            while ending is None and (forced := row.forced()):
                for token_id in forced:
                    ending = ending or self._take(row, token_id)
        if row.score_log is not None and len(row.new_ids) > num_before:
            assert made.scores is not None
            row.score_log.append(made.scores, place)
        return ending

    def _take(self, row: Row, token_id: int) -> Ending | None:
        """Let a row have a token; how it ends, if it does."""
        num_before, params = len(row.new_ids), row.params
        may_stop = num_before >= params.min_tokens and params.may_stop(has_end=bool(self._eos_ids))
        ending = self._end_of(row, token_id)
        reason = None if ending is None else ending[0]
        self._lengths.note(
            num_before, ends=reason is not None, may_stop=may_stop, stops=reason == "stop"
        )
        return ending

    def _end_of(self, row: Row, token_id: int) -> Ending | None:
        params, guide = row.params, row.guide
        if len(row.new_ids) >= params.min_tokens:
            if token_id in self._eos_ids and not params.ignore_eos:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        row.new_ids.append(token_id)
        if row.detokenizer is not None and row.detokenizer.append(token_id):
            return "stop", row.detokenizer.stop_string
        if guide is not None:
            guide.take(token_id)
            if guide.is_over:
                return "length" if guide.has_failed else "stop", None
        return ("length", None) if len(row.new_ids) >= params.max_tokens else None


def _num_alike(first: Sequence[int], second: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


def _families(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that bring the same tokens: samples of one request that are as far in its prompt."""

    def name(row: Row) -> tuple[int, int, int]:
        return row.key.request, row.kv_len, row.key.sample if row.new_ids else -1

    for _, family in groupby(rows, name):
        yield list(family)


def _walk(batch: MicroBatch, rows: Sequence[Row]) -> Iterator[tuple[RowSpan, Row]]:
    """Each row with the span that brings its tokens."""
    spans = (span for span in batch.rows for _ in span.keys)
    return zip(spans, rows, strict=True)
