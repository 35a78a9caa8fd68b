"""Which rows are in the block: admission, and what becomes of each row's tokens.

The rule here is the zig-zag block: micro-batches are filled, run until the last of their rows has
ended, then the next block is admitted; row-by-row is a block of one micro-batch. Rows that end
leave at once. Knows tokens and pages, no weights and no operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from freight.memory.kv_cache import Home, KVCache
from freight.model.batch import MicroBatch, RowSpan
from freight.plan.policy import Policy, Tier
from freight.plan.sweep import BatchWork, Sweep
from freight.runtime.request import Completion, FinishReason, Request
from freight.runtime.tokenizer import Detokenizer, Tokenizer

__all__ = ["Row", "Scheduler"]


@dataclass(kw_only=True, slots=True)
class Row:
    """A row in the block: its tokens so far, and how many of them have keys."""

    request: Request
    detokenizer: Detokenizer | None
    new_ids: list[int] = field(default_factory=list)
    kv_len: int = 0

    @property
    def pending(self) -> Sequence[int]:
        """Tokens that have no keys yet: the prompt, or the token made last."""
        return self.new_ids[-1:] if self.kv_len else self.request.prompt_ids

    @property
    def most_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.params.max_tokens


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
        self._held: Request | None = None
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
            len(row.new_ids) + 1 < row.request.params.max_tokens
            for rows in self._block
            for row in rows
        )

    def _has_rows(self) -> bool:
        return any(self._block)

    def _micro_batch(self, k: int, rows: Sequence[Row]) -> MicroBatch:
        spans = []
        token_ids: list[int] = []
        for row in rows:
            pending = row.pending
            span = RowSpan(
                row=row.request.index,
                start=len(token_ids),
                num_new=len(pending),
                kv_len=row.kv_len,
                logit_positions=(len(pending) - 1,),
            )
            spans.append(span)
            token_ids += pending
        return MicroBatch(index=k, rows=tuple(spans), token_ids=token_ids)

    # -- admission ---------------------------------------------------------------------------

    def _peek(self) -> Request | None:
        if self._held is None:
            self._held = next(self._requests, None)
        return self._held

    def _admit_block(self) -> bool:
        self._block = []
        while len(self._block) < self._policy.num_micro_batches and self._peek() is not None:
            self._block.append(self._admit_micro_batch())
        return self._has_rows()

    def _admit_micro_batch(self) -> list[Row]:
        """As many of the next rows as the micro-batch and the free pages take."""
        requests: list[Request] = []
        tokens = 0
        while len(requests) < self._policy.micro_batch_size and (request := self._peek()):
            tokens += len(request.prompt_ids)
            if requests and tokens > self._policy.max_batch_tokens:
                break
            requests.append(request)
            self._held = None
        rows = [self._start(request) for request in requests]
        self._reserve(rows)
        return rows

    def _start(self, request: Request) -> Row:
        needs_text = self._tokenizer is not None
        detokenizer = None
        if needs_text:
            assert self._tokenizer is not None
            detokenizer = Detokenizer(self._tokenizer, request.params.stop)
        return Row(request=request, detokenizer=detokenizer)

    def _reserve(self, rows: Sequence[Row]) -> None:
        """Pages for the rows' whole lives, on the tiers by the policy's shares."""
        first = 0
        for tier, count in self._policy.kv.cut(len(rows)).items():
            members = rows[first : first + count]
            wanted = [(row.request.index, row.most_tokens) for row in members]
            if wanted:
                self._kv.admit(self._home(tier), wanted)
            first += count

    def _home(self, tier: Tier) -> Home:
        if tier == self._policy.compute_tier:
            return "compute"
        assert tier != "gpu"
        return tier

    # -- tokens ------------------------------------------------------------------------------

    def update(self, batch: MicroBatch, token_ids: Sequence[int]) -> list[Completion]:
        """Take in one new token per row of ``batch``; returns the rows that ended."""
        rows = self._block[batch.index]
        completions = []
        left = []
        for row, span, token_id in zip(rows, batch.rows, token_ids, strict=True):
            row.kv_len = span.total_len
            reason = self._append(row, token_id)
            if reason is None:
                left.append(row)
                continue
            self._kv.release(row.request.index)
            completions.append(self._complete(row, reason))
        self._block[batch.index] = left
        return completions

    def _append(self, row: Row, token_id: int) -> FinishReason | None:
        self.num_generated_tokens += 1
        if token_id in self._eos_ids:
            return "stop"
        row.new_ids.append(token_id)
        if row.detokenizer is not None and row.detokenizer.append(token_id):
            return "stop"
        return "length" if len(row.new_ids) >= row.request.params.max_tokens else None

    def _complete(self, row: Row, reason: FinishReason) -> Completion:
        return Completion(
            index=row.request.index,
            token_ids=tuple(row.new_ids),
            text="" if row.detokenizer is None else row.detokenizer.text,
            finish_reason=reason,
            num_prompt_tokens=len(row.request.prompt_ids),
        )
