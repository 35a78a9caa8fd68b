"""Keys that are kept as a state: whatever a row brings at once, it attends what a sum over all of
its tokens in float64 says, of the window and of those that were compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from freight.kernels.row_states import RowStates
from freight.model import kept_choice
from freight.model.frame import Frame, LayerStates
from freight.model.kept_steps import AttendKept, ChooseKept, Compress, ProjectGroups
from freight.model.layer_kinds import CompressedKeys, Index
from freight.model.layers import run_unit
from freight.model.programme import Unit, Weight
from freight.model.rope import inverse_frequencies
from freight.model.rope_config import RopeConfig
from freight.model.workspace import Workspace
from freight.plan.geometry import TIMES_OF_KEYS

HEADS, WIDTH, MOST = 3, 8, 400
CHOOSING, NARROW, CHOSEN = 32, 6, 3
"""Heads of an indexer, their width, and the keys that it chooses."""
ROPE = RopeConfig(kind="default", rotary_dim=4, theta=100.0, pairs=True)


SCRATCH = torch.empty(1 << 18, dtype=torch.uint8)
SHARED = ("sinks", "gain", "bias", "index_gain", "index_bias")
"""Weights, which all rows have."""


def vector(name: str, count: int) -> Weight:
    return Weight(name=name, out_dims=(), in_dims=("D",), num_rows=1, num_columns=count)


def make_compress(kind: str, width: int, rate: int, doubled: bool) -> Compress:
    return Compress(
        x=f"{kind}sources",
        gates=f"{kind}gates",
        bias=vector(f"{kind}bias", rate * width * (1 + doubled)),
        weight=vector(f"{kind}gain", width),
        rate=rate,
        doubled=doubled,
        eps=1e-3,
        rope=ROPE,
        max_positions=MOST,
        most_keys=MOST // rate,
    )


def make_step(window: int, rate: int, doubled: bool, chooses: bool = False) -> AttendKept:
    choose = None
    if chooses:
        choose = ChooseKept(
            q="index_q",
            weights="index_weights",
            num_heads=CHOOSING,
            width=NARROW,
            num_chosen=CHOSEN,
            compress=make_compress("index_", NARROW, rate, doubled),
        )
    return AttendKept(
        q="q",
        kv="kv",
        out="out",
        num_heads=HEADS,
        width=WIDTH,
        window=window,
        scale=0.4,
        sinks=vector("sinks", HEADS),
        compress=make_compress("", WIDTH, rate, doubled) if rate else None,
        choose=choose,
    )


def made(step: AttendKept, num_tokens: int) -> dict[str, torch.Tensor]:
    values = {"q": torch.randn(num_tokens, HEADS * WIDTH), "kv": torch.randn(num_tokens, WIDTH)}
    values["sinks"] = torch.randn(HEADS)
    for own in step.compressors:
        width = own.weight.num_columns
        values[own.weight.name] = torch.rand(width) + 0.5
        columns = width * (1 + own.doubled)
        values[own.x] = torch.randn(num_tokens, columns)
        values[own.gates] = 3 * torch.randn(num_tokens, columns)
        values[own.bias.name] = torch.randn(own.rate, columns)
    if step.choose is not None:
        values["index_q"] = torch.randn(num_tokens, CHOOSING * NARROW)
        values["index_weights"] = torch.randn(num_tokens, CHOOSING)
    return values


def compressed(own: Compress, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """All complete keys of a row, one by one, in float64."""
    sources, gates = (values[name].double() for name in (own.x, own.gates))
    width = own.weight.num_columns
    bias, keys = values[own.bias.name].double(), []
    frequencies, _ = inverse_frequencies(ROPE, 1, MOST)
    for number in range(len(sources) // own.rate):
        each, shares = [], []
        for place in range(own.rate * (1 + own.doubled)):
            token = own.rate * (number - own.doubled) + place
            is_before = own.doubled and place < own.rate
            half = slice(0, width) if is_before else slice(-width, None)
            if token >= 0:
                each.append(sources[token, half])
                shares.append(gates[token, half] + bias[token % own.rate, half])
        key = (torch.stack(each) * torch.stack(shares).softmax(0)).sum(0)
        key = key / (key.square().mean() + own.eps).sqrt() * values[own.weight.name].double()
        angles = own.rate * number * frequencies.double()
        low, high = key[-4::2].clone(), key[-3::2].clone()
        key[-4::2] = low * angles.cos() - high * angles.sin()
        key[-3::2] = high * angles.cos() + low * angles.sin()
        keys.append(key)
    return keys


def wanted(step: AttendKept, values: dict[str, torch.Tensor]) -> torch.Tensor:
    kv, q = values["kv"].double(), values["q"].double().view(-1, HEADS, WIDTH)
    keys = [] if step.compress is None else compressed(step.compress, values)
    own = [] if step.choose is None else compressed(step.choose.compress, values)
    rate = 1 if step.compress is None else step.compress.rate
    out = torch.zeros_like(q)
    for token in range(len(q)):
        known = [*kv[max(0, token - step.window + 1) : token + 1]]
        complete = (token + 1) // rate
        if step.choose is not None and complete > CHOSEN:
            asked = values["index_q"][token].double().view(CHOOSING, NARROW)
            likeness = (asked @ torch.stack(own[:complete]).t()).relu()
            scores = values["index_weights"][token].double() @ likeness
            known += [keys[number] for number in scores.topk(CHOSEN).indices.tolist()]
        else:
            known += keys[:complete]
        seen = torch.stack(known)
        for head in range(HEADS):
            scores = step.scale * seen @ q[token, head]
            scores = torch.cat((scores, values["sinks"][head].double()[None]))
            out[token, head] = scores.softmax(0)[:-1] @ seen
    return out.view(len(q), -1).float()


def run(
    step: Any, values: dict[str, torch.Tensor], states: list[LayerStates], weights: Any = None
) -> torch.Tensor:
    named = SHARED
    given_ = {name: [(0, values[name].reshape(1, -1))] for name in named if name in values}
    frame = Frame(
        weights=weights or given_,
        workspace=Workspace(SCRATCH),
        values={name: own for name, own in values.items() if name not in named},
        states=states,
    )
    with torch.inference_mode():
        run_unit(Unit(name="own", kind="recurrence", layer=0, steps=(step,)), frame)
    return frame.values["out"]


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_rows_in_any_pieces(data: st.DataObject) -> None:
    """Several rows side by side, each a piece at a time: single tokens, and more than are
    compressed or attend at once."""
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_choice, "KEPT_BYTES", data.draw(st.sampled_from([1, 1 << 14, 1 << 22])))
        run_in_pieces(data)


def run_in_pieces(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([2, 5, 33]))
    rate, doubled = data.draw(st.sampled_from([(0, False), (4, True), (8, False), (1, True)]))
    chooses = doubled and data.draw(st.booleans())
    step = make_step(window, rate, doubled, chooses)
    counts = data.draw(st.lists(st.sampled_from([1, 7, 33, 300]), min_size=1, max_size=3))
    sizes = st.sampled_from([1, 1, 2, 5, 31, 300])
    hold_against_float64(step, counts, lambda: data.draw(sizes))


@pytest.mark.parametrize(("rate", "doubled"), [(4, True), (8, False)])
def test_rows_of_many_lengths_a_token_at_a_time(rate: int, doubled: bool) -> None:
    """Where the longest has complete keys others are still made."""
    torch.manual_seed(2)
    hold_against_float64(make_step(5, rate, doubled), [9, 14, 23, 40], lambda: 1, at_once=True)


def test_rows_that_complete_no_key() -> None:
    torch.manual_seed(2)
    step = make_step(5, 128, False)
    compress = replace(step.compress, most_keys=0) if step.compress else None
    step = replace(step, compress=compress)
    hold_against_float64(step, [9, 14], lambda: 1)
    hold_against_float64(step, [9, 14], lambda: 6)


def hold_against_float64(
    step: AttendKept, counts: list[int], size_of: Callable[[], int], *, at_once: bool = False
) -> None:
    """Rows of so many tokens, each in pieces of some size; ``at_once`` longer ones begin first, so
    that all end together."""
    window, chooses = step.window, step.choose is not None
    rows = [made(step, count) for count in counts]
    shared = {name: rows[0][name] for name in SHARED if name in rows[0]}
    rows = [{**row, **shared} for row in rows]
    most = 0 if step.compress is None else step.compress.most_keys
    beside = -(-most * NARROW // WIDTH) if chooses else 0
    columns = torch.full((len(rows) + 1, window - 1 + most + beside, WIDTH), torch.nan)
    memory = torch.full((len(rows) + 1, 2, 3, WIDTH + NARROW * chooses), torch.nan)
    done, found = [0] * len(rows), [list[torch.Tensor]() for _ in rows]
    while any(at < count for at, count in zip(done, counts, strict=True)):
        pieces = []
        left = [*zip(counts, done, strict=True)]
        for row, count in enumerate(counts):
            if done[row] < count:
                if not at_once or count - done[row] == max(own - at for own, at in left):
                    pieces.append((row, min(size_of(), count - done[row])))
        sizes = np.array([size for _, size in pieces])
        states = RowStates(
            starts=np.cumsum(sizes) - sizes,
            counts=sizes,
            seats=np.array([len(rows) - row for row, _ in pieces]),
            is_new=np.array([done[row] == 0 for row, _ in pieces], np.int64),
            lengths=np.array([done[row] for row, _ in pieces]),
        )
        own = {**shared}
        for name in rows[0]:
            if name not in SHARED:
                parts = [rows[row][name][done[row] : done[row] + n] for row, n in pieces]
                own[name] = torch.cat(parts)
        out = run(step, own, [LayerStates(rows=states, columns=columns, memory=memory)]).clone()
        for (row, size), part in zip(pieces, out.split(sizes.tolist()), strict=True):
            found[row].append(part)
            done[row] += size
    for row, parts in zip(rows, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), wanted(step, row), rtol=0, atol=2e-5)


def test_a_row_goes_on_from_what_another_has_left() -> None:
    torch.manual_seed(3)
    step = make_step(5, 4, True)
    values = made(step, 21)
    columns, memory = torch.zeros(2, 4 + MOST // 4, WIDTH), torch.zeros(2, 2, 3, WIDTH)

    def rows(seat: int, first: int, last: int) -> RowStates:
        numbers = {"starts": 0, "counts": last - first, "seats": seat, "is_new": first == 0}
        own = {name: np.array([int(number)]) for name, number in numbers.items()}
        return RowStates(**own, lengths=np.array([first]))

    def part(first: int, last: int) -> dict[str, torch.Tensor]:
        return {
            name: own if name in SHARED else own[first:last].clone() for name, own in values.items()
        }

    run(step, part(0, 10), [LayerStates(rows=rows(0, 0, 10), columns=columns, memory=memory)])
    beginning = (1, columns[0].clone(), memory[0].clone())
    states = LayerStates(
        rows=rows(1, 10, 21), columns=columns, memory=memory, beginnings=[beginning]
    )
    out = run(step, part(10, 21), [states])
    torch.testing.assert_close(out, wanted(step, values)[10:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("cuts", [(0, 12), (0, 3, 4, 11, 12), (0, 6, 12)])
def test_products_in_groups_of_parts_anywhere(cuts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x, matrix = torch.randn(5, 9), torch.randn(12, 3)
    weight = Weight(name="groups", out_dims=("g", "o"), in_dims=("j",), num_rows=12, num_columns=3)
    step = ProjectGroups(x="x", out="out", weight=weight, num_groups=3)
    parts = [(a, matrix[a:b]) for a, b in pairwise(cuts)]
    out = run(step, {"x": x}, [], {"groups": parts[::-1]})
    each = torch.einsum("tgi,goi->tgo", x.view(5, 3, 3), matrix.view(3, 4, 3))
    torch.testing.assert_close(out, each.reshape(5, 12))


def peak_bytes(work: Callable[[], None]) -> int:
    """The most that torch holds at once for what it makes meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    moved = sorted((own.start_ns(), own.nbytes()) for own in events if own.name() == "[memory]")
    return max(accumulate(size for _, size in moved), default=0)


@pytest.mark.parametrize(("count", "rows"), [(300, 1), (1, 40)], ids=["prompt", "decoding"])
@pytest.mark.parametrize("least", [1, 1 << 20])
def test_what_is_made_is_bounded(
    count: int, rows: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By some times what is gathered at once, or what one query of the longest row takes."""
    monkeypatch.setattr(kept_choice, "KEPT_BYTES", least)
    heads, width, narrow, longest = 32, 64, 32, 4000
    index = Index(num_heads=16, width=narrow, num_chosen=100)
    own = CompressedKeys(
        layers=(True,),
        rates=(4,),
        doubled=(True,),
        window=32,
        width=width,
        query_rank=1,
        groups=1,
        out_rank=1,
        longest=longest,
        index=index,
    )
    with monkeypatch.context() as patch:
        for name, size in (("HEADS", heads), ("WIDTH", width), ("MOST", longest)):
            patch.setitem(globals(), name, size)
        for name, size in (("CHOOSING", 16), ("NARROW", narrow), ("CHOSEN", 100)):
            patch.setitem(globals(), name, size)
        step = make_step(32, 4, True, chooses=True)
        values = made(step, count * rows)
    states = LayerStates(
        rows=RowStates(
            starts=np.arange(rows) * count,
            counts=np.full(rows, count),
            seats=np.arange(rows),
            is_new=np.zeros(rows, np.int64),
            lengths=np.full(rows, longest - count),
        ),
        columns=torch.randn(rows, *own.columns_shape),
        memory=torch.zeros(rows, *own.matrix_shape),
    )
    values["out"] = torch.empty(count * rows, heads * width)
    found = peak_bytes(lambda: run(step, values, [states]))
    assert 0 < found < TIMES_OF_KEYS * max(least, 4 * own.most_numbers(heads))
