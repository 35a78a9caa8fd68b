"""Rows in the calls of a micro-batch: each token once and in order, in well filled rectangles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.distributed.tensor.seats import Seats
from freight.memory.kv_cache import KVCache
from freight.model.batch import MicroBatch, RowKey, RowSpan


def pages_of(count: int) -> KVCache:
    return KVCache(
        pools={"compute": [torch.empty(count, 0, dtype=torch.uint8)]},
        tails=[torch.empty(0, 0, dtype=torch.uint8)],
        file=None,
        num_disk_pages=0,
        page_tokens=64,
        far_page_bytes=(0,),
    )


def micro_batch(brought: list[tuple[int, int, bool]]) -> MicroBatch:
    """Of rows, each with so many tokens before, so many new ones, and whether it makes one."""
    spans, tokens = [], []
    for row, (kv_len, num_new, makes) in enumerate(brought):
        spans.append(
            RowSpan(
                row=RowKey(row),
                start=len(tokens),
                num_new=num_new,
                kv_len=kv_len,
                logit_positions=(num_new - 1,) if makes else (),
            )
        )
        tokens += [1000 * row + kv_len + i for i in range(num_new)]
    return MicroBatch(index=0, rows=tuple(spans), token_ids=tokens)


@given(
    parts=st.sampled_from([1, 2, 4]),
    most=st.integers(1, 40),
    brought=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 40), st.booleans()), min_size=1, max_size=8
    ),
)
def test_every_token_comes_once_and_in_order(
    parts: int, most: int, brought: list[tuple[int, int, bool]]
) -> None:
    pages = pages_of(8)
    pages.admit("compute", [(RowKey(row), 64) for row in range(len(brought))])
    work = micro_batch(brought)
    calls, free = Seats(8, parts, pages, most).calls(work)
    come: dict[int, list[int]] = {}
    wanted = []
    for call in calls:
        assert [*call.seats] == sorted(set(call.seats))
        for part in range(parts):
            here = range(part * 8 // parts, (part + 1) * 8 // parts)
            assert sum(seat in here for seat in call.seats) == len(call.seats) // parts
        # Single tokens come with a power of two of rows.
        assert call.width == 1 or call.num_padded <= max(most, parts)
        lengths = [len(own) for own in call.tokens if own]
        assert 2 * min(lengths) >= max(lengths)
        for row, (seat, kv_len, own) in enumerate(
            zip(call.seats, call.kv_lens, call.tokens, strict=True)
        ):
            if own:
                assert seat not in free
                assert kv_len == own[0] % 1000
                come.setdefault(own[0] // 1000, []).extend(own)
            wanted += [(place, own[-1]) for place_row, place in call.wanted if place_row == row]
    assert [come[row] for row in range(len(brought))] == [
        [*work.token_ids[span.start : span.end]] for span in work.rows
    ]
    last = [work.token_ids[span.end - 1] for span in work.rows if span.logit_positions]
    assert sorted(wanted) == [*enumerate(last)]
    assert len(free) == 8 - len(brought)


@given(
    parts=st.sampled_from([1, 2, 4]),
    most=st.integers(1, 40),
    brought=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40)),
        min_size=1,
        max_size=8,
    ),
)
def test_every_score_has_its_place(
    parts: int, most: int, brought: list[tuple[int, int, int]]
) -> None:
    """Also of what comes in pieces: the next token of the next call's first, and what is behind all
    that a row brings."""
    pages = pages_of(8)
    pages.admit("compute", [(RowKey(row), 64) for row in range(len(brought))])
    work = micro_batch([(0, num_new, True) for num_new, _, _ in brought])
    spans = [
        span._replace(scored=range(min(first, own), min(last, own)), next_id=7_000_000 + row)
        for row, (span, (own, first, last)) in enumerate(zip(work.rows, brought, strict=True))
    ]
    spans = [span if span.scored else span._replace(scored=range(0)) for span in spans]
    work = MicroBatch(index=0, rows=tuple(spans), token_ids=work.token_ids)
    calls, _ = Seats(8, parts, pages, most).calls(work)
    found = {}
    for call in calls:
        for scored in call.scored:
            brings = call.tokens[scored.row]
            for number, target in enumerate(scored.targets):
                found[scored.place + number] = brings[scored.first + number], target
    before = [work.token_ids[span.start + place] for span in spans for place in span.scored]
    assert [*zip(before, work.scored_targets(), strict=True)] == [
        found[place] for place in range(len(found))
    ]


def test_a_row_keeps_its_seat_until_its_pages_are_gone() -> None:
    """Seats that are left go to others."""
    pages = pages_of(2)
    pages.admit("compute", [(RowKey(0), 64), (RowKey(1), 64)])
    seats = Seats(2, 1, pages, 64)
    (first,), free = seats.calls(micro_batch([(0, 3, True), (0, 3, True)]))
    assert first.seats == (0, 1) and free == []
    pages.release(RowKey(0))
    (left,), free = seats.calls(
        MicroBatch(
            index=0,
            rows=(RowSpan(row=RowKey(1), start=0, num_new=1, kv_len=3, logit_positions=(0,)),),
            token_ids=[7],
        )
    )
    assert left.seats == (1,) and free == [0]


def test_samples_of_one_prompt_come_together() -> None:
    """Each gets the keys; one of them the logits."""
    pages = pages_of(4)
    keys = [RowKey(0, sample) for sample in range(3)]
    pages.admit("compute", [(key, 64) for key in keys])
    span = RowSpan(
        row=keys[0],
        start=0,
        num_new=2,
        kv_len=0,
        logit_positions=(1,),
        siblings=tuple(keys[1:]),
    )
    work = MicroBatch(index=0, rows=(span,), token_ids=[5, 6])
    (call,), free = Seats(4, 1, pages, 64).calls(work)
    assert call.tokens == ([5, 6],) * 3 and call.wanted == ((0, 0),) and len(free) == 1
