"""Convolutions and the gated delta rule over ragged rows, against a token at a time in float64, and
against transformers; the loops, and torch's steps that devices use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from freight.kernels import recurrence
from freight.kernels.recurrence import convolve, recur
from freight.kernels.row_states import RowStates
from freight.kernels.state_heads import StateHeads


@pytest.fixture(params=["loops", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(recurrence, "find_loops", lambda: None)
    return str(request.param)


def rows_of(counts: list[int], is_new: list[bool], seats: list[int]) -> RowStates:
    ends = np.cumsum(counts)
    return RowStates(
        starts=(ends - counts).astype(np.int64),
        counts=np.array(counts, np.int64),
        seats=np.array(seats, np.int64),
        is_new=np.array(is_new, np.int64),
    )


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 2e-5} if dtype is torch.float32 else {"atol": 3e-2, "rtol": 2e-2}


@st.composite
def ragged(draw: Any) -> tuple[list[int], list[bool], list[int], int]:
    counts = draw(
        st.lists(st.sampled_from([1, 1, 2, 3, 5, 17, 64, 65, 130, 300]), min_size=1, max_size=5)
    )
    is_new = draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    seats = draw(st.permutations(range(len(counts) + 2)))[: len(counts)]
    return counts, is_new, seats, draw(st.integers(0, 2**31))


@settings(max_examples=25, deadline=None)
@given(
    case=ragged(),
    taps=st.sampled_from([2, 3, 4, 6]),
    has_bias=st.booleans(),
    num_columns=st.sampled_from([16, 48, 5, 83]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    by_torch=st.booleans(),
)
def test_each_token_is_the_sum_of_its_last_ones(
    case: Any, taps: int, has_bias: bool, num_columns: int, dtype: torch.dtype, by_torch: bool
) -> None:
    counts, is_new, seats, seed = case
    dice = torch.Generator().manual_seed(seed)
    rows = rows_of(counts, is_new, seats)
    x = torch.randn(sum(counts), num_columns, generator=dice).to(dtype)
    weight = torch.randn(num_columns, taps, generator=dice)
    bias = torch.randn(num_columns, generator=dice) if has_bias else None
    columns = torch.randn(len(counts) + 2, taps - 1, num_columns, generator=dice).to(dtype)
    expected, states = x.clone(), columns.clone()
    for start, count, seat, new in zip(rows.starts, counts, seats, is_new, strict=True):
        before = torch.zeros_like(columns[seat]) if new else columns[seat]
        seen = torch.cat((before, x[start : start + count])).double()
        for token in range(count):
            found = (seen[token : token + taps] * weight.double().t()).sum(0)
            found += 0 if bias is None else bias.double()
            expected[start + token] = found.to(dtype)
        states[seat] = seen[len(seen) - taps + 1 :].to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if by_torch:
            patch.setattr(recurrence, "find_loops", lambda: None)
        convolve(x, weight, bias, columns, rows)
    torch.testing.assert_close(x, expected, **tolerance(dtype))
    torch.testing.assert_close(columns, states, rtol=0, atol=0)


def one_by_one(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    decay: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor | None,
    memory: torch.Tensor,
    heads: StateHeads,
    rows: RowStates,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read, and the states, in float64."""
    K, N, W, U = heads.num_key_heads, heads.num_heads, heads.key_width, heads.value_width
    states, out = memory.double().clone(), torch.zeros(len(x), N * U, dtype=torch.float64)
    for start, count, seat, new in zip(
        rows.starts, rows.counts, rows.seats, rows.is_new, strict=True
    ):
        held = torch.zeros(N, W, U, dtype=torch.float64) if new else states[seat]
        for token in range(start, start + count):
            if b is not None:
                q, k, v = x[token].double().split((K * W, K * W, N * U))
                q, k = (
                    (h.view(K, W) / (h.view(K, W).square().sum(-1, keepdim=True) + 1e-6).sqrt())
                    for h in (q, k)
                )
                q = q * W**-0.5
            else:
                v, k, q = x[token].double().split((N * U, K * W, K * W))
            q, k = (h.reshape(K, W).repeat_interleave(N // K, dim=0) for h in (q, k))
            given = a[token].double() + bias.double()
            rate, speed = torch.nn.functional.softplus(given), decay.double().exp()[:, None]
            log = speed * rate.view(N, -1)
            if heads.bound:
                log = heads.bound * (speed * given.view(N, -1)).sigmoid()
            held = held * (-log).exp()[..., None]
            added = v.view(N, U)
            if b is not None:
                added = added - torch.einsum("nw,nwu->nu", k, held)
            strength = rate if b is None else b[token].double().sigmoid() * heads.strength
            strength = strength[:, None]
            held = held + torch.einsum("nw,nu->nwu", k, added * strength)
            read = torch.einsum("nw,nwu->nu", q, held)
            if skip is not None:
                read += skip.double()[:, None] * v.view(N, U)
            out[token] = read.flatten()
        states[seat] = held
    return out, states


def made(counts: list[int], heads: StateHeads, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """x, a, b, decay, bias and memory for rows of so many tokens."""
    dice = torch.Generator().manual_seed(seed)
    K, N, W, U = heads.num_key_heads, heads.num_heads, heads.key_width, heads.value_width
    tokens = sum(counts)
    x = torch.randn(tokens, 2 * K * W + N * U, generator=dice).to(dtype)
    rates = N * W if heads.by_row else N
    a, b = (torch.randn(tokens, own, generator=dice).to(dtype) for own in (rates, N))
    decay, bias = (torch.randn(own, generator=dice) for own in (N, rates))
    memory = torch.randn(len(counts) + 2, N, W, U, generator=dice)
    return [x, a, b, decay, bias, memory]


KINDS = st.sampled_from(["delta", "scan", "negative", "by row", "bounded"])


def heads_of(kind: str, shape: tuple[int, int, int, int]) -> StateHeads:
    K, N, W, U = shape
    return StateHeads(
        num_key_heads=K,
        num_heads=N,
        key_width=W,
        value_width=U,
        strength=2.0 if kind == "negative" else 1.0,
        by_row=kind in ("by row", "bounded"),
        bound=5.0 if kind == "bounded" else None,
    )


@settings(max_examples=40, deadline=None)
@given(
    case=ragged(),
    shape=st.sampled_from([(1, 1, 16, 32), (2, 4, 16, 64), (2, 2, 48, 32), (1, 3, 8, 24)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=KINDS,
    by_torch=st.booleans(),
)
def test_states_are_what_a_token_at_a_time_makes_of_them(
    case: Any,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    kind: str,
    by_torch: bool,
) -> None:
    counts, is_new, seats, seed = case
    _, N, _, U = shape
    heads, is_scan = heads_of(kind, shape), kind == "scan"
    rows = rows_of(counts, is_new, seats)
    x, a, strength, decay, bias, memory = made(counts, heads, dtype, seed)
    b, skip = (None, decay * 2) if is_scan else (strength, None)
    expected, states = one_by_one(x, a, b, decay, bias, skip, memory, heads, rows)
    out = torch.empty(len(x), N * U, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        if by_torch:
            patch.setattr(recurrence, "find_loops", lambda: None)
        recur(x, a, b, decay, bias, skip, memory, out, heads=heads, rows=rows)
    close = tolerance(dtype)
    close["atol"] *= max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(out, expected.to(dtype), **close)
    torch.testing.assert_close(memory, states.float(), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("kind", ["delta", "by row", "bounded"])
def test_extremes_stay_numbers(kind: str, way: str) -> None:
    """Nothing is left of a state, or all of it; a key of zeros corrects nothing."""
    heads = heads_of(kind, (1, 1, 16, 32))
    rows = rows_of([3, 70], [False, False], [0, 1])
    x, a, b, decay, bias, memory = made([3, 70], heads, torch.float32, 0)
    a[::3], a[1::3] = 1e4, -1e4
    b[::2], b[1::2] = 1e4, -1e4
    x[::5, :32] = 0.0
    decay[:] = 3.0
    expected, states = one_by_one(x, a, b, decay, bias, None, memory, heads, rows)
    out = torch.empty(73, 32)
    recur(x, a, b, decay, bias, None, memory, out, heads=heads, rows=rows)
    torch.testing.assert_close(out, expected.float(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(memory, states.float(), atol=2e-5, rtol=2e-5)


def test_it_is_what_transformers_computes(way: str) -> None:
    heads = StateHeads(num_key_heads=2, num_heads=4, key_width=32, value_width=32)
    rows = rows_of([150], [False], [0])
    x, a, b, decay, bias, memory = made([150], heads, torch.float32, 5)
    q, k, v = x.split((64, 64, 128), dim=1)
    strength = -decay.exp() * torch.nn.functional.softplus(a + bias)
    expected, state = torch_chunk_gated_delta_rule(
        q.view(1, 150, 2, 32),
        k.view(1, 150, 2, 32),
        v.view(1, 150, 4, 32),
        g=strength[None],
        beta=b.sigmoid()[None],
        initial_state=memory[:1],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out = torch.empty(150, 128)
    recur(x, a, b, decay, bias, None, memory, out, heads=heads, rows=rows)
    torch.testing.assert_close(out, expected.reshape(150, 128), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(memory[:1], state, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_rows_that_decay_apart_are_what_transformers_computes(way: str, rows_at_once: int) -> None:
    """Fast and slow rows of one matrix, over many tokens: what is left of a token in one of them is
    no number that float32 has."""
    heads = heads_of("by row", (4, 4, 32, 32))
    counts = [150, 70, 1][:rows_at_once]
    rows = rows_of(counts, [False] * len(counts), [*range(len(counts))])
    x, a, b, decay, bias, memory = made(counts, heads, torch.float32, 5)
    bias.view(4, 32)[:, ::2] += 6.0
    bias.view(4, 32)[:, 1::2] -= 6.0
    out, before = torch.empty(len(x), 128), memory.clone()
    recur(x, a, b, decay, bias, None, memory, out, heads=heads, rows=rows)
    for start, count, seat in zip(rows.starts, counts, rows.seats, strict=True):
        own = slice(start, start + count)
        q, k, v = (part.view(1, count, 4, 32) for part in x[own].split(128, dim=1))
        rates = torch.nn.functional.softplus(a[own] + bias).view(1, count, 4, 32)
        expected, state = chunk_kimi_delta_attention(
            q,
            k,
            v,
            g=-decay.exp()[:, None] * rates,
            beta=b[own].sigmoid()[None],
            initial_state=before[seat : seat + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[own], expected.reshape(count, 128), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(memory[seat : seat + 1], state, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("kind", ["delta", "by row"])
def test_threads_change_nothing(kind: str) -> None:
    heads = heads_of(kind, (2, 4, 32, 32))
    counts = [300, 1, 40, 1, 1]
    rows = rows_of(counts, [True, False, True, False, False], [4, 0, 1, 3, 2])
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        x, a, b, decay, bias, memory = made(counts, heads, torch.bfloat16, 9)
        out = torch.empty(len(x), 128, dtype=torch.bfloat16)
        recur(x, a, b, decay, bias, None, memory, out, heads=heads, rows=rows)
        columns = torch.zeros(7, 3, x.shape[1], dtype=torch.bfloat16)
        convolve(x, torch.ones(x.shape[1], 4), None, columns, rows)
        found.append((out, memory, x, columns))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
