"""Attention over paged keys and values, against torch and against a plain computation in float64.

Ragged rows, windows and shared heads at random, pages anywhere in the pool; and the merging of
parts of the keys by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.cuda.choice import NO_KERNELS, Kernels, use_kernels
from freight.kernels.paged import attend_queries
from freight.kernels.pages import Pages
from freight.kernels.threads import find_loops
from freight.model import attention, kv_view
from freight.model.attention import append, attend
from freight.model.batch import RowKey, RowSpan
from freight.model.kv_view import KVView, index_rows
from freight.model.programme import Attend
from freight.model.stems import merge
from freight.model.workspace import Workspace

PAGE = 4
Shape = tuple[int, int, int]  # query heads, key/value heads, head width


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows of (keys so far, new tokens)."""

    rows: list[tuple[int, int]]
    shape: Shape
    window: int | None
    seed: int
    scale: float | None = None
    softcap: float | None = None
    keys_alone: bool = False

    @property
    def step(self) -> Attend:
        heads, kv_heads, width = self.shape
        return Attend(
            q="q",
            k="k",
            v="k" if self.keys_alone else "v",
            out="out",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            scale=self.scale or width**-0.5,
            softcap=self.softcap,
            window=self.window,
        )

    def spans(self) -> list[RowSpan]:
        spans: list[RowSpan] = []
        start = 0
        for row, (kv_len, num_new) in enumerate(self.rows):
            spans.append(
                RowSpan(
                    row=RowKey(row),
                    start=start,
                    num_new=num_new,
                    kv_len=kv_len,
                    logit_positions=(0,),
                )
            )
            start += num_new
        return spans


cases = st.builds(
    Case,
    rows=st.lists(st.tuples(st.integers(0, 21), st.integers(1, 11)), min_size=1, max_size=6),
    shape=st.sampled_from([(4, 4, 8), (4, 2, 8), (6, 1, 5), (2, 2, 16), (6, 2, 24)]),
    window=st.sampled_from([None, None, 1, 3, 9]),
    seed=st.integers(0, 1000),
    keys_alone=st.booleans(),
)
capped = st.builds(
    replace,
    cases,
    scale=st.sampled_from([None, 0.7]),
    softcap=st.sampled_from([0.5, 3.0]),
)
decodes = st.builds(
    Case,
    rows=st.lists(st.tuples(st.integers(0, 40), st.just(1)), min_size=1, max_size=8),
    shape=st.sampled_from([(4, 2, 8), (6, 1, 5), (4, 4, 16), (5, 1, 32), (14, 2, 48), (3, 1, 80)]),
    window=st.sampled_from([None, 5]),
    seed=st.integers(0, 1000),
    keys_alone=st.booleans(),
)


class Run:
    """A case with random keys in a pool of shuffled pages."""

    def __init__(
        self,
        case: Case,
        shuffle: int = 0,
        *,
        by_loop: bool = False,
        without_scores: bool = False,
    ) -> None:
        self.case = case
        self.by_loop = by_loop
        self.without_scores = without_scores
        generator = torch.Generator().manual_seed(case.seed)
        heads, kv_heads, width = case.shape
        self.spans = case.spans()
        num_tokens = self.spans[-1].end
        self.q = torch.randn(num_tokens, heads, width, generator=generator)
        self.k, self.v = (
            [torch.randn(s.total_len, kv_heads, width, generator=generator) for s in self.spans]
            for _ in range(2)
        )
        self.v = self.k if case.keys_alone else self.v
        counts = [-(-span.total_len // PAGE) for span in self.spans]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(shuffle))
        self.tables = [part.tolist() for part in order[: sum(counts)].split(counts)]
        # What no row has written is not a number: whoever looks at it is found out.
        shape = (sum(counts) + 2, 2 - case.keys_alone, kv_heads, PAGE, width)
        self.pool = torch.full(shape, float("nan"))
        self.view = self.index(self.spans, self.tables)
        self._fill()

    def index(self, spans: list[RowSpan], tables: list[list[int]]) -> KVView:
        heads, kv_heads, width = self.case.shape
        return index_rows(
            spans,
            tables,
            start=spans[0].start,
            page_tokens=PAGE,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            element_bytes=4,
            device=torch.device("cpu"),
            by_loop=self.by_loop,
            without_scores=self.without_scores,
        )

    @property
    def pages(self) -> Pages:
        _, kv_heads, width = self.case.shape
        raw = self.pool.view(len(self.pool), -1).view(torch.uint8)
        return Pages(
            raw=raw,
            num_heads=kv_heads,
            page_tokens=PAGE,
            width=width,
            dtype=self.pool.dtype,
            keys_alone=self.case.keys_alone,
        )

    def _fill(self) -> None:
        for span, table, k, v in zip(self.spans, self.tables, self.k, self.v, strict=True):
            for place in range(span.kv_len):
                self.pool[table[place // PAGE], 0, :, place % PAGE] = k[place]
                self.pool[table[place // PAGE], -1, :, place % PAGE] = v[place]
        new_k, new_v = (
            torch.cat([x[s.kv_len :] for s, x in zip(self.spans, xs, strict=True)])
            for xs in (self.k, self.v)
        )
        append(self.pages, self.view, new_k, new_v)
        # Pages are padded with what was there before: numbers, which the mask hides.
        self.pool.nan_to_num_(nan=1e4)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full_like(self.q, float("nan"))
        lse = torch.full(self.q.shape[:2], float("nan"))
        workspace = Workspace(torch.zeros(32 << 20, dtype=torch.uint8))
        attend(self.case.step, self.q, self.pages, self.view, out, workspace, lse)
        return out, lse

    def attend_fused(self) -> torch.Tensor:
        """Without sums: torch's own attention where it can."""
        out = torch.full_like(self.q, float("nan"))
        workspace = Workspace(torch.zeros(32 << 20, dtype=torch.uint8))
        attend(self.case.step, self.q, self.pages, self.view, out, workspace)
        return out


def plain(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row in float64, straight from the definition."""
    heads, kv_heads, _ = run.case.shape
    outs, lses = [], []
    for span, k, v in zip(run.spans, run.k, run.v, strict=True):
        q = run.q[span.start : span.end].double()
        keys, values = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, keys) * run.case.step.scale
        if run.case.softcap is not None:
            scores = run.case.softcap * torch.tanh(scores / run.case.softcap)
        places = torch.arange(span.kv_len, span.total_len)[:, None]
        seen = torch.arange(span.total_len)[None, :]
        hidden = seen > places
        if run.case.window is not None:
            hidden |= seen <= places - run.case.window
        scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("nts,snh->tnh", scores.softmax(-1), values))
        lses.append(scores.logsumexp(-1).t())
    return torch.cat(outs).float(), torch.cat(lses).float()


def test_neighbours_that_bring_several_tokens_are_attended_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [(3, 5), (0, 7), (2, 7), (9, 1), (0, 2), (4, 1), (0, 3), (6, 9)]
    run = Run(Case(rows=rows, shape=(4, 2, 16), window=None, seed=3), by_loop=True)
    asked = []

    def by_loop(q: torch.Tensor, *args: Any, **options: Any) -> bool:
        asked.append(len(q))
        return attend_queries(q, *args, **options)

    monkeypatch.setattr(attention, "loop_attends_faster", lambda dtype, width: True)
    monkeypatch.setattr(attention, "attend_queries", by_loop)
    found, _ = run.attend()
    torch.testing.assert_close(found, plain(run)[0], rtol=1e-5, atol=1e-5)
    if find_loops() is not None:
        assert asked == [5 + 7 + 7, 3 + 9, 2]


@settings(deadline=None, max_examples=80)
@given(case=st.one_of(cases, capped, decodes))
def test_ragged_rows(case: Case) -> None:
    """By loops where heads are wide enough for them, and by torch alone."""
    expected, sums = plain(Run(case))
    for is_faster in (True, False):
        run = Run(case, by_loop=is_faster)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "QUERY_BLOCK", 4)
            patch.setattr(attention, "loop_attends_faster", lambda *_, own=is_faster: own)
            if not is_faster:
                patch.setattr(attention, "attend_queries", lambda *_, **__: False)
            for mine, own in zip(run.attend(), (expected, sums), strict=True):
                torch.testing.assert_close(mine, own, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(run.attend_fused(), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(case=cases)
def test_against_torch(case: Case) -> None:
    run = Run(case)
    mine, _ = run.attend()
    for span, k, v in zip(run.spans, run.k, run.v, strict=True):
        places = torch.arange(span.kv_len, span.total_len)[:, None]
        seen = torch.arange(span.total_len)[None, :]
        mask = (seen <= places) & (seen > places - (case.window or span.total_len))
        q, keys, values = (x.transpose(0, 1)[None] for x in (run.q[span.start : span.end], k, v))
        expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)[
            0
        ].transpose(0, 1)
        torch.testing.assert_close(mine[span.start : span.end], expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(case=st.one_of(cases, decodes), shuffle=st.integers(1, 1000))
def test_where_the_pages_are_does_not_matter(case: Case, shuffle: int) -> None:
    first, second = Run(case), Run(case, shuffle)
    for one, other in zip(first.attend(), second.attend(), strict=True):
        assert torch.equal(one, other)


@settings(deadline=None, max_examples=25)
@given(
    case=st.one_of(cases, decodes),
    size=st.integers(1, 4000),
    block=st.integers(1, 5),
    by_loop=st.booleans(),
)
def test_neither_do_groups_and_blocks(case: Case, size: int, block: int, by_loop: bool) -> None:
    """Rows attended in other company, and queries in smaller blocks."""
    expected = plain(Run(case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_view, "GROUP_BYTES", size)
        patch.setattr(kv_view, "LOOP_BYTES", size)
        patch.setattr(attention, "QUERY_BLOCK", block)
        patch.setattr(kv_view, "QUERY_BLOCK", block)
        for mine, wanted in zip(Run(case, by_loop=by_loop).attend(), expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    lens=st.lists(st.sampled_from([2, 2, 2, 7]), min_size=2, max_size=7),
    softcap=st.sampled_from([None, 3.0]),
    size=st.integers(1, 4000),
    times=st.integers(1, 8),
)
def test_prompts_that_need_no_scores_are_more_at_once(
    lens: list[int], softcap: float | None, size: int, times: int
) -> None:
    """Where scores are held all the same, a group is attended in parts."""
    rows = [(0, count) for count in lens]
    case = Case(rows=rows, shape=(4, 2, 8), window=None, seed=len(lens), softcap=softcap)
    expected, sums = plain(Run(case))
    at_once: list[int] = []

    def block(step, q, keys, *others):  # type: ignore[no-untyped-def]
        at_once.append(keys.shape[0] // step.num_kv_heads)
        whole_block(step, q, keys, *others)

    whole_block = attention._attend_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_view, "GROUP_BYTES", size)
        patch.setattr(kv_view, "PROMPT_BYTES", times * size)
        patch.setattr(attention, "_attend_block", block)
        patch.setattr(attention, "attend_queries", lambda *_, **__: False)
        run = Run(case, without_scores=True)
        with_scores = Run(case).view.groups
        assert len(run.view.groups) <= len(with_scores)
        for is_fused in (True, False):
            patch.setattr(attention, "is_fused", lambda *_, own=is_fused: own and softcap is None)
            found, own_sums = run.attend()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(own_sums, sums, rtol=1e-5, atol=1e-5)
    assert max(at_once) <= max(group.num_rows for group in with_scores)


def test_rows_attended_in_place_are_one_group() -> None:
    """Their keys are not put together, so nothing bounds them, or where loops attend them only
    their queries do; sparse ones are put together on devices."""
    rows = [(20, 1), (3, 1), (9, 1), (7, 5), (2, 5)]
    case = Case(rows=rows, shape=(4, 2, 8), window=None, seed=0)
    run, cpu = Run(case), torch.device("cpu")

    def sizes(share: float, *, by_loop: bool = False) -> list[int]:
        view = index_rows(
            run.spans,
            run.tables,
            start=0,
            page_tokens=PAGE,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            element_bytes=4,
            device=cpu,
            share_of_keys=share,
            by_loop=by_loop,
        )
        return [group.num_rows for group in view.groups]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_view, "GROUP_BYTES", 1)
        assert sizes(1.0) == [1] * 5
        assert sizes(1.0, by_loop=True) == sizes(0.5, by_loop=True) == [3, 1, 1]
        patch.setattr(kv_view, "LOOP_BYTES", 2 * 2 * 4 * 4 * 8)  # queries of two rows
        assert sizes(1.0, by_loop=True) == [2, 1, 1, 1]
        use_kernels(cpu, Kernels(attend=lambda *_, **__: None))
        try:
            assert sizes(1.0) == [3, 1, 1]
            assert sizes(0.5) == [1] * 5
        finally:
            use_kernels(cpu, NO_KERNELS)


@settings(deadline=None, max_examples=25)
@given(case=cases, data=st.data())
def test_only_the_view_s_tokens_are_touched(case: Case, data: st.DataObject) -> None:
    run = Run(case)
    first = data.draw(st.integers(0, len(run.spans) - 1))
    last = data.draw(st.integers(first + 1, len(run.spans)))
    expected, _ = run.attend()
    run.view = run.index(run.spans[first:last], run.tables[first:last])
    out, lse = run.attend()
    inside = slice(run.spans[first].start, run.spans[last - 1].end)
    torch.testing.assert_close(out[inside], expected[inside], rtol=1e-5, atol=1e-5)
    out[inside], lse[inside] = float("nan"), float("nan")
    assert out.isnan().all() and lse.isnan().all()


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_queries=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_merged_parts_are_the_whole(sizes: list[int], num_queries: int, seed: int) -> None:
    """Attention over parts of the keys, merged, is torch's over all of them."""
    generator = torch.Generator().manual_seed(seed)
    heads, width = 3, 8
    q = 3 * torch.randn(num_queries, heads, width, generator=generator)
    k, v = (torch.randn(sum(sizes), heads, width, generator=generator) for _ in range(2))
    parts = []
    for keys, values in zip(k.split(sizes), v.split(sizes), strict=True):
        scores = torch.einsum("tnh,snh->tns", q, keys) * width**-0.5
        attended = torch.einsum("tns,snh->tnh", scores.softmax(-1), values)
        parts.append((attended, scores.logsumexp(-1)))
    merged, total = parts[0]
    for other in parts[1:]:
        merge(merged, total, *other)
    whole = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))
    torch.testing.assert_close(merged, whole[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    scores = torch.einsum("tnh,snh->tns", q, k) * width**-0.5
    torch.testing.assert_close(total, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
