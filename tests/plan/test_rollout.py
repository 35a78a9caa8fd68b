"""Sweeps made from lengths against those that the runtime makes from rows and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.memory.passage import RowPages, num_pages_of, plan_passage, plan_state_passage
from freight.plan.admission import Lengths
from freight.plan.continuous import _Block
from freight.plan.policy import Policy, Split, Tier
from freight.plan.rollout import WorkSizes, batch_of, make_sweep, rows_of_block, work_of
from freight.plan.workload import RowLength

PAGE_BYTES, STATE_BYTES = 4096, 5 * 4096


def sizes(compute_tier: Tier, kv: Split, activations: Split, far_share: float = 0.0) -> WorkSizes:
    return WorkSizes(
        policy=Policy(
            compute_tier=compute_tier,
            weights=Split(cpu=1.0),
            kv=kv,
            activations=activations,
            micro_batch_size=4,
            num_micro_batches=3,
            max_batch_tokens=1000,
            page_tokens=16,
        ),
        page_bytes=PAGE_BYTES,
        input_page_bytes=3 * PAGE_BYTES,
        state_bytes=STATE_BYTES,
        stream_bytes=256,
        query_bytes=96,
        attended_bytes=64,
        tables=((far_share, 128),),
    )


ROWS = st.tuples(st.integers(1, 70), st.integers(1, 40)).map(lambda own: RowLength(*own))
LENGTHS = st.lists(ROWS, min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(
    lengths=LENGTHS,
    step=st.integers(0, 39),
    kv=st.sampled_from([Split(cpu=1.0), Split(disk=1.0), Split(gpu=0.25, cpu=0.25, disk=0.5)]),
)
def test_pages_are_those_of_a_real_passage(
    lengths: Sequence[RowLength], step: int, kv: Split
) -> None:
    own = sizes("gpu", kv, Split(gpu=1.0))
    for k, members in enumerate(rows_of_block(lengths, own)):
        rows = [row for row in members if row.new_tokens > step or step == 0]
        if not rows:
            continue
        work = work_of(k, [row.at(step) for row in rows], own)
        far = [(r, s) for r, s in zip(rows, work.batch.rows, strict=True) if r.home != "gpu"]
        homes = [
            RowPages(home="cpu" if row.home == "cpu" else "disk", pages=tuple(range(99)), tail=i)
            for i, (row, _) in enumerate(far)
        ]
        passage = plan_passage(homes, [s.kv_len for _, s in far], [s.total_len for _, s in far], 16)
        expected = {
            "load": (passage.cpu_in, passage.disk_in, passage.tails_in),
            "store": (passage.cpu_out, passage.disk_out, passage.tails_out),
        }
        for passed, size in ((work.kv, PAGE_BYTES), (work.inputs, 3 * PAGE_BYTES)):
            for name, moved in (("load", passed.load), ("store", passed.store)):
                counts = [num_pages_of(runs) * size for runs in expected[name]]
                assert [moved.cpu, moved.disk, moved.tails] == counts
            assert passed.slot_bytes == passage.num_pages * size
            assert passed.num_loaded == sum(map(num_pages_of, expected["load"]))
        states = plan_state_passage(homes, [s.kv_len > 0 for _, s in far])
        moved = (work.states.load, states.cpu_in, states.disk_in)
        assert [moved[0].cpu, moved[0].disk] == [STATE_BYTES * num_pages_of(r) for r in moved[1:]]
        moved = (work.states.store, states.cpu_out, states.disk_out)
        assert [moved[0].cpu, moved[0].disk] == [STATE_BYTES * num_pages_of(r) for r in moved[1:]]
        assert work.states.slot_bytes == STATE_BYTES * states.num_pages == STATE_BYTES * len(far)


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS)
def test_every_row_makes_all_its_tokens(lengths: Sequence[RowLength]) -> None:
    own = sizes("cpu", Split(cpu=1.0), Split(cpu=1.0))
    block = rows_of_block(lengths, own)
    made: dict[int, int] = {}
    brought = 0
    for step in range(max(row.new for row in lengths)):
        for work in make_sweep(step, block, step, own).works:
            assert work.continues == (step > 0)
            for span in work.batch.rows:
                made[span.row.request] = made.get(span.row.request, 0) + 1
                brought += span.num_new
                assert span.total_len == lengths[span.row.request][0] + step
    assert made == {number: row.new for number, row in enumerate(lengths)}
    assert brought == sum(row.prompt + row.new - 1 for row in lengths)


def test_what_is_elsewhere_is_counted() -> None:
    own = sizes("gpu", Split(gpu=1.0), Split(gpu=0.5, cpu=0.25, disk=0.25), far_share=0.5)
    (work,) = make_sweep(0, rows_of_block([RowLength(8, 2)] * 2, own), 0, own).works
    assert work.embedding_bytes == 8 * 128
    assert (work.activations.cpu, work.activations.disk) == (4 * 256, 4096)
    assert work.activation_slot_bytes == 2 * 4096
    assert not work.kv.load and not work.kv.store


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("scored_share", [0.0, 0.4])
def test_rows_that_are_alike_are_the_rows_of_a_block(step: int, scored_share: float) -> None:
    own = replace(sizes("cpu", Split(cpu=1.0), Split(cpu=1.0)), scored_share=scored_share)
    length = RowLength(9, 8)
    (work,) = make_sweep(0, rows_of_block([length] * 3, own), step, own).works
    assert batch_of(length, 3, 0, step, own) == work.batch


@settings(deadline=None, max_examples=100)
@given(
    seats=st.lists(
        st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)),
        min_size=12,
        max_size=12,
    ),
    ends_early=st.booleans(),
)
def test_rows_that_are_alike_take_what_each_of_them_takes(
    seats: Sequence[tuple[bool, int, int, int]], ends_early: bool
) -> None:
    """On each tier, and in the slot of each micro-batch, which those elsewhere pass through."""
    policy = sizes("gpu", Split(gpu=0.25, cpu=0.25, disk=0.5), Split(gpu=1.0)).policy
    answers = Lengths(expected=3.0, longest=40) if ends_early else None
    pages: dict[Tier, int] = {"gpu": 9, "cpu": 9, "disk": 9}
    block = _Block.of([RowLength(9, 40)] * 12, policy, pages, 9, 1, answers)
    for seat, (is_there, prompt, answer, made) in enumerate(seats):
        block.numbers[seat] = seat if is_there else -1
        block.prompts[seat] = 20 * prompt
        block.known[seat] = 20 * prompt + made
        block.answers[seat] = 10 * answer
    rooms, slots = block._rooms()
    here = np.flatnonzero(block.numbers >= 0)
    curves = block.outlook.curves(*block._kept(here))
    if not ends_early:
        curves = curves[:, 2]  # all that there is to know
    for tier, places in block.of_tier.items():
        np.testing.assert_allclose(rooms[tier]._taken, curves[places[here]].sum(axis=0), atol=1e-9)
    is_far = ~block.of_tier["gpu"][here]
    for k, slot in enumerate(slots):
        own = curves[is_far & (here // 4 == k)]
        np.testing.assert_allclose(slot._taken, own.sum(axis=0), atol=1e-9)
