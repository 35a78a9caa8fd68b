"""Keys and values in pages: appended, attended in place, and taken out, against plain torch.

Pages anywhere in the pool, of plain and compressed numbers, ragged rows, one query each or several,
windows, capped scores, the highest scores only; attention in float64 straight from the definition
is the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numba import njit

from freight.kernels import attention_choice, paged
from freight.kernels.attention_choice import loop_attends_faster
from freight.kernels.attention_steps import PageShape, make_plain
from freight.kernels.grouped import CompressedRows, dequantise_reference, quantise
from freight.kernels.paged import (
    append_rows,
    attend_queries,
    attend_single_queries,
    gather_plain,
)
from freight.kernels.pages import Pages
from freight.model.number_format import Grouped, fit_head

FORMATS = (None, (4, 64), (4, 128), (8, 32), (8, 128))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows with so many earlier keys, and ``num_new`` more, one each unless they are told; ``kept``
    is bits and group size."""

    kv_lens: list[int]
    shape: tuple[int, int, int]  # query heads, key/value heads, head width
    kept: tuple[int, int] | None
    dtype: torch.dtype
    page_tokens: int
    padding: int
    window: int | None
    softcap: float | None
    share: float
    seed: int
    num_new: tuple[int, ...] = ()
    keys_alone: bool = False

    @property
    def totals(self) -> list[int]:
        return [length + new for length, new in zip(self.kv_lens, self.counts, strict=True)]

    @property
    def counts(self) -> tuple[int, ...]:
        return self.num_new or (1,) * len(self.kv_lens)

    @property
    def number_format(self) -> Grouped | None:
        return None if self.kept is None else fit_head(*self.kept, self.shape[2])


cases = st.builds(
    Case,
    kv_lens=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    shape=st.sampled_from(
        [(4, 2, 64), (5, 1, 32), (14, 2, 48), (3, 3, 80), (8, 2, 96), (9, 1, 128), (21, 1, 64)]
    ),
    kept=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    page_tokens=st.sampled_from([4, 16, 32]),
    padding=st.sampled_from([0, 64]),
    window=st.sampled_from([None, None, 1, 40]),
    softcap=st.sampled_from([None, None, 2.0]),
    share=st.sampled_from([1.0, 1.0, 0.1, 0.5]),
    seed=st.integers(0, 1000),
    keys_alone=st.booleans(),
)


PAIRS = Case(
    kv_lens=[0, 2, 15, 16, 40, 64],
    shape=(2, 2, 64),
    kept=None,
    dtype=torch.bfloat16,
    page_tokens=16,
    padding=0,
    window=None,
    softcap=None,
    share=1.0,
    seed=3,
)
"""Rows that are kept as loops over pairs take them."""


class Run:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.keeps = torch.float32  # what the attention makes of compressed numbers
        self.least_gap = math.inf  # between the lowest score that counts and the next one
        generator = torch.Generator().manual_seed(case.seed)
        heads, kv_heads, width = case.shape
        total = sum(case.totals)
        self.k, self.v = (
            (torch.randn(total, kv_heads, width, generator=generator) * 2).to(case.dtype)
            for _ in range(2)
        )
        self.v = self.k if case.keys_alone else self.v
        count = sum(case.counts)
        self.q = torch.randn(count, heads, width, generator=generator).to(case.dtype)
        counts = [-(-length // case.page_tokens) for length in case.totals]
        order = torch.randperm(sum(counts) + 1, generator=generator)
        self.tables = [part.tolist() for part in order[:-1].split(counts)]
        self.pages = _empty_pages(case, sum(counts) + 1)
        most = max(counts)
        table = torch.tensor([own + own[-1:] * (most - len(own)) for own in self.tables])
        heads_of = torch.arange(kv_heads)
        self.key_rows = (table[:, None] * 2 * kv_heads + heads_of[:, None]).flatten()

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.case.page_tokens
        pairs = [
            (table[position // size], position % size)
            for table, length in zip(self.tables, self.case.totals, strict=True)
            for position in range(length)
        ]
        own = torch.tensor(pairs)
        return own[:, 0].contiguous(), own[:, 1].contiguous()

    def append(self) -> None:
        append_rows(self.pages, *self.places(), self.k, self.v)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """And the log-sum-exps."""
        out, lse = torch.full_like(self.q, float("nan")), torch.zeros(self.q.shape[:2])
        case = self.case
        assert attend_single_queries(
            self.q,
            self.pages,
            self.key_rows,
            torch.tensor(case.kv_lens),
            out,
            scale=0.3,
            softcap=case.softcap,
            window=case.window,
            share_of_keys=case.share,
            lse=lse,
        )
        return out, lse

    def attend_several(self) -> tuple[torch.Tensor, torch.Tensor]:
        """And the log-sum-exps; queries and results lie among others."""
        case, (count, heads, width) = self.case, self.q.shape
        room = torch.full((2, count, heads + 1, width), float("nan"), dtype=case.dtype)
        q, out = room[:, :, :-1]
        q.copy_(self.q)
        lse = torch.full((count, heads), float("nan"))
        assert attend_queries(
            q,
            self.pages,
            self.key_rows,
            torch.tensor(case.kv_lens),
            out,
            scale=0.3,
            softcap=case.softcap,
            window=case.window,
            lse=lse,
            num_new=torch.tensor(case.counts) if len({*case.counts}) > 1 else None,
        )
        assert room[:, :, -1].isnan().all()
        return out, lse

    def as_kept(self, x: torch.Tensor) -> torch.Tensor:
        """What is left of x when it has been compressed, in float32."""
        number_format = self.case.number_format
        if number_format is None:
            return x.float()
        rows = x.reshape(-1, x.shape[-1])
        grouped = CompressedRows(
            raw=quantise(rows, number_format), columns=x.shape[-1], number_format=number_format
        )
        plain = torch.empty(rows.shape)
        dequantise_reference(grouped, plain)
        return plain.to(self.keeps).float().view(x.shape)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query by query in float64, and the log-sum-exps."""
        case = self.case
        heads, kv_heads, _ = case.shape
        outs, sums = [], []
        queries = iter(self.q)
        for row, end in enumerate(torch.tensor(case.totals).cumsum(0).tolist()):
            for number in range(case.counts[row]):
                last = end - case.counts[row] + number + 1
                first = end - case.totals[row]
                if case.window is not None:
                    first = max(first, last - case.window)
                keys, values = (
                    self.as_kept(x[first:last]).double().repeat_interleave(heads // kv_heads, dim=1)
                    for x in (self.k, self.v)
                )
                query = next(queries).double()
                scores = torch.einsum("nh,snh->ns", query, keys) * 0.3
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                keep = max(1, math.ceil(case.share * (last - first)))
                highest = scores.topk(min(keep + 1, last - first), dim=-1).values
                least = highest[:, keep - 1 : keep]
                if keep < last - first:
                    self.least_gap = min(self.least_gap, float((least - highest[:, keep:]).min()))
                scores = scores.masked_fill(scores < least, float("-inf"))
                outs.append(torch.einsum("ns,snh->nh", scores.softmax(-1), values))
                sums.append(scores.logsumexp(-1))
        return torch.stack(outs), torch.stack(sums)


def _empty_pages(case: Case, count: int) -> Pages:
    _, kv_heads, width = case.shape

    def pages(raw: torch.Tensor) -> Pages:
        return Pages(
            raw=raw,
            num_heads=kv_heads,
            page_tokens=case.page_tokens,
            width=width,
            dtype=case.dtype,
            number_format=case.number_format,
            keys_alone=case.keys_alone,
        )

    size = pages(torch.empty(0, 0, dtype=torch.uint8)).token_bytes * case.page_tokens
    # What no row has written is not a number.
    num_bytes = (2 - case.keys_alone) * kv_heads * size + case.padding
    return pages(torch.full((count, num_bytes), 255, dtype=torch.uint8))


@pytest.fixture(params=[1, 1000], ids=["pairs", "vectors"])
def least_queries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From how many on a head's queries are attended by pairs, where the processor has these."""
    loops = paged.find_loops()
    if loops is not None and loops.pair_queries is not None:
        monkeypatch.setattr(loops.pair_queries, "LEAST_QUERIES", request.param)


@pytest.mark.usefixtures("least_queries")
@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases)
def test_single_queries(case: Case) -> None:
    run = Run(case)
    run.append()
    tolerance = 1e-5 if case.dtype is torch.float32 else 1e-2
    expected, sums = run.expected()
    assume(run.least_gap > 4e-6)  # in float32 another one might count
    found, found_sums = run.attend()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_sums.double(), sums, rtol=1e-5, atol=2e-5)


DAMAGED = replace(PAIRS, kv_lens=[70, 33, 90], shape=(4, 2, 64))


@pytest.mark.usefixtures("least_queries")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("part", ["k", "v"])
def test_what_is_no_number_is_seen_by_its_row_and_head_alone(
    part: str, share: float, dtype: torch.dtype, softcap: float | None
) -> None:
    """Wherever it is; of a value that is not among the chosen nothing is seen."""
    case = replace(DAMAGED, dtype=dtype, softcap=softcap, share=share)
    whole = Run(case)
    whole.append()
    rest, _ = whole.attend()
    for place in (71, 71 + 20, 71 + 33):
        run = Run(case)
        getattr(run, part)[place, 1, 5] = math.nan
        run.append()
        found, _ = run.attend()
        damaged = found.isnan()
        own_heads = damaged[1, 2:]
        assert (share < 1 and part == "v") or own_heads.any(-1).all()
        damaged[1, 2:] = False
        assert not damaged.any()
        for row, head in ((0, 0), (0, 3), (1, 1), (2, 2)):
            torch.testing.assert_close(found[row, head], rest[row, head], rtol=0, atol=0)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.inf, 3e38, -math.inf, -3e38])
def test_scores_that_overflow_make_no_numbers(
    value: float, dtype: torch.dtype, several: bool
) -> None:
    """Where all are minus infinity weights are alike, or there are none: nothing is raised."""
    counts = (70, 33, 90) if several else ()
    run = Run(replace(DAMAGED, dtype=dtype, num_new=counts))
    run.k.fill_(value)
    run.q.fill_(-100.0)
    run.append()
    found, _ = run.attend_several() if several else run.attend()
    assert value > 0 or not found.isfinite().any()


@pytest.mark.usefixtures("least_queries")
@pytest.mark.parametrize("window", [None, 4500])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [6, 12])
def test_single_queries_of_long_rows(heads: int, window: int | None, softcap: float | None) -> None:
    """Of which some loops take so many tokens at once: the highest scores grow on the way."""
    lengths = [4095, 4096, 9000]
    own = {"window": window, "softcap": softcap}
    run = Run(replace(PAIRS, kv_lens=lengths, shape=(heads, 1, 32), **own))
    grown = torch.cat([torch.linspace(0.1, 2.0, length + 1) for length in lengths])
    run.k = (run.k * grown[:, None, None]).to(run.k.dtype)
    run.append()
    expected, _ = run.expected()
    torch.testing.assert_close(run.attend()[0].double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("least_queries")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sharing", [1, 2, 3, 4, 5, 8, 9, 17])
def test_single_queries_of_short_rows(sharing: int, window: int | None) -> None:
    """However many share a head of keys; most of a register's tokens are not there."""
    run = Run(replace(PAIRS, shape=(2 * sharing, 2, 64), window=window))
    run.append()
    expected, sums = run.expected()
    found, found_sums = run.attend()
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found_sums.double(), sums, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("heads", [1, 6])
def test_single_queries_over_groups_of_all_kinds(heads: int) -> None:
    """Numbers that are all the same, far from zero, and of very different sizes."""
    case = Case(
        kv_lens=[40, 77],
        shape=(heads, 1, 128),
        kept=(4, 64),
        dtype=torch.bfloat16,
        page_tokens=16,
        padding=0,
        window=None,
        softcap=None,
        share=1.0,
        seed=5,
    )
    for low, high in ((3.0, 3.0), (1000.0, 1016.0), (-1e-3, 1e-3), (-2e4, 2e4)):
        run = Run(case)
        run.v[..., :64] = torch.rand(run.v[..., :64].shape) * (high - low) + low
        run.append()
        expected, _ = run.expected()
        found, _ = run.attend()
        # Results are bfloat16, too.
        tolerance = (high - low) * 4e-3
        close = {"rtol": 2**-8, "atol": tolerance + 1e-6}
        torch.testing.assert_close(found.double()[..., :64], expected[..., :64], **close)


@settings(deadline=None, max_examples=40)
@given(
    case=cases,
    counts=st.one_of(
        st.sampled_from([2, 3, 16, 41, 130, 300]).map(lambda count: [count] * 5),
        st.lists(st.integers(1, 90), min_size=5, max_size=5),
    ),
)
def test_several_queries(case: Case, counts: list[int]) -> None:
    """Whole blocks of keys and parts of them, whole panels and parts of them, of rows that bring
    equally many queries or not."""
    rows = case.kv_lens[: 5 if max(counts) < 50 else 2]
    run = Run(replace(case, kv_lens=rows, num_new=tuple(counts[: len(rows)]), share=1.0))
    run.append()
    # Scores of 20 are off by units of 1e-6 in float32, weights by as much of themselves.
    tolerance = 1e-4 if case.dtype is torch.float32 else 1e-2
    loops = paged.find_loops()
    if loops is not None and paged._query_blocks(loops, case.dtype) is loops.pair_attention:
        run.keeps = torch.bfloat16
    expected, sums = run.expected()
    found, found_sums = run.attend_several()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_sums.double(), sums, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [None, (8, 64)])
@pytest.mark.parametrize("keys_alone", [True, False])
def test_queries_of_latents(dtype: torch.dtype, kept: Any, *, keys_alone: bool) -> None:
    """One head of keys, as wide as DeepSeek's, for all queries: several of a row, and one."""
    case = replace(PAIRS, kv_lens=[0, 33, 200], shape=(16, 1, 576), dtype=dtype, kept=kept)
    several = Run(replace(case, keys_alone=keys_alone, num_new=(150, 7, 1)))
    single = Run(replace(case, keys_alone=keys_alone))
    for run in (several, single):
        run.q = run.q / 6  # or scores of a hundred would be off by what shows
        run.append()
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    loops = paged.find_loops()
    if loops is not None and paged._query_blocks(loops, dtype) is loops.pair_attention:
        several.keeps = torch.bfloat16
    for run, attend in ((several, several.attend_several), (single, single.attend)):
        found, sums = attend()
        expected, expected_sums = run.expected()
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(sums.double(), expected_sums, rtol=1e-5, atol=1e-4)


@njit
def _make_plain(raw, halves, first, count, shape, plain, ahead):  # type: ignore[no-untyped-def]
    make_plain(raw, halves, first, count, shape, plain, ahead)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("width", [48, 64, 80])
def test_no_more_is_made_plain_than_there_is_room_for(width: int, count: int, dtype: Any) -> None:
    """Heads that are an odd number of vectors wide, of an odd number of tokens."""
    raw = np.arange(8 * width).astype(dtype)
    sizes = dict.fromkeys(PageShape._fields, np.uintp(0))
    sizes |= {name: np.uintp(width) for name in ("token_stride", "width", "padded")}
    plain, first = np.full(count * width + 64, -1.0, np.float32), np.uintp(width)
    _make_plain(
        raw, np.zeros(0, np.uint16), first, np.uintp(count), PageShape(**sizes), plain, first
    )
    own = raw[width : (count + 1) * width]
    if dtype is np.uint16:
        own = (own.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(plain[: count * width], own)
    assert (plain[count * width :] == -1.0).all()


@settings(deadline=None, max_examples=60)
@given(case=cases)
def test_what_is_kept(case: Case) -> None:
    """Bit for bit what the reference makes, and it comes out again."""
    run = Run(case)
    run.append()
    token_pages, token_places = run.places()
    heads = 2 * case.shape[1]
    for place, x in enumerate((run.k, run.v)[: run.pages.num_parts]):
        kept = run.pages.rows[token_pages, place, :, token_places]
        if case.number_format is not None:
            codes = quantise(x.reshape(-1, x.shape[-1]), case.number_format)
            assert torch.equal(kept, codes.view(*x.shape[:2], -1))
        else:
            assert torch.equal(kept, x)
    count = len(run.tables[0])
    rows = torch.tensor([page * heads + heads - 1 for page in run.tables[0]])
    plain = torch.empty(count, case.page_tokens * case.shape[2], dtype=case.dtype)
    raw = torch.empty(count, case.page_tokens, run.pages.token_bytes, dtype=torch.uint8)
    gather_plain(run.pages, rows, plain, raw)
    own = plain.view(count * case.page_tokens, -1)[: case.kv_lens[0] + 1]
    assert torch.equal(own, run.as_kept(run.v[: len(own), -1]).to(case.dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_extremes_are_kept_as_the_reference_keeps_them(bits: int) -> None:
    extremes = [0.0, -0.0, 1e-9, -3e-8, 6e-5, 1e5, -1e6, math.inf, -math.inf, math.nan, 65504.0]
    numbers = torch.tensor(extremes + [7.0] * 5).repeat(2, 2, 2)
    numbers[1] = 3.14159
    number_format = Grouped(bits=bits, group_size=32)
    pages = Pages(
        raw=torch.zeros(1, 4 * 4 * number_format.row_bytes(32), dtype=torch.uint8),
        num_heads=2,
        page_tokens=4,
        width=32,
        dtype=torch.float32,
        number_format=number_format,
    )
    places = torch.tensor([1, 3])
    append_rows(pages, torch.zeros(2, dtype=torch.long), places, numbers, numbers)
    kept = pages.rows[0, 1].transpose(0, 1)[places]
    assert torch.equal(kept, quantise(numbers.view(-1, 32), number_format).view(2, 2, -1))


def test_the_loop_is_tried_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each type, on one thread, but for asking whether there is a loop; the threads are as
    before."""
    attention_choice._is_faster.cache_clear()
    asked: list[int] = []

    def attend(*args: Any, **kwargs: Any) -> bool:
        asked.append(torch.get_num_threads())
        return attend_queries(*args, **kwargs)

    monkeypatch.setattr(attention_choice, "attend_queries", attend)
    num_threads = torch.get_num_threads()
    assert isinstance(loop_attends_faster(torch.float32, 64), bool)
    assert torch.get_num_threads() == num_threads
    count = len(asked)
    assert count > 1
    assert set(asked[1:]) == {1}
    loop_attends_faster(torch.float32, 64)
    assert len(asked) == count
    assert not loop_attends_faster(torch.float16, 64)
    attention_choice._is_faster.cache_clear()


def test_without_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes; and who asks for attention is told that there is no loop."""
    case = Case(
        kv_lens=[20, 3],
        shape=(4, 2, 64),
        kept=(4, 64),
        dtype=torch.bfloat16,
        page_tokens=16,
        padding=64,
        window=None,
        softcap=None,
        share=1.0,
        seed=1,
    )
    first, second = Run(case), Run(case)
    first.append()
    monkeypatch.setattr(paged, "find_loops", lambda: None)
    second.append()
    assert torch.equal(first.pages.raw, second.pages.raw)
    for attend in (second.attend, second.attend_several):
        with pytest.raises(AssertionError):
            attend()
