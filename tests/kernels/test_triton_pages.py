"""Triton's kernels for pages: what is appended to the bit, single queries against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.cuda.choice import NO_KERNELS
from freight.kernels.grouped import quantise
from freight.kernels.paged import append_rows, attend_single_queries
from freight.kernels.pages import Pages
from freight.model.number_format import BITS, Grouped
from freight.model.workspace import Workspace

from .test_paged import Case, Run, cases
from .triton_bed import DEVICE, EXAMPLES, attention, in_use, loaded

whole = st.builds(
    replace,
    cases,
    kv_lens=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    share=st.just(1.0),
    kept=st.sampled_from([None, (3, 64), (4, 32), (4, 64), (4, 128), (8, 32), (8, 128)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)


class OnDevice(Run):
    """A case on the device; ``sums`` are what its attention leaves beside."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.pages = replace(self.pages, raw=self.pages.raw.to(DEVICE))
        self.sums = torch.empty(0)

    def append(self) -> None:
        places = (own.to(DEVICE) for own in self.places())
        append_rows(self.pages, *places, self.k.to(DEVICE), self.v.to(DEVICE))

    def attend(self, room: int = 0) -> torch.Tensor:
        """With so many bytes for parts; 0: in one part."""
        case, num_rows = self.case, len(self.q)
        # Rows and heads with something between them, which must stay.
        held = torch.full((num_rows, *self.q.shape[1:]), 7.0, dtype=case.dtype).repeat(1, 2, 1)
        held, lse = held.to(DEVICE), torch.empty(self.q.shape[:2], device=DEVICE)
        out = held[:, : self.q.shape[1]]
        workspace = Workspace(torch.empty(room, dtype=torch.uint8, device=DEVICE))
        assert attend_single_queries(
            self.q.to(DEVICE),
            self.pages,
            self.key_rows.to(DEVICE),
            torch.tensor(case.kv_lens, device=DEVICE),
            out,
            scale=0.3,
            softcap=case.softcap,
            window=case.window,
            share_of_keys=1.0,
            lse=lse,
            workspace=workspace if room else None,
        )
        assert (held[:, self.q.shape[1] :] == 7.0).all()
        self.sums = lse.cpu()
        return out.cpu()

    def expected_sums(self) -> torch.Tensor:
        """Log-sum-exp of the scores, row by row in float64."""
        case, sums = self.case, []
        heads, kv_heads, _ = case.shape
        ends = torch.tensor(case.kv_lens).add(1).cumsum(0).tolist()
        for row, end in enumerate(ends):
            first = max(end - case.kv_lens[row] - 1, end - (case.window or end))
            keys = self.as_kept(self.k[first:end]).double().repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("nh,snh->ns", self.q[row].double(), keys) * 0.3
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            sums.append(scores.logsumexp(-1))
        return torch.stack(sums)


@settings(deadline=None, max_examples=EXAMPLES)
@given(case=whole, room=st.sampled_from([0, 1 << 20]))
def test_single_queries(case: Case, room: int) -> None:
    """In one part, and in several where rows are few."""
    run = OnDevice(case)
    with pytest.MonkeyPatch.context() as patch, in_use(loaded()):
        patch.setattr(attention, "_LEAST_KEYS", 20)
        with in_use(NO_KERNELS):
            run.append()
        found = run.attend(room)
    # Scores of 20 are off by units of 1e-6 in float32, weights by as much of themselves.
    tolerance = 1e-4 if case.dtype is torch.float32 else 2e-2
    wanted, _ = run.expected()
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    sums = run.expected_sums()
    torch.testing.assert_close(run.sums.double(), sums, rtol=tolerance, atol=tolerance)


def test_parts_are_what_is_tested() -> None:
    """Few rows are cut into several parts, many are not, and no part is too short."""
    device = torch.device("cpu")
    assert attention._count_parts(1, 100_000, device) > 4
    assert attention._count_parts(1, 600, device) == 2
    assert attention._count_parts(10_000, 100_000, device) == 1
    assert attention._count_parts(1, 10, device) == 1


@settings(deadline=None, max_examples=EXAMPLES)
@given(case=whole)
def test_what_is_kept(case: Case) -> None:
    """The reference's bytes, and no others are touched."""
    fast, slow = OnDevice(case), OnDevice(case)
    with in_use(loaded()):
        fast.append()
    with in_use(NO_KERNELS), pytest.MonkeyPatch.context() as patch:
        patch.setattr("freight.kernels.paged.find_loops", lambda: None)
        slow.append()
    assert torch.equal(fast.pages.raw, slow.pages.raw)


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data(), bits=st.sampled_from(BITS), width=st.sampled_from([4, 32, 40]))
def test_any_numbers_are_kept_as_the_reference_keeps_them(
    data: st.DataObject, bits: int, width: int
) -> None:
    """Infinities, what is no number, zeros of both signs, and the smallest."""
    own = Grouped(bits=bits, group_size=width)
    extremes = [0.0, -0.0, 1e-9, -3e-8, 1e-45, 6e-5, 1e5, math.inf, -math.inf, math.nan, 65519.0]
    elements = st.one_of(FLOATS, st.sampled_from(extremes), st.just(3.14159))
    numbers = data.draw(st.lists(elements, min_size=4 * width, max_size=4 * width))
    k = torch.tensor(numbers, device=DEVICE).view(2, 2, width)
    pages = Pages(
        raw=torch.zeros(1, 4 * 4 * own.row_bytes(width), dtype=torch.uint8, device=DEVICE),
        num_heads=2,
        page_tokens=4,
        width=width,
        dtype=torch.float32,
        number_format=own,
    )
    places = torch.tensor([3, 1], device=DEVICE)
    with in_use(loaded()):
        append_rows(pages, torch.zeros_like(places), places, k, -k)
    for place, new in enumerate((k, -k)):
        kept = pages.rows[0, place].transpose(0, 1)[places]
        assert torch.equal(kept, quantise(new.view(-1, width), own).view(2, 2, -1))
