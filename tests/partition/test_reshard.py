"""Moves between any two layouts: they lead there, keep the tensor, send no more than they must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import InputError
from freight.hardware.chip import find_chip
from freight.partition.cost import Cost, Setting, Step
from freight.partition.handover import Handover, hand_over
from freight.partition.layers import Cut, block, layer_sizes
from freight.partition.layout import Layout, Mesh
from freight.partition.reshard import reshard

from .test_layers import config
from .test_schemes import bundled
from .virtual import run, spread, whole

MESH = Mesh.of(x=2, y=2, z=2)
SIZES = {"B": 8, "K": 8, "D": 8}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    doing = {dim: "" for dim in (*SIZES, "nothing")}
    for axis in draw(st.permutations("xyz")):
        doing[draw(st.sampled_from(sorted(doing)))] += axis
    return Layout(tuple(SIZES), tuple(doing[dim] for dim in SIZES))


@settings(deadline=None, max_examples=60)
@given(before=layouts(), after=layouts())
def test_it_leads_there_and_sends_what_it_says(before: Layout, after: Layout) -> None:
    moves, sent = reshard(before, after, SIZES, MESH)
    array = np.random.default_rng(0).normal(size=(8, 8, 8))
    tensor, counted = spread(array, before, MESH), 0
    for own in moves:
        tensor = run(tensor, own)
        counted += sum(tensor.sent)
    assert tensor.layout == after
    np.testing.assert_array_equal(whole(tensor, SIZES), array)
    assert counted == sent * MESH.num_chips
    # Gathering everything and slicing it always leads there.
    gathered = 8**3 - before.elements(SIZES, MESH)
    assert sent <= gathered
    # A chip must get at least what it has not got: of the shares that are wanted, one is there.
    assert (sent == 0) == all(b.startswith(a) for a, b in zip(before.cuts, after.cuts, strict=True))


def test_keys_between_phases() -> None:
    """From head-sharded prefill to batch-sharded decode of a multi-query model: a slice. From a
    gathered prefill, whose rows are cut in the same order: nothing."""
    model = config(24, 1, parallel=True)
    sizes = layer_sizes(model, rows=8, new_tokens=3)
    keys = {
        name: block(MESH, sizes, cut, model).outputs["keys"]
        for name, cut in {
            "by heads": Cut(),
            "by rows": Cut(batch="zyx"),
            "gathered": Cut(gathered="xyz"),
            "gathered over x": Cut(gathered="x", batch="zy"),
        }.items()
    }
    assert reshard(keys["by heads"], keys["by rows"], sizes, MESH)[1] == 0
    assert keys["by rows"] == keys["gathered"] == keys["gathered over x"]
    back = reshard(keys["by rows"], keys["by heads"], sizes, MESH)[1]
    assert back == keys["by heads"].elements(sizes, MESH) * 7 / 8


def test_a_cache_is_handed_over() -> None:
    """Of PaLM 540B: free from heads to rows; between orders that differ it is exchanged."""
    model, mesh = bundled("palm-540b"), Mesh.of(x=4, y=4, z=4)
    setting = Setting(chip=find_chip("tpu-v4"))
    decode = Step(phase="decode", rows=64, new_tokens=1, past=2048)
    prefill = Step(phase="prefill", rows=64, new_tokens=128, past=1920)

    def handed(one: Cut, other: Cut) -> Handover:
        costs = Cost(model, mesh, one, prefill, setting), Cost(model, mesh, other, decode, setting)
        return hand_over(*costs)

    free = handed(Cut(), Cut(batch="zyx"))
    assert free.num_bytes == free.seconds == 0 and [own.kind for own in free.moves] == ["slice"]
    assert handed(Cut(gathered="xyz"), Cut(batch="zyx")).moves == ()
    moved = handed(Cut(batch="zyx"), Cut())
    whole_cache = model.kv_bytes_per_token() * 64 * 2048
    assert moved.num_bytes == whole_cache * 63 / 64
    assert moved.seconds == pytest.approx(moved.num_bytes / 270e9, rel=1e-3)  # and latency


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError):
        reshard(Layout.parse("B_x"), Layout.parse("B"), {"B": 3}, Mesh.of(x=2))
