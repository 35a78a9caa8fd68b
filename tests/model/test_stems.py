"""Keys that rows share, attended once for all of them and merged: the same numbers as row by row.

Random beginnings, rows that have them in any order, own keys and new tokens of any length, windows
that cut the shared part or leave nothing of it, capped scores, compressed keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.pages import Pages
from freight.model import stems
from freight.model.attention import append, attend
from freight.model.batch import RowKey, RowSpan
from freight.model.kv_view import KVView, index_rows, index_stem
from freight.model.number_format import fit_head
from freight.model.stems import attend_stems
from freight.model.workspace import Workspace

from .test_attention import PAGE, Case, Run, plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Branches:
    """Rows of (beginning or -1, own keys so far, new tokens); beginnings have so many pages."""

    beginnings: list[int]
    rows: list[tuple[int, int, int]]
    heads: tuple[int, int, int]
    window: int | None
    softcap: float | None
    seed: int

    def case(self) -> Case:
        rows = [
            (own + (PAGE * self.beginnings[first] if first >= 0 else 0), new)
            for first, own, new in self.rows
        ]
        return Case(
            rows=rows,
            shape=self.heads,
            window=self.window,
            softcap=self.softcap,
            seed=self.seed,
        )


@st.composite
def branches(draw: st.DrawFn) -> Branches:
    beginnings = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    row = st.tuples(
        st.integers(-1, len(beginnings) - 1),
        st.integers(0, 9),
        st.sampled_from([1, 1, 1, 2, 5, 9]),
    )
    return Branches(
        beginnings=beginnings,
        rows=draw(st.lists(row, min_size=1, max_size=9)),
        heads=draw(st.sampled_from([(4, 4, 8), (4, 2, 8), (6, 1, 5), (4, 2, 16), (3, 1, 32)])),
        window=draw(st.sampled_from([None, None, 1, 3, 9, 20])),
        softcap=draw(st.sampled_from([None, None, 0.5, 3.0])),
        seed=draw(st.integers(0, 1000)),
    )


class SharedRun(Run):
    """A case whose rows have their beginnings' pages in common."""

    def __init__(self, own: Branches, *, together: bool = True) -> None:
        self.own, self.together = own, together
        super().__init__(own.case())
        owners: dict[int, int] = {}
        for row, (first, _, _) in enumerate(own.rows):
            if first >= 0 and (owner := owners.setdefault(first, row)) != row:
                count = own.beginnings[first]
                self.tables[row][:count] = self.tables[owner][:count]
                self.k[row][: count * PAGE] = self.k[owner][: count * PAGE]
                self.v[row][: count * PAGE] = self.v[owner][: count * PAGE]
        self.spans = [
            span._replace(prefix=RowKey(-1 - first), shared_len=PAGE * own.beginnings[first])
            if first >= 0
            else span
            for span, (first, _, _) in zip(self.spans, own.rows, strict=True)
        ]
        self.pool.fill_(float("nan"))
        self.view = self.index(self.spans, self.tables)
        self._fill()

    def index(self, spans: list[RowSpan], tables: list[list[int]]) -> KVView:
        heads, kv_heads, width = self.case.shape
        cpu = torch.device("cpu")
        sharers: dict[RowKey, list[int]] = {}
        for row, span in enumerate(spans):
            if span.prefix is not None and self.together:
                sharers.setdefault(span.prefix, []).append(row)
        shared = [span.shared_len if self.together else 0 for span in spans]
        stems = [
            index_stem(
                [spans[row] for row in rows],
                tables[rows[0]][: shared[rows[0]] // PAGE],
                start=0,
                page_tokens=PAGE,
                num_kv_heads=kv_heads,
                device=cpu,
            )
            for rows in sharers.values()
        ]
        return index_rows(
            [s.behind_prefix() if count else s for s, count in zip(spans, shared, strict=True)],
            [table[count // PAGE :] for table, count in zip(tables, shared, strict=True)],
            start=0,
            page_tokens=PAGE,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            element_bytes=4,
            device=cpu,
            stems=stems,
        )

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_all(self, self.q, self.pages)


def attend_all(run: SharedRun, q: torch.Tensor, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"))
    workspace = Workspace(torch.zeros(8 << 20, dtype=torch.uint8))
    step = run.case.step
    if pages.number_format is not None:
        step = replace(step, kv_format=pages.number_format)
    attend(step, q, pages, run.view, out, workspace, lse)
    attend_stems(step, q, pages, run.view, out, lse, workspace)
    return out, lse


@settings(deadline=None, max_examples=120)
@given(own=branches())
def test_as_row_by_row(own: Branches) -> None:
    run = SharedRun(own)
    for mine, expected in zip(run.attend(), plain(run), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


WAYS = ["as chosen", "loop", "scores"]


@settings(deadline=None, max_examples=60)
@given(own=branches(), tokens=st.integers(1, 5), way=st.sampled_from(WAYS))
def test_in_blocks_of_any_size(own: Branches, tokens: int, way: str) -> None:
    """Few tokens at a time, by the loop for prompts, and with scores in the open, as on devices."""
    run = SharedRun(own)
    heads, _, width = own.heads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stems, "STEM_BYTES", tokens * heads * width * 4)
        if way != "as chosen":
            patch.setattr(stems, "is_fused", lambda *_: False)
        if way == "scores":
            patch.setattr(stems, "loop_takes_queries", lambda *_: False)
        for mine, expected in zip(run.attend(), plain(run), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def kept_as(
    run: SharedRun, dtype: torch.dtype, bits: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is attended with keys and queries of another form."""
    _, kv_heads, width = run.case.shape
    number_format = None if bits is None else fit_head(bits, 64, width)
    token = width * dtype.itemsize if number_format is None else number_format.row_bytes(width)
    pages = Pages(
        raw=torch.zeros(len(run.pool), 2 * kv_heads * PAGE * token, dtype=torch.uint8),
        num_heads=kv_heads,
        page_tokens=PAGE,
        width=width,
        dtype=dtype,
        number_format=number_format,
    )
    for span, table, k, v in zip(run.spans, run.tables, run.k, run.v, strict=True):
        whole = span._replace(start=0, num_new=span.total_len, kv_len=0, prefix=None, shared_len=0)
        append(pages, Run.index(run, [whole], [table]), k.to(dtype), v.to(dtype))
    return attend_all(run, run.q.to(dtype), pages)


@settings(deadline=None, max_examples=40)
@given(own=branches(), bits=st.sampled_from([None, 4, 8]), width=st.sampled_from([32, 64]))
def test_of_other_forms(own: Branches, bits: int | None, width: int) -> None:
    """Compressed keys are those that single rows see; in bfloat16 what is merged is rounded once
    more."""
    own = replace(own, heads=(4, 2, width))
    for dtype, slack in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        together, apart = (kept_as(SharedRun(own, together=t), dtype, bits) for t in (True, False))
        for mine, expected in zip(together, apart, strict=True):
            torch.testing.assert_close(mine, expected, rtol=slack, atol=slack)


def lengths(view: KVView) -> Sequence[int]:
    return [group.num_keys for group in view.groups]


def test_a_row_s_own_part_leaves_the_beginning_out() -> None:
    own = Branches(
        beginnings=[5],
        rows=[(0, 0, 3), (0, 7, 1), (-1, 4, 1)],
        heads=(4, 2, 8),
        window=None,
        softcap=None,
        seed=1,
    )
    assert lengths(SharedRun(own).view) == [3, 8]
    assert lengths(SharedRun(own, together=False).view) == [23, 28]
    (stem,) = SharedRun(own).view.stems
    assert stem.num_keys == 20 and stem.tokens.tolist() == [0, 1, 2, 3]
    assert stem.positions.tolist() == [20, 21, 22, 27]
