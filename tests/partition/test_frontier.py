"""Points, frontiers and curves: each is what the cost model says, none is missing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.hardware.chip import find_chip
from freight.partition.cost import Cost, Setting, Step
from freight.partition.frontier import (
    Point,
    by_context,
    by_shape,
    crossovers,
    frontier,
    moved_bytes,
    points,
    stationary,
)
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.planner import best_plan, meshes

from .test_schemes import bundled

TPU = Setting(chip=find_chip("tpu-v4"))
MESH = Mesh.of(x=4, y=4, z=4)


@given(
    values=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12),
)
def test_a_frontier_is_what_nothing_beats(values: list[tuple[int, int]]) -> None:
    step = Step(phase="decode", rows=1, new_tokens=1)
    cost = Cost(bundled("llama-2-7b"), MESH, Cut(), step, TPU)
    every = [Point(cost, float(a), float(b), 0.0) for a, b in values]
    kept = [(own.seconds, own.chip_seconds) for own in frontier(every)]
    wanted = {
        (a, b)
        for a, b in values
        if not any((c <= a and d <= b) and (c, d) != (a, b) for c, d in values)
    }
    assert kept == sorted(wanted)


def test_points_are_the_best_plans() -> None:
    config = bundled("llama-2-70b")
    steps = [Step(phase="decode", rows=rows, new_tokens=1, past=500) for rows in (1, 8, 4096)]
    found = [*points(config, (8, 16), steps, TPU)]
    assert {own.cost.mesh.num_chips for own in found} == {8, 16}
    assert all(own.cost.step.rows < 4096 for own in found)  # for which there is no memory
    for own in found:
        (best,) = best_plan(config, own.cost.mesh.num_chips, [(own.cost.step, 1.0)], TPU)
        assert own.seconds == best.seconds and own.mfu == best.mfu


def test_one_dim_flattens_and_two_do_not() -> None:
    """Fig. 6: with more chips 2D gets faster, 1D hardly. A collective's fixed time left out."""
    config = bundled("palm-540b")
    chip = replace(TPU.chip, link_latency_s=0.0)
    setting = replace(TPU, chip=chip)
    step = Step(phase="decode", rows=512, new_tokens=1, past=2048)
    moved = {}
    for chips in (64, 128, 256):
        boxes = [*meshes(chips)]
        one = stationary(config, [own for own in boxes if own.size("x") == 1], step, setting)
        two = stationary(config, [own for own in boxes if own.size("x") > 1], step, setting)
        assert one is not None and two is not None
        assert two.seconds < one.seconds
        moved[chips] = one.cost.link_s, two.cost.link_s
    assert moved[256][0] == pytest.approx(moved[64][0], rel=0.06)
    assert moved[256][1] < 0.7 * moved[64][1]  # half, but for (K - 1) / K and the logits


def test_prefill_by_layout() -> None:
    """Fig. 7: more is gathered as batches grow; a layout that rows do not divide is absent."""
    config = bundled("palm-540b")
    few = by_shape(config, MESH, "prefill", 2, 2048, TPU)
    assert set(few) == {"2D weight-stationary"}
    some = by_shape(config, MESH, "prefill", 64, 2048, TPU)
    links = {name: own.cost.link_s for name, own in some.items()}
    assert sorted(links, key=lambda name: links[name])[2:] == [
        "2D weight-stationary",
        "XYZ-weight-gathered",
    ]
    assert min(links, key=lambda name: links[name]) == "XY-weight-gathered"
    many = by_shape(config, MESH, "prefill", 512, 2048, TPU)
    assert "2D weight-stationary" not in many  # its hidden values are too many for memory
    assert many["XYZ-weight-gathered"].mfu == pytest.approx(0.76, abs=0.01)
    one = by_shape(config, MESH, "decode", 64, 2048, TPU)["2D weight-stationary"]
    assert one.cost.step == Step(phase="decode", rows=64, new_tokens=1, past=2048)


def test_contexts() -> None:
    """Fig. 8: by rows a context costs little, by heads it runs out of memory first."""
    config = bundled("palm-540b")
    curves = by_context(config, MESH, 256, (128, 256, 512, 8192), TPU)
    heads, rows = curves["by heads"], curves["by rows"]
    assert len(heads) < len(rows) == 4
    for own in (heads, rows):
        assert all(a[1] < b[1] for a, b in pairwise(own))
    assert heads[1][1] - heads[0][1] > 10 * (rows[1][1] - rows[0][1])


@settings(deadline=None)
@given(data=st.data())
def test_crossovers_are_where_the_least_changes(data: st.DataObject) -> None:
    mesh = Mesh.of(**{axis: data.draw(st.integers(1, 8)) for axis in "xyz"})
    sizes = {"E": data.draw(st.integers(64, 512)), "F": data.draw(st.integers(64, 2048)), "G": 1}
    bytes_ = 2.0, data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    starts = [*crossovers(sizes, mesh, *bytes_).items()]
    assert starts[0][1] == 0 and [own for _, own in starts] == sorted(own for _, own in starts)
    ends = [*(own for _, own in starts[1:]), 4 * starts[-1][1] + 100.0]
    for (name, first), last in zip(starts, ends, strict=True):
        middle = (first + last) / 2
        sent = moved_bytes(sizes, mesh, middle, *bytes_)
        assert sent[name] == pytest.approx(min(sent.values()), rel=1e-9)


def test_the_papers_crossovers() -> None:
    """Fig. 3's setting: 16384, 65536 and 1048576 tokens."""
    sizes = {"E": 16384, "F": 65536, "G": 1}
    found = crossovers(sizes, MESH, 2.0, 2.0)
    assert [*found] == [
        "2D weight-stationary",
        "X-weight-gathered",
        "XY-weight-gathered",
        "XYZ-weight-gathered",
    ]
    assert [*found.values()] == pytest.approx([0, 16384, 65536, 1048576], rel=1e-12)
