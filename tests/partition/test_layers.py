"""Whole layers on simulated chips against plain numpy, for all families' structures and any cut."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import InputError
from freight.model.config import ModelConfig, parse_config, read_config
from freight.partition.layers import (
    Cut,
    attention,
    block,
    embedding,
    feed_forward,
    layer_sizes,
    logits,
)
from freight.partition.layout import Mesh
from freight.partition.sharded import Sharded

from .virtual import Array, activate, attend, execute, whole

MESHES = (Mesh.of(x=1, y=1, z=1), Mesh.of(x=2, y=2, z=2), Mesh.of(x=3, y=2, z=1), Mesh.of(x=4))
GATHERED = ("", "x", "y", "yx", "zy", "zyx")


def config(heads: int, key_heads: int, **switches: object) -> ModelConfig:
    raw = {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 24,
        "vocab_size": 48,
    }
    return replace(parse_config(raw), **switches)  # type: ignore[arg-type]


@st.composite
def cuts(draw: st.DrawFn, mesh: Mesh) -> Cut:
    names = mesh.names
    width = draw(st.sampled_from(["", "x"]))
    inner = "".join(axis for axis in reversed(names) if axis not in width)
    gathered = "".join(axis for axis in draw(st.sampled_from(GATHERED)) if axis in names)
    gathered = gathered if _is_last(gathered, inner, width) else ""
    used = Cut(width=width, inner=inner, gathered=gathered).used_axes
    batch = used[draw(st.integers(0, len(used))) :]
    return Cut(width=width, inner=inner, gathered=gathered, batch=batch)


def _is_last(gathered: str, *parts: str) -> bool:
    own = ["".join(axis for axis in part if axis in gathered) for part in parts]
    return all(part.endswith(axes) for part, axes in zip(parts, own, strict=True))


def draws(own: Sharded, seed: int) -> dict[str, Array]:
    """All inputs and weights; matrices small enough for sums to stay near one."""
    rng = np.random.default_rng(seed)
    layouts = {**own.inputs, **own.weights}
    return {
        name: rng.normal(size=tuple(int(own.sizes[dim]) for dim in layout.dims))
        * (0.2 if name in own.weights else 1.0)
        for name, layout in layouts.items()
    }


def check(own: Sharded, arrays: dict[str, Array], out: str, wanted: Array, heads=(1, 1)) -> None:
    """The same values, and as many elements sent and FLOPs done as are counted."""
    done = execute(own, arrays, heads)
    assert done.values[out].layout == own.outputs[out]
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        whole(done.values[out], own.sizes) / scale, wanted / scale, rtol=0, atol=1e-12
    )
    chips = own.mesh.num_chips
    for kind, is_weight in (("weights", True), ("activations", False)):
        assert done.sent[kind] == pytest.approx(own.moved(weights=is_weight) * chips, rel=1e-13)
    products = sum(step.flops for step in own.computes if step.kind == "product")
    assert done.flops == pytest.approx(products * chips, rel=1e-13)


def plain_mlp(x: Array, arrays: dict[str, Array]) -> Array:
    hidden = np.einsum("ble,egf->blgf", x, arrays["mlp in"])
    return np.einsum("blf,fe->ble", activate(hidden), arrays["mlp out"])


def plain_attention(x: Array, arrays: dict[str, Array], shared: int) -> Array:
    q = np.einsum("ble,ehd->blhd", x, arrays["queries in"])
    kv = np.einsum("ble,ejkd->bljkd", x, arrays["keys in"])
    return np.einsum("blhd,hde->ble", attend(q, kv, 0, 0, shared), arrays["attention out"])


def plain_experts(x: Array, arrays: dict[str, Array]) -> Array:
    routes = np.einsum("ble,en->bln", x, arrays["router"])
    hidden = np.einsum("ble,negf->nblgf", x, arrays["experts in"])
    outs = np.einsum("nblf,nfe->nble", activate(hidden), arrays["experts out"])
    return np.einsum("nble,bln->ble", outs, routes)


def plain_norm(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6))


HEADS = ((24, 24), (24, 8), (24, 2), (24, 1), (6, 2), (4, 4), (3, 1))


@settings(deadline=None, max_examples=120)
@given(
    data=st.data(),
    mesh=st.sampled_from(MESHES),
    heads=st.sampled_from(HEADS),
    gated=st.booleans(),
    seed=st.integers(0, 9),
)
def test_parts_are_those_of_one_chip(
    data: st.DataObject, mesh: Mesh, heads: tuple[int, int], gated: bool, seed: int
) -> None:
    cut = data.draw(cuts(mesh))
    sizes = layer_sizes(config(*heads, gated_mlp=gated), rows=24, new_tokens=3)
    own = feed_forward(mesh, sizes, cut)
    arrays = draws(own, seed)
    check(own, arrays, "mlp", plain_mlp(arrays["x"], arrays))
    own = attention(mesh, sizes, cut)
    arrays = draws(own, seed)
    wanted = plain_attention(arrays["x"], arrays, heads[0] // heads[1])
    check(own, arrays, "attention", wanted, heads)


def plain_block(
    x: Array, arrays: dict[str, Array], shared: int, parallel: bool, place: str
) -> Array:
    """A layer's output on one chip, with norms at ``place``; ``shared`` heads have one of keys."""
    if parallel:
        normed = plain_norm(x)
        return x + plain_attention(normed, arrays, shared) + plain_mlp(normed, arrays)
    out = x
    for part in (lambda y: plain_attention(y, arrays, shared), lambda y: plain_mlp(y, arrays)):
        made = part(out if place == "after" else plain_norm(out))
        out = out + (plain_norm(made) if place == "both" else made)
        out = plain_norm(out) if place == "after" else out
    return out


@settings(deadline=None, max_examples=120)
@given(
    data=st.data(),
    mesh=st.sampled_from(MESHES),
    heads=st.sampled_from(HEADS),
    parallel=st.booleans(),
    place=st.sampled_from(["before", "after", "both"]),
    seed=st.integers(0, 9),
)
def test_blocks_are_those_of_one_chip(
    data: st.DataObject, mesh: Mesh, heads: tuple[int, int], parallel: bool, place: str, seed: int
) -> None:
    cut = data.draw(cuts(mesh))
    model = config(*heads, parallel=parallel, norm_place=place)
    own = block(mesh, layer_sizes(model, rows=24, new_tokens=3), cut, model)
    arrays, shared = draws(own, seed), heads[0] // heads[1]
    x = arrays["x"]
    out = plain_block(x, arrays, shared, parallel, place)
    name = next(iter(own.outputs))
    check(own, arrays, name, out, heads)


@pytest.mark.parametrize("mesh", MESHES[:3])
@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("experts", ["", "z", "zy"])
def test_experts_are_those_of_one_chip(mesh: Mesh, gathered: str, experts: str) -> None:
    model = parse_config(
        {
            "model_type": "mixtral",
            "hidden_size": 24,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 24,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "vocab_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
        }
    )
    try:
        cut = Cut(gathered=gathered, experts=experts)
    except InputError as error:
        assert "some do not" in str(error)
        return
    own = block(mesh, layer_sizes(model, rows=24, new_tokens=2), cut, model, with_experts=True)
    arrays = draws(own, 1)
    x = arrays["x"] + plain_attention(plain_norm(arrays["x"]), arrays, 24)
    out = x + plain_experts(plain_norm(x), arrays)
    check(own, arrays, next(iter(own.outputs)), out, (24, 1))
    if experts:
        assert not any(t.is_weight and t.value.startswith("expert") for t in own.transfers) or (
            set(gathered) - set(experts)
        )


@pytest.mark.parametrize("mesh", MESHES[:3])
@pytest.mark.parametrize("gathered", GATHERED)
def test_the_ends_are_those_of_one_chip(mesh: Mesh, gathered: str) -> None:
    cut, sizes = Cut(gathered=gathered), layer_sizes(config(24, 24), rows=24, new_tokens=2)
    own = embedding(mesh, sizes, cut)
    arrays = draws(own, 2)
    ids = np.random.default_rng(3).integers(0, 48, (24, 2))
    arrays["tokens"] = np.eye(48)[ids]
    check(own, arrays, "x", arrays["embedding"][ids])
    own = logits(mesh, sizes, cut)
    arrays = draws(own, 4)
    wanted = np.einsum("ble,ev->blv", plain_norm(arrays["x"]), arrays["head"])
    check(own, arrays, "logits", wanted)


@pytest.mark.parametrize(
    ("switches", "word"),
    [
        ({"gathered": "z"}, "not last in zy"),
        ({"gathered": "w"}, "gathered over w"),
        ({"batch": "z"}, "not last in what is used"),
        ({"experts": "y"}, "not first in zy"),
    ],
)
def test_cuts_that_cannot_be_are_refused(switches: dict[str, str], word: str) -> None:
    with pytest.raises(InputError, match=word):
        Cut(**switches)


def test_a_width_that_does_not_divide_is_refused() -> None:
    sizes = layer_sizes(config(24, 24), rows=24, new_tokens=1)
    with pytest.raises(InputError, match="Pad it to 25"):
        feed_forward(Mesh.of(x=1, y=5, z=1), sizes, Cut())


def test_all_bundled_models_are_cut() -> None:
    """Every weight but those of norms is on one chip of eight, once."""
    folder = resources.files("freight.model") / "configs"
    for file in folder.iterdir():
        with resources.as_file(file) as path:
            model = read_config(path)
        experts = model.experts
        has_more = experts is not None and experts.shared_size
        others = model.latent, model.recurrence, model.other_heads
        if any(own is not None for own in others) or has_more:
            continue  # they are refused
        mesh, cut = Mesh.of(x=2, y=2, z=1), Cut()
        sizes = layer_sizes(model, rows=8, new_tokens=1, past=100)
        own = block(mesh, sizes, cut, model)
        attended = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
        width = model.intermediate_size if experts is None else experts.intermediate_size
        mlp = model.hidden_size * width * (3 if model.gated_mlp else 2)
        assert own.stored_elements == (attended + mlp) / 4, file.name
        assert own.used_elements == own.stored_elements
