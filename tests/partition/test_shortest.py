"""The shortest path against the papers' layouts and against plain relaxation; times of moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.hardware.chip import find_chip
from freight.partition import shortest
from freight.partition.fabric import Fabric
from freight.partition.layers import feed_forward
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import Move, moved_elements
from freight.partition.named import FEED_FORWARD
from freight.partition.shortest import Prices, best_route, seconds_of


def even(mesh: Mesh, bytes_per_s: float = 1.0, latency_s: float = 0.0) -> Fabric:
    names = mesh.names
    return Fabric(mesh, dict.fromkeys(names, bytes_per_s), dict.fromkeys(names, latency_s))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, float], Prices]:
    mesh = Mesh.of(**{axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in "xyz"})
    n = mesh.num_chips
    sizes: dict[str, float] = {"B": n * draw(st.sampled_from([1, 4, 64, 2000, 10**5])), "L": 3}
    sizes |= {"E": n * draw(st.integers(1, 99)), "F": n * draw(st.integers(1, 400))}
    sizes |= {"G": draw(st.sampled_from([1, 2]))}
    rate = st.sampled_from([0.1, 1.0, 10.0])
    fabric = Fabric(mesh, {axis: draw(rate) for axis in "xyz"}, dict.fromkeys("xyz", draw(rate)))
    prices = Prices(fabric=fabric, flops=draw(st.sampled_from([1e2, 1e5])))
    return sizes, replace(prices, weight_bytes=draw(st.sampled_from([0.5, 1.0, 2.0])))


@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_no_named_layout_is_faster(case: tuple[dict[str, float], Prices]) -> None:
    sizes, prices = case
    found = best_route(sizes, prices)
    for name, named in FEED_FORWARD.items():
        if name.startswith("1D") and prices.fabric.mesh.size("x") > 1:
            continue  # it stores weights otherwise: it is 2D on another mesh
        own = feed_forward(prices.fabric.mesh, sizes, named.cut)
        assert found.seconds <= seconds_of(own, prices) * (1 + 1e-12), name


def test_a_written_layer_takes_its_moves_and_its_arithmetic() -> None:
    mesh, cut = Mesh.of(x=2, y=2, z=2), FEED_FORWARD["X-weight-gathered"]
    sizes = {"B": 8, "L": 1, "E": 8, "F": 16, "G": 2}
    prices = Prices(fabric=even(mesh, 4.0), flops=10.0, activation_bytes=2.0, weight_bytes=1.0)
    form = cut.form(sizes, mesh)
    moved = (2.0 * form.activations + form.weights) / 4.0
    computed = 2 * 8 * 3 * 8 * 16 / 8 / 10.0
    found = seconds_of(feed_forward(mesh, sizes, cut.cut), prices)
    assert found == pytest.approx(moved + computed)


@settings(deadline=None, max_examples=15)
@given(case=cases())
def test_it_is_the_shortest(case: tuple[dict[str, float], Prices]) -> None:
    """Relaxation of all edges until nothing changes, from each layout of the stream."""
    sizes, prices = case
    graph, names = shortest._graph(), prices.fabric.mesh.names
    ok = [shortest._divides(layout, place, sizes, prices) for place, layout in graph.nodes]
    edges = [own for own in graph.edges if ok[own.start] and ok[own.end]]
    lengths = np.array([shortest._seconds(own, sizes, prices) for own in edges])
    starts, ends = (np.array([getattr(own, end) for own in edges]) for end in ("start", "end"))
    best = np.inf
    for node, (place, layout) in enumerate(graph.nodes):
        if place or not ok[node] or layout.partial or set(layout.axes) != set(names):
            continue
        far = np.full(len(graph.nodes), np.inf)
        far[node] = 0.0
        for _ in range(len(graph.nodes)):
            nearer = far.copy()
            np.minimum.at(nearer, ends, far[starts] + lengths)
            if np.array_equal(nearer, far):
                break
            far = nearer
        best = min(best, far[graph.nodes.index((3, layout))])
    assert best_route(sizes, prices).seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "gathered"), [(8192, ""), (32768, "x"), (524288, "xy"), (2097152, "xyz")]
)
def test_it_finds_the_papers_layouts(tokens: int, gathered: str) -> None:
    """Fig. 3: between its crossovers, what is gathered is what the paper gathers."""
    mesh = Mesh.of(x=4, y=4, z=4)
    sizes = {"B": tokens, "L": 1, "E": 16384, "F": 65536, "G": 1}
    found = best_route(sizes, Prices(fabric=even(mesh, 270e9), flops=275e12))
    products = [step for step in found.steps if step.startswith("product")]
    assert len(products) == 2
    for step in products:
        assert sorted(step.partition("gathered over ")[2]) == sorted(gathered), step


def test_weights_are_never_cut_over_what_does_not_divide() -> None:
    mesh = Mesh.of(x=2, y=1, z=1)
    sizes = {"B": 1, "L": 1, "E": 4, "F": 8, "G": 1}
    found = best_route(sizes, Prices(fabric=even(mesh), flops=1.0))
    assert found.stream == Layout.parse("B W_x") or found.stream.cut("W") == "x"


@settings(deadline=None)
@given(data=st.data())
def test_with_one_bandwidth_time_is_what_the_algebra_counts(data: st.DataObject) -> None:
    mesh = Mesh.of(**{axis: data.draw(st.integers(1, 5)) for axis in "xyz"})
    axes = data.draw(st.sampled_from(["x", "xy", "zyx"]))
    sizes = {"B": mesh.num_chips * 2, "E": mesh.num_chips * 3}
    fabric = even(mesh, 2.0)
    for layout, own, larger in (
        (f"B_{axes} E", Move("all-gather", axes, source="B"), "B E"),
        (f"B E {{+{axes}}}", Move("reduce-scatter", axes, target="B"), "B E"),
        (f"B E {{+{axes}}}", Move("all-reduce", axes), "B E"),
        (f"B_{axes} E", Move("all-to-all", axes, source="B", target="E"), f"B_{axes} E"),
    ):
        held = Layout.parse(larger).elements(sizes, mesh)
        counted = moved_elements(Layout.parse(layout), own, sizes, mesh)
        assert fabric.seconds(own.kind, held, axes) == pytest.approx(counted / 2.0, rel=1e-12)


def test_slow_axes_carry_the_least() -> None:
    """Two hosts of four chips: what is gathered crosses between hosts once for each chip."""
    mesh = Mesh.of(x=2, y=4, z=1)
    fabric = Fabric(mesh, {"x": 1.0, "y": 10.0, "z": 10.0}, {"x": 5.0, "y": 1.0, "z": 1.0})
    between, inside = 80 / 4 * 1 / 2 / 1.0, 80 * 3 / 4 / 10.0
    assert fabric.seconds("all-gather", 80.0, "xy") == pytest.approx(between + inside + 6.0)
    assert fabric.seconds("all-reduce", 80.0, "xy") == pytest.approx(2 * (between + inside + 6.0))
    # Half of everything is for the other host.
    exchanged = 80 * 1 / 2 / 1.0 + 80 / 2 * 3 / 4 / 10.0
    assert fabric.seconds("all-to-all", 80.0, "xy") == pytest.approx(exchanged + 6.0)
    assert fabric.seconds("slice", 80.0, "xy") == 0.0
    assert fabric.latency("z") == 0.0


@pytest.mark.parametrize(
    ("shape", "inside"),
    [((2, 4, 2), "xy"), ((2, 8, 1), "yz"), ((16, 1, 1), "yz"), ((1, 2, 4), "yz")],
)
def test_axes_that_fill_a_host_have_its_links(shape: tuple[int, ...], inside: str) -> None:
    chip = find_chip("h100")
    mesh = Mesh.of(**dict(zip("xyz", shape, strict=True)))
    fabric = Fabric.of(chip, mesh)
    for axis in "xyz":
        within = fabric.bytes_per_s[axis] == chip.link_bytes_per_s
        assert within == (axis in inside) or mesh.size(axis) == 1
    torus = Fabric.of(find_chip("tpu-v4"), mesh)
    assert set(torus.bytes_per_s.values()) == {270e9}
