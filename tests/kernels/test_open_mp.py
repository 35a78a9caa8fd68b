"""OpenMP's threads, called by compiled loops: all take part, and find what Python's threads find,
to the bit. Skipped where torch has another library, or there is no numba."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from freight.kernels import sharing
from freight.kernels.paged import attend_queries, attend_single_queries
from freight.kernels.pages import Pages
from freight.kernels.products import Product, multiply, scratch_values
from freight.kernels.sharing import team_threads, without_team

njit = pytest.importorskip("numba").njit
open_mp = pytest.importorskip("freight.kernels.open_mp")
if not open_mp.IS_THERE:
    pytest.skip("torch has no such library here", allow_module_level=True)

from freight.kernels.turns import take, wait_for  # noqa: E402  where there is numba

THREADS = 5


@pytest.fixture(autouse=True)
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's threads may help with nothing."""

    def refuse(work: Callable[[], None], helpers: int, **_: object) -> None:
        assert helpers < 1
        work()

    monkeypatch.setattr(sharing, "work_together", refuse)


@njit(nogil=True)
def meet(counters, names, threads):  # type: ignore[no-untyped-def]
    """Every thread waits for all others, so none can do another's share."""
    own = take(counters, np.uintp(0), 1)
    names[own] += own + 1
    take(counters, np.uintp(1), 1)
    wait_for(counters, np.uintp(1), threads)


@njit(nogil=True)
def all_meet(threads, *arguments):  # type: ignore[no-untyped-def]
    open_mp.call_together(meet, arguments, threads)


def test_all_threads_take_part() -> None:
    for threads in (1, 3, THREADS):
        counters, names = np.zeros(2, np.int64), np.zeros(8, np.int64)
        all_meet(threads, counters, names, threads)
        assert names.tolist() == [*range(1, threads + 1), *[0] * (8 - threads)]


def test_callers_side_by_side() -> None:
    """As lanes are: each has threads of its own."""
    wrong: list[list[int]] = []

    def call() -> None:
        for _ in range(50):
            counters, names = np.zeros(2, np.int64), np.zeros(4, np.int64)
            all_meet(3, counters, names, 3)
            if names.tolist() != [1, 2, 3, 0]:
                wrong.append(names.tolist())

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert not wrong and not any(caller.is_alive() for caller in callers)


def test_few_threads_and_small_work_are_left_to_python() -> None:
    assert team_threads(2) == THREADS and team_threads(1) == 0
    with without_team():
        assert team_threads(2) == 0
    torch.set_num_threads(2)
    assert team_threads(99) == 0 and team_threads(1, is_short=True) == 0
    assert team_threads(2, is_short=True) == 2  # which would be over before Python's come
    torch.set_num_threads(1)
    assert team_threads(99, is_short=True) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 40, 130])
def test_products_are_the_same(dtype: torch.dtype, tokens: int, nobody_else: None) -> None:
    """Two of the same tokens, one with a bias, one added to what is there."""
    columns, counts = 512, (3001, 4096)
    x = torch.randn(tokens, columns).to(dtype)
    rows = [torch.randn(count, columns).to(dtype) for count in counts]
    bias = torch.randn(counts[0]).to(dtype)
    scratch = torch.empty(scratch_values(columns, dtype) + tokens * columns * 4, dtype=dtype)

    def outcome() -> list[torch.Tensor]:
        outs = [torch.ones(tokens, count, dtype=dtype) for count in counts]
        first = Product(rows=rows[0], out=outs[0], bias=bias)
        second = Product(rows=rows[1], out=outs[1], adds=True)
        multiply(x, [first, second], lambda size: scratch[:size])
        return outs

    found = outcome()
    with pytest.MonkeyPatch.context() as patch, without_team():
        patch.setattr(sharing, "work_together", lambda work, helpers, **_: work())
        wanted = outcome()
    for one, other, own in zip(found, wanted, rows, strict=True):
        assert torch.equal(one, other)
        plain = x.double() @ own.double().t() + (bias.double() if own is rows[0] else 1.0)
        tolerance = 1e-4 if dtype is torch.float32 else 2.0
        torch.testing.assert_close(one.double(), plain, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 37])
def test_attention_is_the_same(dtype: torch.dtype, queries: int, nobody_else: None) -> None:
    rows, heads, kv_heads, width, page = 6, 8, 4, 64, 16
    lens = torch.tensor([700, 40, 3, 260, 511, 90])
    pages_of_row = -(-(int(lens.max()) + queries) // page)
    pool = torch.randn(rows * pages_of_row, 2 * kv_heads * page * width).to(dtype)
    pages = Pages(
        raw=pool.view(torch.uint8),
        num_heads=kv_heads,
        page_tokens=page,
        width=width,
        dtype=dtype,
        number_format=None,
    )
    table = torch.arange(rows * pages_of_row).view(rows, 1, -1) * 2 * kv_heads
    table = (table + torch.arange(kv_heads)[None, :, None]).flatten()
    q = torch.randn(rows * queries, heads, width).to(dtype)
    attend = attend_single_queries if queries == 1 else attend_queries
    more = {"share_of_keys": 1.0} if queries == 1 else {}

    def outcome() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.zeros_like(q), torch.zeros(rows * queries, heads)
        given = q, pages, table, lens, out
        assert attend(*given, scale=0.1, softcap=None, window=None, lse=lse, **more)
        return out, lse

    found = outcome()
    with pytest.MonkeyPatch.context() as patch, without_team():
        patch.setattr(sharing, "work_together", lambda work, helpers, **_: work())
        wanted = outcome()
    assert all(map(torch.equal, found, wanted)) and found[0].any()
