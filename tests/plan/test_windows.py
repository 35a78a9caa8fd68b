"""What layers with a window keep of a row, against what their tokens see, token by token; and when
they keep all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.entrypoints.bundled import find_bundled
from freight.memory.passage import PageRun, RowPages, plan_passage
from freight.model.batch import first_page
from freight.model.switches import ModelConfig
from freight.plan.beginnings import Beginnings
from freight.plan.policy import Policy, Split
from freight.plan.windows import NO_WINDOWS, find_windows, pages_seen
from freight.plan.workload import Workload


@given(tokens=st.integers(1, 300), page=st.integers(1, 40), first=st.integers(0, 200))
def test_pages_that_tokens_may_lie_in(tokens: int, page: int, first: int) -> None:
    lie = {place // page for place in range(first, first + tokens)}
    assert len(lie) <= pages_seen(tokens, page)
    most = {place // page for place in range(page - 1, page - 1 + tokens)}
    assert len(most) == pages_seen(tokens, page)


def pairs(runs: tuple[PageRun, ...]) -> dict[int, int]:
    """Slot pages by where they come from, or go to."""
    return {run.home + i: run.slot + i for run in runs for i in range(run.count)}


@given(data=st.data())
def test_a_ring_holds_what_the_next_token_sees(data: st.DataObject) -> None:
    """A row brings its tokens in any pieces, guesses that fail among them; at every sweep what its
    window reaches comes into the slot, and after it all that the next token sees is at home."""
    page, window = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    drafts = data.draw(st.integers(0, 5))
    count = pages_seen(window + drafts, page)
    home = data.draw(st.sampled_from(["cpu", "disk"]))
    row = RowPages(home=home, pages=tuple(range(100, 100 + count)), tail=7)
    at_home: dict[int, int] = {}  # page of the ring -> page of the row that it holds
    tail = -1
    kv_len = written = 0
    for _ in range(data.draw(st.integers(1, 12))):
        guesses = 0 if not kv_len else data.draw(st.integers(0, drafts))
        new = 1 + guesses if guesses else data.draw(st.integers(1, 30))
        total = kv_len + new
        first = first_page(kv_len, page, window)
        passage = plan_passage([row], [kv_len], [total], page, [written], firsts=[first])
        (table,) = passage.tables
        assert first * page <= max(0, kv_len + 1 - window)
        come = pairs(passage.cpu_in) | pairs(passage.disk_in)
        found = {slot: at_home[place] for place, slot in come.items()}
        found |= dict.fromkeys(pairs(passage.tails_in).values(), tail)
        held = range(first, -(-kv_len // page))
        assert found == {table[turn - first]: turn for turn in held}
        turns = {slot: first + number for number, slot in enumerate(table)}
        assert len(turns) == len(table) == passage.num_pages
        for place, slot in (pairs(passage.cpu_out) | pairs(passage.disk_out)).items():
            at_home[place] = turns[slot]
        for slot in pairs(passage.tails_out).values():
            tail = turns[slot]
        kept = data.draw(st.integers(1, new)) if guesses else new
        written, kv_len = total, kv_len + kept


def policy(**changes: Any) -> Policy:
    given = {
        "compute_tier": "gpu",
        "weights": Split(cpu=1.0),
        "kv": Split(gpu=0.5, cpu=0.5),
        "activations": Split(gpu=1.0),
        "micro_batch_size": 8,
        "num_micro_batches": 2,
        "max_batch_tokens": 4096,
    }
    return Policy(**{**given, **changes})


def rows(prompt: int, new: int, **changes: Any) -> Workload:
    return Workload(
        **{
            "num_rows": 100,
            "max_prompt_tokens": prompt,
            "max_new_tokens": new,
            "max_total_tokens": prompt + new,
            "total_prompt_tokens": 100 * prompt,
            "total_new_tokens": 100 * new,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def gemma() -> ModelConfig:
    """62 layers, of which every sixth attends all tokens, and the others 1024."""
    config = find_bundled("gemma-3-27b")
    assert config is not None
    return config


def test_a_window_of_each_row(gemma: ModelConfig) -> None:
    found = find_windows(gemma, policy(), rows(4000, 100))
    assert (found.tokens, found.layers) == (1024, 52)
    assert found.pages == 1024 // 16 + 1
    assert found.rows == {"gpu": 8, "cpu": 8, "disk": 0}
    # Of four rows elsewhere the window, and what a sweep brings.
    assert found.slot_pages == 4 * (found.pages + 1) + 4096 // 16
    # A whole prompt with what is before it: as much as a row ever has.
    assert found.scratch_pages == -(-4100 // 16)


@pytest.mark.parametrize(
    ("changes", "work"),
    [
        ({}, rows(900, 100)),  # what the window reaches is all there is
        ({"num_micro_batches": 1, "micro_batch_size": 1}, rows(1030, 10)),  # a page; and scratch
        ({"rolls_windows": False}, rows(4000, 100)),
        ({"recomputed": 0.5}, rows(4000, 100)),
        ({"kv": Split(gpu=1.0)}, rows(4000, 1)),  # no key is kept
        ({"admission": "refill", "row_tokens": 1000}, rows(4000, 100)),  # on average
    ],
)
def test_all_keys_are_kept(gemma: ModelConfig, changes: dict[str, Any], work: Workload) -> None:
    assert find_windows(gemma, policy(**changes), work) == NO_WINDOWS


def test_all_keys_are_kept_where_queries_choose_among_them(gemma: ModelConfig) -> None:
    sparse = replace(gemma, attended_share=0.1)
    assert find_windows(sparse, policy(), rows(4000, 100)) == NO_WINDOWS


def test_all_keys_are_kept_of_rows_that_begin_alike(gemma: ModelConfig) -> None:
    """What they share is held once, and their own is less than a window."""
    alike = Beginnings.of_all(3968, 100, 4000, 4100)
    work = rows(4000, 100, beginnings=alike)
    assert find_windows(gemma, policy(kv=Split(gpu=1.0)), work) == NO_WINDOWS
    alone = policy(kv=Split(gpu=1.0), shares_prefixes=False)
    assert find_windows(gemma, alone, work).pages > 0
