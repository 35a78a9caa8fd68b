"""The shortest path through whole blocks: against every named layout, against plain search, run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from heapq import heappop, heappush
from itertools import product as choices

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import FreightError, InputError
from freight.hardware.chip import find_chip
from freight.model.config import ModelConfig
from freight.partition.block_route import best_block
from freight.partition.block_search import BlockSearch
from freight.partition.cost import Cost, Setting, Step
from freight.partition.einsum import attention, pointwise, product
from freight.partition.fabric import Fabric
from freight.partition.layers import Cut, block, layer_sizes
from freight.partition.layout import Layout, Mesh
from freight.partition.moves import legal_moves, move, moved_elements
from freight.partition.named import FEED_FORWARD
from freight.partition.planner import cuts, meshes
from freight.partition.shortest import Prices, seconds_of

from .test_layers import check, config, draws, plain_block
from .test_planner import mixtral
from .test_schemes import bundled

BOX = Mesh.of(x=4, y=4, z=4)


@st.composite
def prices_for(draw: st.DrawFn, mesh: Mesh) -> Prices:
    rate, fixed = st.sampled_from([0.1, 1.0, 10.0]), st.sampled_from([0.0, 1.0, 1e4])
    names = mesh.names
    fabric = Fabric(mesh, {a: draw(rate) for a in names}, {a: draw(fixed) for a in names})
    return Prices(
        fabric=fabric,
        flops=draw(st.sampled_from([1e2, 1e5])),
        memory_bytes_per_s=draw(st.sampled_from([1.0, 1e3, 1e9])),
        weight_bytes=draw(st.sampled_from([0.5, 1.0, 2.0])),
        kv_bytes=draw(st.sampled_from([1.0, 2.0])),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    return config(
        1,
        1,
        parallel=draw(st.booleans()),
        norm_place=draw(st.sampled_from(["before", "after", "both"])),
        norm=draw(st.sampled_from(["rms", "layer"])),
    )


@st.composite
def sizes_for(draw: st.DrawFn, n: int) -> dict[str, float]:
    """Of a prefill or of decoding; heads of any number, keys of few or as many."""
    heads = draw(st.sampled_from([1, 2, 4, 12])) * draw(st.sampled_from([1, n]))
    groups = [own for own in (1, 2, 4, heads) if heads % own == 0]
    sizes: dict[str, float] = {"H": heads, "K": draw(st.sampled_from(groups)), "J": 2}
    sizes |= {"B": draw(st.sampled_from([1, n, 64 * n, 2000 * n])), "D": n * 2}
    sizes |= {"E": n * draw(st.integers(1, 99)), "F": n * draw(st.integers(1, 400))}
    new, past = draw(st.sampled_from([(1, 7), (1, 5000), (128, 0), (64, 1920)]))
    sizes |= {"L": new, "S": past + new, "A": past + (new + 1) / 2}
    return sizes | {"G": draw(st.sampled_from([1, 2]))}


def named(
    mesh: Mesh, sizes: dict[str, float], model: ModelConfig, prices: Prices
) -> Iterator[tuple[Cut, float]]:
    """Every cut of the planner that is possible, the papers' among them, with its seconds."""
    for cut in cuts(mesh, model):
        try:
            yield cut, seconds_of(block(mesh, sizes, cut, model), prices)
        except FreightError:
            continue


@settings(deadline=None, max_examples=40)
@given(data=st.data(), model=models())
def test_no_named_layout_of_a_block_is_faster(data: st.DataObject, model: ModelConfig) -> None:
    mesh = Mesh.of(**{axis: data.draw(st.sampled_from([1, 2, 3, 4])) for axis in "xyz"})
    sizes, prices = data.draw(sizes_for(mesh.num_chips)), data.draw(prices_for(mesh))
    found = best_block(model, sizes, prices)
    assert seconds_of(found.layer, prices) == pytest.approx(found.seconds, rel=1e-12)
    for cut, seconds in named(mesh, sizes, model, prices):
        assert found.seconds <= seconds * (1 + 1e-12), cut


def test_the_named_are_the_papers() -> None:
    """Cuts that the path is held against: each feed-forward layout, with attention by heads and by
    rows; of 1D those on meshes with one chip along x."""
    every = [*cuts(BOX, bundled("palm-540b"))]
    for name, own in FEED_FORWARD.items():
        if not name.startswith("1D"):
            found = [cut for cut in every if cut.gathered == own.cut.gathered]
            assert {cut.batch for cut in found} >= {"", found[0].used_axes}, name
    assert any(mesh.size("x") == 1 for mesh in meshes(64))


TPU, H100 = find_chip("tpu-v4"), find_chip("h100")


def priced(own: Cost) -> Prices:
    rates, setting = own.efficiency, own.setting
    return Prices(
        fabric=own.fabric,
        flops=setting.chip.dense_flops * rates.compute,
        memory_bytes_per_s=setting.chip.memory_bytes_per_s * rates.memory,
        weight_bytes=setting.weight_bytes,
    )


@pytest.mark.parametrize("shape", [(4, 4, 4), (8, 4, 2), (1, 8, 8), (2, 2, 2)])
@pytest.mark.parametrize("name", ["palm-540b", "llama-2-70b", "megatron-turing-530b"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_it_is_no_worse_at_published_sizes(name: str, shape: tuple[int, ...], phase: str) -> None:
    """Section 4's model and lengths, from one row to thousands."""
    model, mesh = bundled(name), Mesh.of(**dict(zip("xyz", shape, strict=True)))
    setting = Setting(chip=TPU if name.startswith("palm") else H100)
    for rows in (1, 16, 256, 4096):
        new, past = (2048, 0) if phase == "prefill" else (1, 2048)
        step = Step(phase=phase, rows=rows, new_tokens=new, past=past)  # type: ignore[arg-type]
        own = Cost(model, mesh, Cut(), step, setting)
        sizes, prices = dict(own.layers[0][0].sizes), priced(own)
        found = best_block(model, sizes, prices)
        best = min(seconds for _, seconds in named(mesh, sizes, model, prices))
        assert 0.5 * best < found.seconds <= best * (1 + 1e-12)


def test_it_is_priced_as_the_plan_is() -> None:
    """What a cut's layer takes is what the cost of the model says, but for its fixed time."""
    step = Step(phase="decode", rows=64, new_tokens=1, past=2048)
    own = Cost(bundled("palm-540b"), BOX, Cut(batch="zyx"), step, Setting(chip=TPU))
    ((layer, count),) = own.layers
    rest = sum(seconds_of(end, priced(own)) for end in own.ends)
    # Of the embedding no more than single rows are read.
    rest -= own.ends[0].used_elements * 2.0 / priced(own).memory_bytes_per_s
    fixed = own.efficiency.layer_s * count
    assert own.seconds == pytest.approx(seconds_of(layer, priced(own)) * count + rest + fixed)


def test_better_ones_than_the_papers() -> None:
    """Decoding 64 rows on 64 chips the stream is best cut by rows where the paper cuts its width:
    norms then cross one axis instead of three. Of a serial block parts are best cut differently."""
    step = Step(phase="decode", rows=64, new_tokens=1, past=2016)
    own = Cost(bundled("palm-540b"), BOX, Cut(), step, Setting(chip=TPU))
    sizes, prices = dict(own.layers[0][0].sizes), priced(own)
    found = best_block(own.config, sizes, prices)
    best = min(seconds for _, seconds in named(BOX, sizes, own.config, prices))
    assert found.seconds == pytest.approx(best * (1 - 0.029), rel=1e-3)
    assert found.layer.inputs["x"].cut("B") and not found.layer.moved(weights=True)
    step = Step(phase="prefill", rows=16, new_tokens=2048)
    serial = replace(own.config, parallel=False, shared_norm=False)
    own = Cost(serial, BOX, Cut(), step, Setting(chip=TPU))
    sizes, prices = dict(own.layers[0][0].sizes), priced(own)
    found = best_block(serial, sizes, prices)
    gathered = {own.value: own.move.axes for own in found.layer.transfers if own.is_weight}
    assert gathered["queries in"] != gathered["mlp in"]
    assert found.seconds < 0.995 * min(s for _, s in named(BOX, sizes, serial, prices))


# -- it computes the block ------------------------------------------------------------------------

HEADS = ((24, 24), (24, 8), (24, 1), (6, 2), (4, 4), (3, 1))


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    shape=st.sampled_from([(1, 1, 1), (2, 2, 2), (3, 2, 1), (1, 4, 1), (4, 1, 2)]),
    heads=st.sampled_from(HEADS),
    parallel=st.booleans(),
    place=st.sampled_from(["before", "after", "both"]),
    seed=st.integers(0, 9),
)
def test_what_is_found_computes_the_block(
    data: st.DataObject,
    shape: tuple[int, ...],
    heads: tuple[int, int],
    parallel: bool,
    place: str,
    seed: int,
) -> None:
    mesh = Mesh.of(**dict(zip("xyz", shape, strict=True)))
    model = config(*heads, parallel=parallel, norm_place=place)
    sizes = layer_sizes(model, rows=data.draw(st.sampled_from([1, 2, 24])), new_tokens=3)
    own = best_block(model, sizes, data.draw(prices_for(mesh))).layer
    arrays, shared = draws(own, seed), heads[0] // heads[1]
    x = arrays["x"]
    out = plain_block(x, arrays, shared, parallel, place)
    name = next(iter(own.outputs))
    check(own, arrays, name, out, heads)
    assert own.outputs[name] == own.inputs["x"]


# -- it is the shortest ---------------------------------------------------------------------------

_State = tuple[Layout, ...]


class Plain:
    """All there is to do, step by step: a state is the stream, and what is at hand beside it."""

    def __init__(self, sizes: dict[str, float], prices: Prices, search: BlockSearch) -> None:
        self.sizes, self.prices, self.mesh = sizes, prices, prices.fabric.mesh
        self.weights, self.axes = search.weights, search.axes
        self.moved = cache(self._moved)

    def _moved(self, layout: Layout) -> list[tuple[Layout, float]]:
        found = []
        for own in legal_moves(layout, self.axes):
            try:
                elements = moved_elements(layout, own, self.sizes, self.mesh)
            except InputError:
                continue
            found.append((move(layout, own), elements * 2.0 / 1.0))
        return found

    def products(self, value: Layout, weight: str, out: str) -> Iterator[tuple[Layout, float]]:
        stored, sizes = self.weights[weight], self.sizes
        for counts in choices(*(range(len(axes) + 1) for axes in stored.cuts)):
            cuts = tuple(axes[:n] for axes, n in zip(stored.cuts, counts, strict=True))
            used = Layout(stored.dims, cuts)
            try:
                made = product(value, used, tuple(out.split()))
                made.shape(sizes, self.mesh)
            except InputError:
                continue
            held = used.elements(sizes, self.mesh) * self.prices.weight_bytes
            own = stored.elements(sizes, self.mesh) * self.prices.weight_bytes
            flops = 2.0 * np.prod([sizes[dim] for dim in {*value.dims, *used.dims}])
            flops /= self.mesh.size({*value.axes, *used.axes})
            read_s = held / self.prices.memory_bytes_per_s
            yield made, held - own + read_s + flops / self.prices.flops

    def norm(self, layout: Layout) -> list[tuple[Layout, float]]:
        if layout.partial:
            return []
        rows, _, columns = layout.cuts
        held = self.sizes["B"] * self.sizes["L"] / self.mesh.size(rows) * 2.0
        parts = self.mesh.size(columns)
        return [(layout, 2 * held * (parts - 1) / parts)]

    def attend(self, queries: Layout, keys: Layout) -> list[tuple[Layout, float]]:
        try:
            made = attention(queries, keys)
        except InputError:
            return []
        kept = keys.elements({**self.sizes, "L": 1}, self.mesh) * self.sizes["S"]
        flops = 4.0 * made.elements(self.sizes, self.mesh) * self.sizes["A"]
        read_s = kept * self.prices.kv_bytes / self.prices.memory_bytes_per_s
        return [(made, read_s + flops / self.prices.flops)]

    def after(self, place: int, state: _State) -> Iterator[tuple[int, _State, float]]:
        """Places: 0 and 5 a copy of the stream, 1 and 6 normed, 2 queries beside it, 3 queries and
        keys, 4 attended or its product, 7 hidden, 8 gated, 9 the MLP's product."""
        for number in range(len(state)):
            if place == 2 and number == 1:
                continue  # queries and keys are made of one input
            for made, seconds in self.moved(state[number]):
                yield place, (*state[:number], made, *state[number + 1 :]), seconds
        stream, *rest = state
        steps: Iterator[tuple[Layout, float]] | list[tuple[Layout, float]] = []
        if place in (0, 6):
            steps = self.norm(rest[0])
        elif place == 1:
            for made, seconds in self.products(rest[0], "queries in", "B L H D"):
                yield 2, (stream, rest[0], made), seconds
        elif place == 2:
            for made, seconds in self.products(rest[0], "keys in", "B L J K D"):
                yield 3, (stream, rest[1], made), seconds
        elif place == 3:
            steps = self.attend(*rest)
        elif place == 4:
            steps = self.products(rest[0], "attention out", "B L E")
        elif place in (5, 10) and stream == rest[0] and not stream.partial:
            yield place + 1, (stream, stream) if place == 5 else (stream,), 0.0
        elif place == 7:
            steps = self.products(rest[0], "mlp in", "B L G F")
        elif place == 8 and not (rest[0].partial or rest[0].cut("G")):
            made = pointwise(rest[0], out_dims=("B", "L", "F"))
            yield 9, (stream, made), 0.0
        elif place == 9:
            steps = self.products(rest[0], "mlp out", "B L E")
        for made, seconds in steps:
            yield place + 1, (stream, made), seconds

    def shortest(self, stream: Layout) -> float:
        open_: list[tuple[float, int, int, _State]] = [(0.0, 0, 0, (stream, stream))]
        done: set[tuple[int, _State]] = set()
        count = 0
        while open_:
            so_far, _, place, state = heappop(open_)
            if place == 11 and state == (stream,):
                return so_far
            if (place, state) in done:
                continue
            done.add((place, state))
            for later, reached, seconds in self.after(place, state):
                count += 1
                heappush(open_, (so_far + seconds, count, later, reached))
        return np.inf


@settings(deadline=None, max_examples=8)
@given(data=st.data(), axis=st.sampled_from("xyz"))
def test_a_block_is_the_shortest(data: st.DataObject, axis: str) -> None:
    """Against Dijkstra over all states of a serial block, on one axis; moves may cut a row's tokens
    or the width of a head as well."""
    mesh = Mesh.of(**{own: 1 if own != axis else data.draw(st.integers(2, 4)) for own in "xyz"})
    n = mesh.num_chips
    fabric = Fabric(mesh, dict.fromkeys("xyz", 1.0), dict.fromkeys("xyz", 0.0))
    sizes = {**data.draw(sizes_for(n)), "L": 1}  # one token cannot be cut
    prices = replace(data.draw(prices_for(mesh)), fabric=fabric)
    model = config(1, 1)
    plain = Plain(sizes, prices, BlockSearch(model, sizes, prices))
    search = BlockSearch(model, sizes, prices)
    streams = [search.stream.layouts[n] for n in search.stream.whole()]
    best = min(plain.shortest(Layout(("B", "L", "E"), (o.cuts[0], "", o.cuts[1]))) for o in streams)
    assert best_block(model, sizes, prices).seconds == pytest.approx(best, rel=1e-9)


def test_experts_have_no_path() -> None:
    sizes = layer_sizes(mixtral(), rows=8, new_tokens=1)
    names = dict.fromkeys("xyz", 1.0)
    prices = Prices(fabric=Fabric(Mesh.of(x=1, y=2, z=1), names, names), flops=1.0)
    with pytest.raises(InputError, match="have experts"):
        best_block(mixtral(), sizes, prices)
