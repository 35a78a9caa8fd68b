"""Admission and endings: which rows are in which sweep, and what becomes of their tokens.

Tokens are made up; what is held fast is that every row is answered once with the tokens that were
made for it, that bounds of the policy hold in every sweep, and that pages all come back.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freight.memory.kv_cache import KVCache
from freight.memory.passage import Home
from freight.model.batch import MicroBatch, RowSpan
from freight.plan.admission import Lengths
from freight.plan.continuous import roll_out
from freight.plan.kept_pages import most_rows
from freight.plan.policy import Admission, Policy, Split, Tier
from freight.plan.sweep import BatchWork
from freight.plan.workload import RowLength
from freight.runtime.answers import NewTokens
from freight.runtime.request import Completion, CompletionOutput, Request, SamplingParams
from freight.runtime.scheduler import Row, Scheduler

PAGE_TOKENS, NUM_PAGES, END, WRONG = 4, 400, 0, 7
HOMES: tuple[Home, ...] = ("compute", "cpu", "disk")
LONGEST_PROMPT, LONGEST_ANSWER = 9, 6
ROW_PAGES = -(-(LONGEST_PROMPT + LONGEST_ANSWER) // PAGE_TOKENS)
LONG_ANSWER = 24
CIRCLES = 8
LONG_ROW_PAGES = -(-(LONGEST_PROMPT + LONG_ANSWER) // PAGE_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows as (prompt tokens, most new tokens, tokens until it ends by itself). Where rows guess,
    answers go in circles for a while, so that some guesses are right."""

    rows: list[tuple[int, int, int]]
    size: int
    count: int
    max_batch_tokens: int
    kv: Split
    admission: Admission = "zigzag"
    entry_pace: float = 1.0
    num_pages: int = NUM_PAGES
    slot_pages: int = NUM_PAGES
    ignore_eos: bool = False
    expected: float = LONGEST_ANSWER
    draft_tokens: int = 0

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
            admission=self.admission,
            entry_pace=self.entry_pace,
            draft_tokens=self.draft_tokens,
        )

    def requests(self) -> Iterator[Request]:
        for index, (length, most, _) in enumerate(self.rows):
            params = SamplingParams(max_tokens=most, ignore_eos=self.ignore_eos)
            yield Request(index=index, prompt_ids=[1] * length, params=params)

    def token(self, row: int, number: int) -> int:
        if number == self.rows[row][2]:
            return END
        if self.draft_tokens:
            number = 20 * (number // CIRCLES) + number % 2
        return 1000 * row + number + 1

    def tokens(self, row: int) -> list[int]:
        """Those of its prompt, then those that it makes."""
        length, most, _ = self.rows[row]
        return [1] * length + [self.token(row, number) for number in range(most)]

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


row_lengths = st.tuples(
    st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_ANSWER), st.integers(0, 8)
)
shapes: dict[str, st.SearchStrategy[Any]] = {
    "size": st.integers(1, 5),
    "count": st.integers(1, 4),
    "kv": st.sampled_from([Split(gpu=1.0), Split(cpu=1.0), Split(gpu=0.4, cpu=0.2, disk=0.4)]),
}
zigzag = st.builds(
    Case,
    rows=st.lists(row_lengths, max_size=14),
    max_batch_tokens=st.integers(LONGEST_PROMPT, 30),
    **shapes,
)
# Prompts in chunks, and pages for one of the longest rows at least.
continuous = st.builds(
    Case,
    rows=st.lists(row_lengths, max_size=30),
    max_batch_tokens=st.integers(5, 30),
    admission=st.sampled_from(["diagonal", "refill"]),
    entry_pace=st.sampled_from([0.5, 1.0, 2.0, 1000.0]),
    num_pages=st.integers(ROW_PAGES, 5 * ROW_PAGES),
    slot_pages=st.integers(ROW_PAGES, 5 * ROW_PAGES),
    **shapes,
)
# Answers far longer than was expected, and few pages on tiers that are all in use.
overgrowing = st.builds(
    Case,
    rows=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, LONG_ANSWER), st.integers(0, 30)),
        min_size=5,
        max_size=30,
    ),
    max_batch_tokens=st.integers(10, 40),
    admission=st.just("refill"),
    entry_pace=st.sampled_from([2.0, 1000.0]),
    num_pages=st.integers(LONG_ROW_PAGES, 3 * LONG_ROW_PAGES),
    slot_pages=st.integers(LONG_ROW_PAGES, 5 * LONG_ROW_PAGES),
    size=st.integers(2, 10),
    count=st.integers(1, 2),
    kv=st.sampled_from([Split(gpu=0.7, cpu=0.3), Split(gpu=0.4, cpu=0.2, disk=0.4)]),
    expected=st.floats(1.0, LONG_ANSWER),
)
cases = st.one_of(zigzag, continuous, overgrowing)
guessing = st.builds(replace, cases, draft_tokens=st.sampled_from([1, 2, 5]))


def cache(
    num_pages: int = NUM_PAGES, far_pages: int | None = None, num_tails: int = 100
) -> KVCache:
    pool = [torch.zeros(num_pages, 1, dtype=torch.uint8)]
    far = pool if far_pages is None else [torch.zeros(far_pages, 1, dtype=torch.uint8)]
    return KVCache(
        pools={"compute": pool, "cpu": far},
        tails=[torch.zeros(num_tails, 1, dtype=torch.uint8)],
        file=None,
        num_disk_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        far_page_bytes=(1,),
    )


class Bench:
    """A scheduler run by hand, with everything noted that it asks for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.policy = case.policy()
        on_disk = most_rows(case.kv, case.size)["disk"]
        self.kv = cache(case.num_pages, num_tails=case.count * on_disk)
        self.batches: list[list[MicroBatch]] = []
        self.completions: list[Completion] = []
        self.expected: list[bool] = []
        self.homes: list[dict[int, Tier]] = []
        self.moves: list[tuple[Home, Home]] = []
        longest = max((most for _, most, _ in case.rows), default=LONGEST_ANSWER)
        self.scheduler = self.make(
            longest_answer=max(longest, LONGEST_ANSWER), expected=case.expected
        )

    def make(self, *, longest_answer: int, expected: float | None = None) -> Scheduler:
        return Scheduler(
            self.case.requests(),
            policy=self.policy,
            kv_cache=self.kv,
            slot_pages=self.case.slot_pages,
            tokenizer=None,
            eos_ids=frozenset({END}),
            lengths=Lengths(expected=expected or longest_answer, longest=longest_answer),
            describe=self._describe,
        )

    def _describe(self, sweep: int, batch: MicroBatch, continues: bool) -> BatchWork:
        rows = self.case.rows
        assert continues == any(span.total_len > rows[span.row.request][0] for span in batch.rows)
        pages = [self.kv.rows[span.row] for span in batch.rows]
        # Those that move are among the others that pass through a slot.
        places = [own.home for own in pages if own.origin is None]
        assert places == sorted(places, key=HOMES.index)
        assert [own.is_near for own in pages] == sorted(
            (own.is_near for own in pages), reverse=True
        )
        if sweep == len(self.homes):
            self.homes.append({})
        for own, span in zip(pages, batch.rows, strict=True):
            home = (own.origin or own).home
            self.homes[-1][span.row.request] = "gpu" if home == "compute" else home
        self.moves += [(own.origin.home, own.home) for own in pages if own.origin is not None]
        if self.case.policy().is_continuous:
            passing = [
                self.kv.pages_for(span.total_len)
                for span in batch.rows
                if not self.kv.rows[span.row].is_near
            ]
            assert sum(passing) <= self.case.slot_pages
        return BatchWork(batch=batch, continues=continues)

    def run(self) -> None:
        for number, sweep in enumerate(self.scheduler.sweeps()):
            assert sweep.index == number
            self.expected.append(self.scheduler.expects_more())
            self.batches.append([work.batch for work in sweep.works])
            for work in sweep.works:
                self.completions += self.scheduler.update(work.batch, self._tokens(work.batch))

    def _tokens(self, batch: MicroBatch) -> NewTokens:
        return NewTokens(token_ids=[t for span in batch.rows for t in self._tokens_of(batch, span)])

    def _tokens_of(self, batch: MicroBatch, span: RowSpan) -> Iterator[int]:
        """After a wrong guess anything may come."""
        row = span.row.request
        known = self.case.tokens(row)
        for place in span.logit_positions:
            end = span.kv_len + place + 1
            brought = list(batch.token_ids[span.start : span.start + place + 1])
            is_right = brought == known[span.kv_len : end]
            yield self.case.token(row, end - self.case.rows[row][0]) if is_right else WRONG


@settings(deadline=None, max_examples=120)
@given(case=st.one_of(cases, guessing))
def test_every_row_is_answered_once_with_its_own_tokens(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    found = sorted(bench.completions, key=lambda completion: completion.index)
    assert found == [case.answer(row) for row in range(len(case.rows))]
    assert all(bench.kv.num_free_pages(home) == case.num_pages for home in HOMES)


@settings(deadline=None, max_examples=120)
@given(case=st.one_of(cases, guessing))
def test_bounds_of_the_policy(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    for batches in bench.batches:
        assert 1 <= len(batches) <= case.count
        for batch in batches:
            assert 1 <= len(batch.rows) <= case.size
            assert batch.num_tokens <= case.max_batch_tokens
            assert batch.num_logits <= case.policy().most_made
            if case.admission == "zigzag":
                guesses = sum(max(0, len(span.logit_positions) - 1) for span in batch.rows)
                assert batch.num_logits == len(batch.rows) + guesses
                assert not guesses or case.draft_tokens


@settings(deadline=None, max_examples=80)
@given(case=cases)
def test_a_row_brings_its_prompt_and_then_its_last_token(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    lengths = [0] * len(case.rows)
    num_known = [length for length, _, _ in case.rows]
    for batches in bench.batches:
        for batch in batches:
            for span in batch.rows:
                row = span.row.request
                assert span.kv_len in (lengths[row], 0)
                brought = list(batch.token_ids[span.start : span.end])
                assert brought == case.tokens(row)[span.kv_len : span.total_len]
                # It makes a token as soon as all that it has is attended.
                assert bool(span.logit_positions) == (span.total_len == num_known[row])
                num_known[row] += len(span.logit_positions)
                lengths[row] = span.total_len


NEARER = Case(
    rows=[
        *[(1, 1, 0), (2, 8, 7), (3, 1, 0), (8, 6, 5), (8, 6, 4), (1, 1, 0), (1, 5, 4)],
        *[(1, 1, 0), (1, 1, 0), (1, 5, 4), (1, 3, 2), (1, 1, 0), (4, 2, 1), (4, 1, 0)],
    ],
    size=10,
    count=1,
    max_batch_tokens=10,
    kv=Split(gpu=0.4, cpu=0.2, disk=0.4),
    admission="refill",
    entry_pace=2.0,
    num_pages=9,
    slot_pages=10,
    ignore_eos=False,
    expected=1.0,
    draft_tokens=1,
)
"""A row comes nearer, through a slot whose pages are lent for guesses."""


@settings(deadline=None, max_examples=120)
@given(case=guessing)
@example(case=NEARER)
def test_keys_of_wrong_guesses_do_not_count(case: Case) -> None:
    bench = Bench(case)
    bench.run()
    written = [0] * len(case.rows)
    for batch in (batch for batches in bench.batches for batch in batches):
        for span in batch.rows:
            row = span.row.request
            assert span.written_len in (written[row], 0)
            assert span.kv_len <= max(span.written_len, span.kv_len)
            # What it has is right, and so is what it brings but for guesses.
            count = span.num_new - max(0, len(span.logit_positions) - 1)
            assert count > 0
            brought = list(batch.token_ids[span.start : span.start + count])
            assert brought == case.tokens(row)[span.kv_len : span.kv_len + count]
            assert len(span.logit_positions) <= 1 + case.draft_tokens
            if span.logit_positions:
                assert span.logit_positions == tuple(range(count - 1, span.num_new))
            written[row] = span.total_len


def test_right_guesses_spare_sweeps() -> None:
    case = Case(
        rows=[(3, 1, 99), *[(3, CIRCLES, 99)] * 4],  # the first one's prompt goes in circles, too
        size=5,
        count=1,
        max_batch_tokens=40,
        kv=Split(gpu=1.0),
    )
    benches = [Bench(case), Bench(replace(case, draft_tokens=4))]
    for bench in benches:
        bench.run()
    # Two circles one by one, with the prompt before them, then the others at once.
    assert [len(bench.batches) for bench in benches] == [CIRCLES, 5]


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


@pytest.mark.parametrize("pages_per_row, has_enough", [(3, True), (1, False)])
def test_what_a_row_takes_does_not_grow_with_the_block(
    pages_per_row: int, has_enough: bool
) -> None:
    """Blocks have thousands of rows: none may be looked at for each of the others."""

    def num_calls(num_rows: int) -> tuple[int, int]:
        case = Case(
            rows=[(PAGE_TOKENS, LONGEST_ANSWER, 8)] * num_rows,
            size=num_rows // 4,
            count=4,
            max_batch_tokens=PAGE_TOKENS * num_rows,
            kv=Split(gpu=1.0),
            admission="refill",
            entry_pace=1000.0,
            num_pages=pages_per_row * num_rows,
        )
        bench = Bench(case)
        bench.scheduler = bench.make(longest_answer=LONGEST_ANSWER, expected=1.0)
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            bench.run()
        finally:
            sys.setprofile(None)
        assert len(bench.completions) == num_rows
        batches = [batch for own in bench.batches for batch in own]
        least = num_rows * (PAGE_TOKENS + LONGEST_ANSWER - 1)
        assert (sum(batch.num_tokens for batch in batches) == least) == has_enough
        return counted, sum(len(batch.rows) for batch in batches)

    few, few_brought = num_calls(100)
    many, many_brought = num_calls(800)
    # As many for each time that a row is in a sweep.
    assert many / many_brought < 1.5 * few / few_brought


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
        slot_pages=NUM_PAGES,
        tokenizer=None,
        eos_ids=frozenset({END}),
        lengths=Lengths(expected=2.0, longest=2),
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


# -- rows that enter while others are under way ---------------------------------------------------


def ages(bench: Bench) -> list[list[int]]:
    """For each sweep, how many tokens its rows have made before it."""
    return [
        sorted(
            span.total_len - bench.case.rows[span.row.request][0]
            for batch in batches
            for span in batch.rows
        )
        for batches in bench.batches
    ]


@pytest.mark.parametrize(
    ("block_rows", "answer", "entering"),
    [(12, 4, [3]), (8, 4, [2]), (4, 4, [1]), (6, 4, [1, 2]), (2, 4, [0, 1]), (2, 6, [0, 0, 1])],
)
def test_the_diagonal_lets_a_share_of_the_block_enter_at_every_sweep(
    block_rows: int, answer: int, entering: list[int]
) -> None:
    """Rows of one length, and exactly the pages that evenly spread ages take."""
    prompt = 8
    held = [-(-(prompt + age) // PAGE_TOKENS) for age in range(answer)]
    case = Case(
        rows=[(prompt, answer, 99)] * (6 * block_rows),
        size=block_rows,
        count=1,
        max_batch_tokens=200,
        kv=Split(gpu=1.0),
        admission="diagonal",
        num_pages=max(ROW_PAGES + 1, -(-block_rows * sum(held) // answer) + 1),
    )
    bench = Bench(case)
    bench.scheduler = bench.make(longest_answer=answer)
    bench.run()
    steady = ages(bench)[answer : -2 * answer]
    assert all(len(own) == block_rows for own in steady)
    fresh = [own.count(0) for own in steady]
    assert set(fresh) <= set(entering)
    assert abs(sum(fresh) / len(fresh) - block_rows / answer) < 0.2
    assert not any(age for own in ages(bench)[:1] for age in own)


def test_a_row_that_ends_is_replaced_at_the_next_sweep() -> None:
    case = Case(
        rows=[(3, 6, 2 + row % 3) for row in range(30)],
        size=2,
        count=2,
        max_batch_tokens=30,
        kv=Split(gpu=1.0),
        admission="refill",
        entry_pace=1000.0,
    )
    bench = Bench(case)
    bench.run()
    assert all(len(own) == 4 for own in ages(bench)[:-5])


@pytest.mark.parametrize(
    "place",
    [{"kv": Split(gpu=1.0), "num_pages": 9}, {"kv": Split(disk=1.0), "slot_pages": 9}],
    ids=["pages at home are few", "a slot is small"],
)
def test_rows_longer_than_expected_give_way_to_the_oldest(place: dict[str, Any]) -> None:
    """Short answers first, so that long ones are not expected; too few pages for those, at home or
    in the slot that they pass through."""
    case = Case(
        rows=[(1, 6, 1)] * 30 + [(1, 6, 99)] * 12,
        size=8,
        count=1,
        max_batch_tokens=12,
        admission="refill",
        entry_pace=1000.0,
        **place,
    )
    bench = Bench(case)
    bench.run()
    begun = [
        span.row.request
        for batches in bench.batches
        for batch in batches
        for span in batch.rows
        if span.kv_len == 0
    ]
    assert len(begun) > len(case.rows), "no row has given its pages up: the case is too easy"
    assert len(bench.completions) == len(case.rows)


@pytest.mark.parametrize("far_pages, is_enough", [(NUM_PAGES, True), (ROW_PAGES, False)])
def test_rows_that_outgrow_their_tier_move_on(far_pages: int, is_enough: bool) -> None:
    """As above, with a slower tier behind: where it has room nothing is computed twice."""
    case = Case(
        rows=[(1, 6, 1)] * 30 + [(1, 6, 99)] * 24,
        size=16,
        count=1,
        max_batch_tokens=40,
        kv=Split(gpu=0.75, cpu=0.25),
        admission="refill",
        entry_pace=1000.0,
        num_pages=13,
    )

    def num_brought(*, moves_rows: bool) -> int:
        bench = Bench(case)
        bench.kv = cache(case.num_pages, far_pages)
        bench.policy = replace(case.policy(), moves_rows=moves_rows)
        bench.scheduler = bench.make(longest_answer=LONGEST_ANSWER)
        bench.run()
        assert (("compute", "cpu") in bench.moves) == (moves_rows and is_enough)
        assert len(bench.completions) == len(case.rows)
        return sum(span.num_new for own in bench.batches for b in own for span in b.rows)

    # Each row its prompt of one token, and each token that is not its last.
    least = sum(min(most, end + 1) for _, most, end in case.rows)
    assert (num_brought(moves_rows=True) == least) == is_enough
    assert num_brought(moves_rows=False) > least


def test_blocks_stay_as_large_as_planned_where_rows_move() -> None:
    """Pages for half of what all rows may grow to, tails for the rows that disks are planned to
    have, and answers longer than was expected."""
    num_farther = 0
    for seed in range(40):
        dice = random.Random(seed)
        size, count = dice.choice([6, 8, 12, 16]), dice.choice([1, 2, 3])
        kv = dice.choice([Split(gpu=0.75, cpu=0.25), Split(gpu=0.4, cpu=0.3, disk=0.3)])
        case = Case(
            rows=[(dice.randint(1, 4), LONG_ANSWER, dice.choice([2, 3, 6, 30])) for _ in range(80)],
            size=size,
            count=count,
            max_batch_tokens=60,
            kv=kv,
            admission="refill",
            entry_pace=dice.choice([2.0, 1000.0]),
            num_pages=max(LONG_ROW_PAGES, round(kv.gpu * size) * count * 7 // 2),
            expected=dice.choice([2.0, 6.0, 12.0]),
        )
        bench = Bench(case)
        bench.run()
        assert len(bench.completions) == len(case.rows)
        assert max(len(batch.rows) for own in bench.batches for batch in own) <= size
        assert not bench.kv.rows
        num_farther += sum(HOMES.index(to) > HOMES.index(own) for own, to in bench.moves)
    assert num_farther > 40


def test_rows_come_nearer_when_others_have_ended_and_nobody_waits() -> None:
    """Every third row is on the device; those end at once, and the oldest of the others take their
    places."""
    case = Case(
        rows=[(1, 6, 2 if row % 3 == 0 else 99) for row in range(12)],
        size=12,
        count=1,
        max_batch_tokens=40,
        kv=Split(gpu=1 / 3, cpu=1 / 3, disk=1 / 3),
        admission="refill",
        entry_pace=1000.0,
    )

    def moves(*, moves_rows: bool) -> list[tuple[Home, Home]]:
        bench = Bench(case)
        bench.policy = replace(case.policy(), moves_rows=moves_rows)
        bench.scheduler = bench.make(longest_answer=LONGEST_ANSWER)
        bench.run()
        return bench.moves

    found = moves(moves_rows=True)
    assert sorted(found[:4]) == [("cpu", "compute")] * 2 + [("disk", "compute")] * 2
    assert set(found[4:]) <= {("disk", "cpu")}
    assert not moves(moves_rows=False)


def test_prompts_come_in_chunks_beside_rows_that_decode() -> None:
    case = Case(
        rows=[(1, 6, 99), (9, 2, 99), (9, 2, 99)],
        size=3,
        count=1,
        max_batch_tokens=5,
        kv=Split(gpu=1.0),
        admission="refill",
        entry_pace=1000.0,
    )
    bench = Bench(case)
    bench.run()
    brought = [
        {span.row.request: span.num_new for batch in batches for span in batch.rows}
        for batches in bench.batches
    ]
    assert brought[:5] == [
        {0: 1, 1: 4},
        {0: 1, 1: 4},
        {0: 1, 1: 1, 2: 3},
        {0: 1, 1: 1, 2: 3},
        {0: 1, 2: 3},
    ]


def test_samples_share_a_prompt_that_comes_in_chunks() -> None:
    requests = [
        Request(
            index=i, prompt_ids=[1] * 9, params=SamplingParams(n=n, temperature=1, max_tokens=2)
        )
        for i, n in enumerate([2, 1, 2])
    ]
    case = Case(rows=[], size=4, count=1, max_batch_tokens=7, kv=Split(gpu=1.0), admission="refill")
    kv = cache()
    scheduler = Scheduler(
        iter(requests),
        policy=case.policy(),
        kv_cache=kv,
        slot_pages=NUM_PAGES,
        tokenizer=None,
        eos_ids=frozenset(),
        lengths=Lengths(expected=2.0, longest=2),
        describe=lambda sweep, batch, continues: BatchWork(batch=batch, continues=continues),
    )
    prompts: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    completions = []
    for sweep in scheduler.sweeps():
        (work,) = sweep.works
        for span in work.batch.rows:
            if span.total_len <= 9:
                prompts[span.row.request].append((span.num_new, len(span.keys)))
        keys = [key for span in work.batch.rows if span.logit_positions for key in span.keys]
        assert [draw.row for draw in scheduler.draws(work.batch)] == keys
        completions += scheduler.update(work.batch, NewTokens(token_ids=[7] * len(keys)))
    for request, brought in prompts.items():
        assert sum(count for count, _ in brought) == 9
        assert {rows for _, rows in brought} == {requests[request].params.n}
    assert len(prompts[0]) > 1
    assert sorted(completion.index for completion in completions) == [0, 1, 2]
    assert not kv.rows


@settings(deadline=None, max_examples=80)
@given(data=st.data(), case=continuous)
def test_the_forecast_lets_rows_enter_as_the_run_does(data: st.DataObject, case: Case) -> None:
    """Answers of known lengths: all alike, or on the diagonal, or without a pace. Where a prompt's
    chunks take longer than its pages were reckoned for, the run computes a row again, or moves one
    to a slower tier; a forecast knows of no such row."""
    rows = [(prompt, most, 99) for prompt, most, _ in case.rows]
    if case.admission == "refill" and case.entry_pace < 1000:
        answer = data.draw(st.integers(1, LONGEST_ANSWER))
        rows = [(prompt, answer, 99) for prompt, _, _ in rows]
    longest = max((most for _, most, _ in rows), default=1)
    case = replace(case, rows=rows, ignore_eos=True)
    bench = Bench(case)
    bench.scheduler = bench.make(longest_answer=longest)
    given_up: list[Row] = []
    waiting = bench.scheduler._waiting
    put_back = waiting.put_back

    def note(row: Row) -> None:
        given_up.append(row)
        put_back(row)

    waiting.put_back = note
    bench.run()
    found = [
        sorted(
            (span.row.request, batch.index, span.kv_len, span.num_new)
            for batch in batches
            for span in batch.rows
        )
        for batches in bench.batches
    ]
    speed = HOMES.index
    if not rows or given_up or any(speed(to) > speed(origin) for origin, to in bench.moves):
        return
    tiers: tuple[Tier, ...] = ("gpu", "cpu", "disk")
    told = roll_out(
        [RowLength(prompt, most) for prompt, most, _ in rows],
        case.policy(),
        num_pages=dict.fromkeys(tiers, case.num_pages),
        slot_pages=case.slot_pages,
        mean_answer=longest,
    )
    assert found == [
        sorted(
            zip(
                own.census.numbers.tolist(),
                (own.census.seats // case.size).tolist(),
                own.census.kv_lens.tolist(),
                own.census.brought.tolist(),
                strict=True,
            )
        )
        for own in told
    ]
    assert sum(own.num_ended for own in told) == len(rows)
    seats = [tier for tier, _, count in case.policy().homes(case.size) for _ in range(count)]
    homes = [
        {n: seats[s % case.size] for s, n in zip(own.census.seats, own.census.numbers, strict=True)}
        for own in told
    ]
    assert bench.homes == homes


def test_a_prompt_is_scored_whichever_of_its_samples_comes_first() -> None:
    """The first sample gave its pages up at once, and comes behind the second."""
    params = SamplingParams(n=2, temperature=1, max_tokens=1, prompt_logprobs=0)
    request = Request(index=0, prompt_ids=[1] * 5, params=params)
    case = Case(rows=[], size=2, count=1, max_batch_tokens=9, kv=Split(gpu=1.0), admission="refill")
    scheduler = Scheduler(
        iter([request]),
        policy=case.policy(),
        kv_cache=cache(),
        slot_pages=NUM_PAGES,
        tokenizer=None,
        eos_ids=frozenset(),
        lengths=Lengths(expected=1.0, longest=1),
        describe=lambda sweep, batch, continues: BatchWork(batch=batch, continues=continues),
    )
    admission = scheduler._admission
    admission.admit()
    admission.block[0] = dict(reversed(admission.block[0].items()))
    sweep = next(iter(scheduler.sweeps()))
    (span,) = sweep.works[0].batch.rows
    assert [key.sample for key in span.keys] == [1, 0]
    assert span.scored == range(4)
