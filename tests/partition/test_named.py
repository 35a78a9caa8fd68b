"""Closed forms of the papers against the algebra: equal to the element, for any sizes and mesh."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.partition.layers import Cut, attention, block, feed_forward, layer_sizes
from freight.partition.layout import Mesh
from freight.partition.named import (
    DYNAMIC,
    EXCHANGED,
    FEED_FORWARD,
    Named,
    attention_form,
    best_gathering,
    best_width,
    block_form,
    dynamic_form,
    dynamic_layer,
)
from freight.partition.sharded import Sharded

from .test_layers import check, config, draws, plain_attention, plain_mlp, plain_norm

ALL = {**DYNAMIC, **EXCHANGED}


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    return Mesh.of(**{axis: draw(st.integers(1, 6)) for axis in "xyz"})


@st.composite
def sizes_for(draw: st.DrawFn, mesh: Mesh, key_heads: str = "any") -> dict[str, float]:
    n = mesh.num_chips
    dims = {name: draw(st.integers(1, 9)) for name in ("L", "S", "A")}
    dims |= {name: n * draw(st.integers(1, 50)) for name in ("B", "E", "F", "H", "D")}
    dims |= {"G": draw(st.sampled_from([1, 2])), "J": 2, "V": 1, "N": 1, "T": 1}
    return {**dims, "K": dims["H"] if key_heads == "all" else 1}


@settings(deadline=None)
@pytest.mark.parametrize("name", FEED_FORWARD)
@given(data=st.data(), mesh=meshes())
def test_feed_forward_layouts_move_what_the_paper_says(
    name: str, data: st.DataObject, mesh: Mesh
) -> None:
    sizes, named = data.draw(sizes_for(mesh)), FEED_FORWARD[name]
    own, form = feed_forward(mesh, sizes, named.cut), named.form(sizes, mesh)
    assert own.moved(weights=True) == pytest.approx(form.weights, rel=1e-12)
    assert own.moved(weights=False) == pytest.approx(form.activations, rel=1e-12)
    tokens, inner = sizes["B"] * sizes["L"], sizes["E"] * sizes["F"] * (sizes["G"] + 1)
    assert own.flops == pytest.approx(2 * tokens * inner / mesh.num_chips, rel=1e-12)
    assert own.stored_elements == pytest.approx(inner / mesh.num_chips, rel=1e-12)


def batches(mesh: Mesh) -> list[str]:
    axes = Cut().used_axes
    return [axes[first:] for first in range(len(axes) + 1)]


@settings(deadline=None)
@given(data=st.data(), mesh=meshes(), key_heads=st.sampled_from(["one", "all"]))
def test_attention_moves_what_the_paper_says(
    data: st.DataObject, mesh: Mesh, key_heads: str
) -> None:
    sizes = data.draw(sizes_for(mesh, key_heads))
    parts = mesh.num_chips if key_heads == "all" else 1
    for batch in batches(mesh):
        own = attention(mesh, sizes, Cut(batch=batch))
        form = attention_form(sizes, mesh, parts, mesh.size(batch))
        assert own.moved(weights=False) == pytest.approx(form.activations, rel=1e-12)
        assert own.moved(weights=True) == 0


@settings(deadline=None)
@given(data=st.data(), mesh=meshes())
def test_grouped_heads_are_cut_first(data: st.DataObject, mesh: Mesh) -> None:
    """As many key heads as z has chips, then rows."""
    sizes = {**data.draw(sizes_for(mesh)), "K": mesh.size("z")}
    if mesh.size("z") == 1 or 1 in (mesh.size("x"), mesh.size("y")):
        return
    for batch in ("", "x", "yx"):
        own = attention(mesh, sizes, Cut(batch=batch))
        form = attention_form(sizes, mesh, mesh.size("z"), mesh.size(batch))
        assert own.moved(weights=False) == pytest.approx(form.activations, rel=1e-12)
        keys = next(step.layouts[1] for step in own.computes if step.kind == "attend")
        assert keys.cut("K") == "z" and set(keys.cut("B")) == set(batch)


@settings(deadline=None)
@given(data=st.data(), mesh=meshes(), parallel=st.booleans())
def test_blocks_move_what_the_paper_says(data: st.DataObject, mesh: Mesh, parallel: bool) -> None:
    sizes = data.draw(sizes_for(mesh))
    model = config(24, 1, parallel=parallel)
    for batch in batches(mesh):
        own = block(mesh, sizes, Cut(batch=batch), model)
        form = block_form(sizes, mesh, 1, mesh.size(batch), parallel=parallel)
        assert own.moved(weights=False) == pytest.approx(form.activations, rel=1e-12)


def test_the_parallel_block_is_the_sum_that_the_paper_has() -> None:
    """(2TE/X)(1-1/YZ) + (T(Hd+2F)/YZ)(1-1/X) + (T(Hd+F)/YZ)(1-1/X), a gated MLP; beside it what
    moves keys, and sums for the norm."""
    mesh, sizes = Mesh.of(x=4, y=4, z=4), {"B": 64, "L": 1, "E": 18432, "F": 73728, "G": 2}
    sizes |= {"H": 64, "K": 1, "D": 256, "J": 2, "S": 2048, "A": 2048}
    t, e, f, hd = 64, 18432, 73728, 64 * 256
    own = block(mesh, sizes, Cut(), config(24, 1, parallel=True))
    keys = [t.elements for t in own.transfers if t.value in ("keys", "normed sums")]
    written = 2 * t * e / 4 * 15 / 16 + t * (2 * hd + 3 * f) / 16 * 3 / 4
    assert own.moved(weights=False) - sum(keys) == written


@settings(deadline=None, max_examples=40)
@pytest.mark.parametrize("name", ALL)
@given(p=st.integers(1, 6), tokens=st.integers(1, 20), h=st.integers(1, 8), f=st.integers(1, 9))
def test_dynamic_schemes_cost_what_the_table_says(
    name: str, p: int, tokens: int, h: int, f: int
) -> None:
    sizes = {"B": 3, "L": p * tokens, "E": p * h * 2, "F": p * f, "G": 2, "H": p, "K": p}
    sizes |= {"D": h * 2, "J": 2, "S": 9, "A": 5}
    own = dynamic_layer(Mesh.of(x=p), sizes, ALL[name])
    form = dynamic_form(ALL[name], s=3 * p * tokens, h=p * h * 2, f=p * f, p=p)
    products = sum(step.flops for step in own.computes if step.kind == "product")
    assert products == pytest.approx(form.flops, rel=1e-12)
    moved = own.moved(weights=False) + own.moved(weights=True)
    assert moved == pytest.approx(form.moved, rel=1e-12)
    assert own.stored_elements == pytest.approx(form.weights, rel=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_dynamic_schemes_compute_the_layer(name: str, p: int) -> None:
    sizes = layer_sizes(config(24, 24), rows=2, new_tokens=8)
    own: Sharded = dynamic_layer(Mesh.of(x=p), sizes, ALL[name])
    arrays = draws(own, 5)
    x = arrays["x"] + plain_attention(plain_norm(arrays["x"]), arrays, 1)
    check(own, arrays, "out", x + plain_mlp(plain_norm(x), arrays), (24, 24))


def _moved(named: Named, sizes: dict[str, float], mesh: Mesh) -> float:
    form = named.form(sizes, mesh)
    return form.weights + form.activations


def test_two_dims_are_best_at_half_the_root() -> None:
    """Appendix A.2.1: X = 0.5 sqrt(n) at F = 4 E, and 8 T E / sqrt(n) elements then."""
    for n in (16, 64, 256, 1024, 2**16, 2**20):
        sizes = {"B": 1, "L": 1, "E": 2.0**24, "F": 2.0**26, "G": 1}
        assert best_width(sizes, n) == 0.5 * n**0.5
        moved = {
            x: _moved(FEED_FORWARD["2D weight-stationary"], sizes, Mesh.of(x=x, y=n // x, z=1))
            for x in (2**k for k in range(n.bit_length()))
        }
        # (K - 1) / K of a sum is 1 - 1/X and 1 - 1/YZ: exactly 8 T E / sqrt(n) less 4 T E / n.
        best = moved[int(0.5 * n**0.5)]
        assert min(moved.values()) == best
        assert best == pytest.approx(sizes["E"] * (8 / n**0.5 - 10 / n), rel=1e-12)


def test_two_dims_overtake_one_past_sixteen_chips() -> None:
    """Section 3.2.2 at F = 4 E."""
    sizes = {"B": 1, "L": 1, "E": 2.0**20, "F": 2.0**22, "G": 1}
    for n in (2, 4, 8, 16, 32, 64, 256):
        large = {"x": 2 ** max(1, round(np.log2(0.5 * n**0.5)))}
        mesh = Mesh.of(x=large["x"], y=n // large["x"], z=1)
        t_one = 2 * sizes["E"]
        t_two = 8 * sizes["E"] / n**0.5
        assert (t_two < t_one) == (n > 16)
        exact_one = _moved(FEED_FORWARD["1D weight-stationary"], sizes, mesh)
        exact_two = _moved(FEED_FORWARD["2D weight-stationary"], sizes, mesh)
        if n > 16:
            assert exact_two < exact_one


def test_crossovers_of_weight_gathering() -> None:
    """Fig. 3: X = Y = Z = 4, E = 16384, F = 65536. 2D to X at T = E, X to XY at F X / Z, XY to XYZ
    at F X Y, with equal bytes; weights of half the bytes halve them."""
    mesh, names = Mesh.of(x=4, y=4, z=4), [*FEED_FORWARD][1:]

    def best(tokens: float, weight_bytes: float = 2.0) -> str:
        sizes = {"B": tokens, "L": 1, "E": 16384, "F": 65536, "G": 1}
        cost = {}
        for name in names:
            form = FEED_FORWARD[name].form(sizes, mesh)
            cost[name] = 2.0 * form.activations + weight_bytes * form.weights
        return min(cost, key=lambda name: cost[name])

    for weight_bytes, scale in ((2.0, 1.0), (1.0, 0.5)):
        for (before, after), tokens in zip(pairwise(names), (16384, 65536, 1048576), strict=True):
            assert best(tokens * scale * 0.999, weight_bytes) == before
            assert best(tokens * scale * 1.001, weight_bytes) == after


def test_how_many_chips_weights_are_gathered_over() -> None:
    """Appendix A.2.2: N = sqrt(T n / F), and 4 E sqrt(T F / n) elements then."""
    n, sizes = 4096, {"B": 2.0**22, "L": 1, "E": 2.0**14, "F": 2.0**16, "G": 1}
    assert best_gathering(sizes, n) == (2.0**22 * n / 2.0**16) ** 0.5
    moved = {}
    for k in (2**i for i in range(1, 12)):
        form = FEED_FORWARD["X-weight-gathered"].form(sizes, Mesh.of(x=k, y=n // k, z=1))
        moved[k] = form.weights + form.activations
    assert min(moved, key=lambda k: moved[k]) == best_gathering(sizes, n)
    wanted = 4 * sizes["E"] * (sizes["B"] * sizes["F"] / n) ** 0.5
    assert moved[512] == pytest.approx(wanted, rel=0.13)  # without the (K - 1) / K
