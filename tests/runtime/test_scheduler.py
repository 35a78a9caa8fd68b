"""Admission and endings: which rows are in which sweep, and what becomes of their tokens.

Tokens are made up; what is held fast is that every row is answered once with the tokens that were
made for it, that bounds of the policy hold in every sweep, and that pages all come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.memory.kv_cache import Home, KVCache
from freight.model.batch import MicroBatch
from freight.plan.policy import Policy, Split
from freight.plan.sweep import BatchWork
from freight.runtime.answers import NewTokens
from freight.runtime.request import Completion, CompletionOutput, Request, SamplingParams
from freight.runtime.scheduler import Scheduler

PAGE_TOKENS, NUM_PAGES, END = 4, 400, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows as (prompt tokens, most new tokens, tokens until it ends by itself)."""

    rows: list[tuple[int, int, int]]
    size: int
    count: int
    max_batch_tokens: int
    kv: Split

    def policy(self) -> Policy:
        return Policy(
            compute_tier="gpu",
            weights=Split(cpu=1.0),
            kv=self.kv,
            activations=Split(cpu=1.0),
            micro_batch_size=self.size,
            num_micro_batches=self.count,
            max_batch_tokens=self.max_batch_tokens,
            page_tokens=PAGE_TOKENS,
        )

    def requests(self) -> Iterator[Request]:
        for index, (length, most, _) in enumerate(self.rows):
            params = SamplingParams(max_tokens=most)
            yield Request(index=index, prompt_ids=[1] * length, params=params)

    def token(self, row: int, number: int) -> int:
        return END if number == self.rows[row][2] else 1000 * row + number + 1

    def answer(self, row: int) -> Completion:
        length, most, ends_at = self.rows[row]
        count = min(most, ends_at)
        return Completion(
            index=row,
            num_prompt_tokens=length,
            outputs=(
                CompletionOutput(
                    text="",
                    token_ids=tuple(self.token(row, number) for number in range(count)),
                    finish_reason="stop" if ends_at < most else "length",
                ),
            ),
        )


cases = st.builds(
    Case,
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 8)), max_size=14),
    size=st.integers(1, 5),
    count=st.integers(1, 4),
    max_batch_tokens=st.integers(9, 30),
    kv=st.sampled_from([Split(gpu=1.0), Split(cpu=1.0), Split(gpu=0.4, cpu=0.2, disk=0.4)]),
)


def cache() -> KVCache:
    pool = torch.zeros(1, NUM_PAGES, 1, dtype=torch.uint8)
    return KVCache(
        pools={"compute": pool, "cpu": pool},
        tails=torch.zeros(1, 100, 1, dtype=torch.uint8),
        file=None,
        num_disk_pages=NUM_PAGES,
        page_tokens=PAGE_TOKENS,
        page_bytes=1,
    )


class Bench:
    """A scheduler run by hand, with everything noted that it asks for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.kv = cache()
        self.batches: list[list[MicroBatch]] = []
        self.completions: list[Completion] = []
        self.expected: list[bool] = []
        self.scheduler = Scheduler(
            case.requests(),
            policy=case.policy(),
            kv_cache=self.kv,
            tokenizer=None,
            eos_ids=frozenset({END}),
            describe=self._describe,
        )

    def _describe(self, sweep: int, batch: MicroBatch, continues: bool) -> BatchWork:
        assert continues == (batch.rows[0].kv_len > 0)
        assert [self.kv.rows[span.row].home for span in batch.rows] == sorted(
            (self.kv.rows[span.row].home for span in batch.rows),
            key=("compute", "cpu", "disk").index,
        )
        return BatchWork(batch=batch, continues=continues)

    def run(self) -> None:
        for number, sweep in enumerate(self.scheduler.sweeps()):
            assert sweep.index == number
            self.expected.append(self.scheduler.expects_more())
            self.batches.append([work.batch for work in sweep.works])
            for work in sweep.works:
                self.completions += self.scheduler.update(work.batch, self._tokens(work.batch))

    def _tokens(self, batch: MicroBatch) -> NewTokens:
        rows = [(span.row.request, span.total_len) for span in batch.rows]
        return NewTokens(
            token_ids=[self.case.token(row, end - self.case.rows[row][0]) for row, end in rows]
        )


@settings(deadline=None, max_examples=80)
@given(case=cases)
def test_every_row_is_answered_once_with_its_own_tokens(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    found = sorted(bench.completions, key=lambda completion: completion.index)
    assert found == [case.answer(row) for row in range(len(case.rows))]
    homes: tuple[Home, ...] = ("compute", "cpu", "disk")
    assert all(bench.kv.num_free_pages(home) == NUM_PAGES for home in homes)


@settings(deadline=None, max_examples=80)
@given(case=cases)
def test_bounds_of_the_policy(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    for batches in bench.batches:
        assert 1 <= len(batches) <= case.count
        for batch in batches:
            assert 1 <= len(batch.rows) <= case.size
            assert batch.num_tokens <= case.max_batch_tokens
            assert batch.num_logits == len(batch.rows)


@settings(deadline=None, max_examples=80)
@given(case=cases)
def test_a_row_brings_its_prompt_and_then_its_last_token(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    lengths = [0] * len(case.rows)
    for batches in bench.batches:
        for batch in batches:
            for span in batch.rows:
                ids = batch.token_ids[span.start : span.end]
                row = span.row.request
                number = lengths[row] - case.rows[row][0]
                first = [1] * case.rows[row][0]
                assert ids == ([case.token(row, number)] if lengths[row] else first)
                assert span.kv_len == lengths[row]
                lengths[row] += span.num_new


@settings(deadline=None, max_examples=80)
@given(case=cases)
def test_another_sweep_is_expected_unless_rows_end_by_themselves(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    if not bench.expected:
        return
    assert all(bench.expected[:-1])
    if all(ends_at >= most for _, most, ends_at in case.rows):
        assert not bench.expected[-1]


def test_samples_stay_together_and_split_only_where_they_must() -> None:
    policy = Case(rows=[], size=4, count=1, max_batch_tokens=30, kv=Split(gpu=0.5, cpu=0.5))
    kv = cache()
    requests = [
        Request(
            index=i, prompt_ids=[1] * 5, params=SamplingParams(n=n, temperature=1, max_tokens=2)
        )
        for i, n in enumerate([3, 2, 2, 9, 1])
    ]
    scheduler = Scheduler(
        iter(requests),
        policy=policy.policy(),
        kv_cache=kv,
        tokenizer=None,
        eos_ids=frozenset({END}),
        describe=lambda sweep, batch, continues: BatchWork(batch=batch, continues=continues),
    )
    families, completions = [], []
    for sweep in scheduler.sweeps():
        (work,) = sweep.works
        batch = work.batch
        keys = [key for span in batch.rows for key in span.keys]
        draws = scheduler.draws(batch)
        assert [draw.row for draw in draws] == keys
        if batch.rows[0].kv_len == 0:
            families.append([tuple(span.keys) for span in batch.rows])
            assert batch.num_tokens == 5 * len(batch.rows)
        else:
            assert not any(span.siblings for span in batch.rows)
        assert len({draw.params.seed for draw in draws}) >= max(
            len(span.keys) for span in batch.rows
        )
        tokens = [10 * key.request + key.sample + 1 for key in keys]
        completions += scheduler.update(batch, NewTokens(token_ids=tokens))
    numbers = [
        [[(key.request, key.sample) for key in keys] for keys in batch] for batch in families
    ]
    assert numbers == [
        [[(0, 0), (0, 1), (0, 2)]],
        [[(1, 0), (1, 1)], [(2, 0), (2, 1)]],
        [[(3, sample) for sample in range(4)]],
        [[(3, sample) for sample in range(4, 8)]],
        [[(3, 8)], [(4, 0)]],
    ]
    for completion, n in zip(
        sorted(completions, key=lambda c: c.index), [3, 2, 2, 9, 1], strict=True
    ):
        found = [output.token_ids for output in completion.outputs]
        assert found == [(10 * completion.index + i + 1,) * 2 for i in range(n)]
    assert not kv.rows


def test_rows_enter_in_their_order_and_a_block_when_the_last_has_left() -> None:
    case = Case(
        rows=[(3, 2, 9), (3, 1, 9), (3, 3, 9), (3, 1, 9), (3, 1, 9)],
        size=2,
        count=2,
        max_batch_tokens=30,
        kv=Split(gpu=1.0),
    )
    bench = Bench(case)
    bench.run()
    rows = [[[span.row.request for span in b.rows] for b in batches] for batches in bench.batches]
    assert rows == [[[0, 1], [2, 3]], [[0], [2]], [[2]], [[4]]]
