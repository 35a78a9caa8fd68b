"""The programme's steps, against the modules of transformers and torch.

Weights come in parts, as tiers give them; what they are cut into must not show.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from freight.model.expert_rows import _add_rows
from freight.model.families import ACTIVATIONS
from freight.model.frame import Angles, Frame, WeightParts
from freight.model.layers import run_unit
from freight.model.programme import (
    Activate,
    Add,
    AddPositions,
    Cap,
    Clip,
    Combine,
    Dispatch,
    Embed,
    Multiply,
    Norm,
    Project,
    Rotate,
    Route,
    Scale,
    Split,
    Step,
    Unit,
    Weight,
)
from freight.model.rope_config import RopeConfig
from freight.model.routes import Routes
from freight.model.workspace import Workspace

T, D = 5, 12


def matrix(rows: int, columns: int = D) -> Weight:
    return Weight(name="w", out_dims=("F",), in_dims=("D",), num_rows=rows, num_columns=columns)


def vector(columns: int, name: str = "b") -> Weight:
    return Weight(name=name, out_dims=(), in_dims=("F",), num_rows=1, num_columns=columns)


def frame(
    values: dict[str, torch.Tensor], weights: dict[str, WeightParts], **more: object
) -> Frame:
    workspace = Workspace(torch.full((1 << 20,), 255, dtype=torch.uint8))
    return Frame(weights=weights, workspace=workspace, values=values, **more)  # type: ignore[arg-type]


def run(steps: Sequence[Step], given: Frame) -> dict[str, torch.Tensor]:
    """Values after the steps; those in the workspace are still there."""
    run_unit(Unit(name="test", kind="mlp", layer=0, steps=tuple(steps)), given)
    return given.values


def cut_up(tensor: torch.Tensor, borders: list[int]) -> WeightParts:
    """Rows as parts: (first row, rows)."""
    edges = [0, *sorted({b for b in borders if 0 < b < len(tensor)}), len(tensor)]
    return [(a, tensor[a:b]) for a, b in itertools.pairwise(edges)]


@settings(deadline=None, max_examples=30)
@given(
    borders=st.lists(st.integers(1, 16), max_size=4),
    biased=st.booleans(),
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_project_from_parts(borders: list[int], biased: bool, adds: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(T, D), torch.randn(17, D), torch.randn(17)
    step = Project(
        x="x", out="y", weight=matrix(17), bias=vector(17) if biased else None, adds=adds
    )
    before = torch.randn(T, 17)
    values = {"x": x, "y": before.clone()} if adds else {"x": x}
    given = frame(values, {"w": cut_up(weight, borders), "b": [(0, bias[None])]})
    expected = F.linear(x, weight, bias if biased else None) + (before if adds else 0.0)
    torch.testing.assert_close(run([step], given)["y"], expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(
    gate_borders=st.lists(st.integers(1, 159), max_size=3),
    borders=st.lists(st.integers(1, 159), max_size=3),
    tokens=st.sampled_from([40, 600]),
    draw=st.randoms(use_true_random=False),
)
def test_gates_of_parts_in_any_order(
    gate_borders: list[int], borders: list[int], tokens: int, draw: random.Random
) -> None:
    """A gate and what it gates are cut where it may be, and tiers give what they have first."""
    torch.manual_seed(0)
    x, gate, other = (torch.randn(rows, 64).bfloat16() / 8**0.5 for rows in (tokens, 160, 160))
    parts = cut_up(gate, gate_borders), cut_up(other, borders)
    for own in parts:
        draw.shuffle(own)
    weights = dict(zip(("gate", "other"), parts, strict=True))
    steps = [
        *(Project(x="x", out=name, weight=replace(matrix(160, 64), name=name)) for name in weights),
        Activate(x="gate", function="silu"),
        Multiply(x="gate", y="other"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freight.kernels.pairs._are_faster", lambda tokens, has_plain: True)
        found = run(steps, frame({"x": x}, weights))["gate"].float()
    gated, shares = (F.linear(x.float(), own.float()) for own in (gate, other))
    torch.testing.assert_close(found, F.silu(gated) * shares, rtol=0.03, atol=0.03)


NORMS: dict[str, Callable[[int], torch.nn.Module]] = {
    "rms": lambda width: LlamaRMSNorm(width, eps=1e-3),
    "rms_plus_one": lambda width: Gemma2RMSNorm(width, eps=1e-3),
    "layer": lambda width: torch.nn.LayerNorm(width, eps=1e-3),
    "layer_plus_one": lambda width: NemotronLayerNorm1P(width, eps=1e-3),
    "layer_bare": lambda width: torch.nn.LayerNorm(width, eps=1e-3, elementwise_affine=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_norm(kind: Any, dtype: torch.dtype) -> None:
    """But for the order of the sum: the mean is taken and scaled in float32 in any case."""
    torch.manual_seed(0)
    module = NORMS[kind](D).to(dtype)
    for parameter in module.parameters():
        parameter.data.normal_()
    weights: dict[str, WeightParts] = {
        name: [(0, parameter.data[None])] for name, parameter in module.named_parameters()
    }
    x = (3 * torch.randn(T, D)).to(dtype)
    bias = vector(D, "bias") if "bias" in weights else None
    step = Norm(x="x", out="y", kind=kind, weight=vector(D, "weight"), bias=bias, eps=1e-3)
    values = run([step], frame({"x": x.clone()}, weights))
    rounding = torch.finfo(dtype).eps
    expected = module(x).detach()
    torch.testing.assert_close(values["y"], expected, rtol=2 * rounding, atol=4 * rounding)
    assert torch.equal(values["x"], x)


def test_norm_of_heads_in_place() -> None:
    torch.manual_seed(0)
    module = LlamaRMSNorm(4, eps=1e-3)
    module.weight.data.normal_()
    x = torch.randn(T, 3 * 4)
    step = Norm(x="q", out="q", kind="rms", weight=vector(4, "g"), bias=None, eps=1e-3, num_heads=3)
    given = frame({"q": x.clone(), "x": x}, {"g": [(0, module.weight.data[None])]})
    expected = module(x.view(T, 3, 4)).view(T, 12).detach()
    torch.testing.assert_close(run([step], given)["q"], expected)


@pytest.mark.parametrize("shape", [(4, 4, 3), (4, 2, 3), (6, 1, 2)], ids=str)
def test_split_by_key_value_head(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, width = shape
    x = torch.randn(T, (heads + 2 * kv_heads) * width)
    step = Split(
        x="qkv", q="q", k="k", v="v", num_heads=heads, num_kv_heads=kv_heads, head_dim=width
    )
    values = run([step], frame({"qkv": x, "x": x}, {}))
    group = heads // kv_heads
    for t, head in itertools.product(range(T), range(kv_heads)):
        begin = head * (group + 2) * width
        queries, key, value = x[t, begin : begin + (group + 2) * width].split(
            [group * width, width, width]
        )
        assert torch.equal(values["q"].view(T, kv_heads, -1)[t, head], queries)
        assert torch.equal(values["k"].view(T, kv_heads, -1)[t, head], key)
        assert torch.equal(values["v"].view(T, kv_heads, -1)[t, head], value)


@pytest.mark.parametrize("normalised", [True, False])
def test_experts_add_their_weighted_updates(normalised: bool) -> None:
    """Against each token on its own; an expert here multiplies by its number plus one."""
    torch.manual_seed(0)
    x, normed, scores = torch.randn(T, D), torch.randn(T, D), torch.randn(T, 4)
    routes = Routes(experts=torch.zeros(T, 2, dtype=torch.int64), weights=torch.zeros(T, 2))
    run(
        [Route(x="scores", num_chosen=2, normalised=normalised)],
        frame({"x": x, "scores": scores}, {}, routes=routes),
    )
    own = x.clone()
    for expert in range(4):
        tokens, places = torch.where(routes.experts == expert)
        given = frame(
            {"x": own, "aside": normed},
            {"w": [(0, (expert + 1.0) * torch.eye(D))]},
            chosen=tokens,
            shares=routes.weights[tokens, places],
        )
        steps = (
            Dispatch(x="aside", out="chosen"),
            Project(x="chosen", out="update", weight=matrix(D)),
            Combine(x="x", y="update"),
        )
        run(steps, given)
    for t in range(T):
        shares = scores[t].softmax(0)
        best = shares.argsort(descending=True)[:2]
        kept = shares[best] / (shares[best].sum() if normalised else 1.0)
        expected = x[t] + ((best + 1.0) * kept).sum() * normed[t]
        torch.testing.assert_close(own[t], expected)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.4])
def test_experts_are_weighed_against_those_near_them(noise: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(200, 6)
    routes = Routes(experts=torch.zeros(200, 2, dtype=torch.int64), weights=torch.zeros(200, 2))
    step = Route(x="scores", num_chosen=2, normalised=False, margin=2 * noise)
    given = frame({"x": scores, "scores": scores.clone()}, {}, routes=routes)
    run([step], given)
    weights, experts = sparsemixer(scores, jitter_eps=noise, training=False)
    assert torch.equal(routes.experts, experts)
    torch.testing.assert_close(routes.weights, weights)
    assert 0 < (weights < 1).float().mean() < 1


def test_caps_scales_and_positions() -> None:
    x, table = torch.randn(T, D), torch.randn(9, D)
    positions = torch.tensor([0, 1, 2, 0, 6])
    step = AddPositions(x="x", weight=matrix(9), offset=2)
    given = frame({"x": x.clone()}, {"w": [(0, table)]}, positions=positions)
    torch.testing.assert_close(run([step], given)["x"], x + table[positions + 2])
    values = run([Cap(x="x", limit=2.0)], frame({"x": x.clone()}, {}))
    torch.testing.assert_close(values["x"], 2 * torch.tanh(x / 2))
    values = run([Clip(x="x", limit=0.5)], frame({"x": x.clone()}, {}))
    assert torch.equal(values["x"], x.clamp(-0.5, 0.5))
    half = x.to(torch.bfloat16)
    values = run([Scale(x="x", factor=48.1)], frame({"x": half.clone()}, {}))
    assert torch.equal(values["x"], half * torch.tensor(48.1, dtype=torch.bfloat16))


@pytest.mark.parametrize("rotary", [8, 4])
def test_rotate(rotary: int) -> None:
    """Half the head against the other half; what is not rotated stays."""
    torch.manual_seed(0)
    heads, width = 3, 8
    x = torch.randn(T, heads * width)
    angle = torch.randn(T, rotary // 2)
    own = Angles(cos=angle.cos(), sin=angle.sin())
    rope = RopeConfig(rotary_dim=rotary)
    given = frame({"q": x.clone(), "x": x}, {}, angles={rope: own})
    mine = run([Rotate(x="q", num_heads=heads, rope=rope)], given)["q"].view(T, heads, width)
    turned = x.view(T, heads, width)[..., :rotary].transpose(0, 1)[None]
    cos, sin = (torch.cat([f(angle), f(angle)], -1)[None] for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(turned, turned, cos, sin)
    torch.testing.assert_close(mine[..., :rotary], expected[0].transpose(0, 1))
    assert torch.equal(mine[..., rotary:], x.view(T, heads, width)[..., rotary:])


def test_rotates_neighbours_by_the_angles_of_its_rope() -> None:
    """As complex numbers are turned."""
    torch.manual_seed(0)
    heads, width, half = 3, 10, 4
    x, angle = torch.randn(T, heads * width), torch.randn(T, half)
    none = Angles(cos=torch.full((T, half), torch.nan), sin=torch.zeros(T, half))
    own = Angles(cos=angle.cos(), sin=angle.sin())
    ropes = [RopeConfig(rotary_dim=2 * half, pairs=pairs) for pairs in (False, True)]
    angles = dict(zip(ropes, (none, own), strict=True))
    given = frame({"q": x.clone(), "x": x}, {}, angles=angles)
    step = Rotate(x="q", num_heads=heads, rope=ropes[1])
    mine = run([step], given)["q"].view(T, heads, width)
    whole = x.view(T, heads, width)
    pairs = torch.view_as_complex(whole[..., : 2 * half].reshape(T, heads, half, 2))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(T, half), angle)[:, None])
    torch.testing.assert_close(mine[..., : 2 * half], turned.flatten(-2))
    assert torch.equal(mine[..., 2 * half :], whole[..., 2 * half :])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_the_families(name: str) -> None:
    if name not in ACT2FN:
        pytest.skip("this transformers has it no more")
    x = torch.linspace(-6, 6, 60).view(T, 12)
    expected = ACT2FN[name](x.clone())
    mine = run([Activate(x="x", function=ACTIVATIONS[name])], frame({"x": x.clone()}, {}))["x"]
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def test_sums_and_products_are_in_place() -> None:
    x, y = torch.randn(T, D), torch.randn(T, D)
    own = x.clone()
    values = run([Add(x="x", y="y"), Multiply(x="x", y="y")], frame({"x": own, "y": y}, {}))
    assert values["x"] is own
    torch.testing.assert_close(own, (x + y) * y)


def test_embedding_rows_are_the_caller_s() -> None:
    with pytest.raises(AssertionError, match="gathered by the caller"):
        run([Embed(out="rows", weight=matrix(4))], frame({"x": torch.zeros(T, D)}, {}))


def test_a_unit_gives_its_scratch_back() -> None:
    given = frame({"x": torch.randn(T, D)}, {"w": [(0, torch.randn(17, D))]})
    steps = [Project(x="x", out="y", weight=matrix(17))]
    run(steps, given)
    first = given.workspace.peak_bytes
    del given.values["y"]
    run(steps, given)
    assert given.workspace.peak_bytes == first >= T * 17 * 4


@settings(deadline=None, max_examples=40)
@given(
    shapes=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4), max_size=4
    )
)
def test_frames_of_the_workspace(shapes: list[list[tuple[int, int]]]) -> None:
    """Nested frames: tensors of the same frame never overlap, outer ones survive inner ones."""
    workspace = Workspace(torch.zeros(64 * 1024, dtype=torch.uint8))

    def descend(level: int) -> None:
        if level == len(shapes):
            return
        with workspace.frame():
            taken = [workspace.take(*shape, dtype=torch.float32) for shape in shapes[level]]
            for mark, tensor in enumerate(taken):
                assert tensor.data_ptr() % 64 == workspace._buffer.data_ptr() % 64
                tensor.fill_(100 * level + mark)
            descend(level + 1)
            assert all((x == 100 * level + mark).all() for mark, x in enumerate(taken))

    descend(0)
    most = sum(-(-a * b * 4 // 64) * 64 for level in shapes for a, b in level)
    assert workspace.peak_bytes == most


def test_a_workspace_that_is_too_small_is_a_bug() -> None:
    workspace = Workspace(torch.zeros(256, dtype=torch.uint8))
    workspace.take(10, dtype=torch.float32)
    with pytest.raises(AssertionError, match="workspace of 256 bytes is too small"):
        workspace.take(60, dtype=torch.float32)


@pytest.mark.parametrize("ids", [[6, 0, 3], [0, 3, 6], [2, 2, 5], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "width"), [(0, 8), (8, 8), (0, 16), (4, 8), (0, 6)])
def test_rows_are_added_to_where_they_lie(
    first: int, width: int, dtype: torch.dtype, ids: list[int]
) -> None:
    """Whether rows are a whole part of wider ones, all of them, or something else, in any order,
    and one as often as it is named."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(7, 16, generator=generator).to(dtype)
    update = torch.randn(len(ids), width, generator=generator).to(dtype)
    expected = wide.clone()
    for row, own in zip(ids, update, strict=True):
        expected[row, first : first + width] += own
    _add_rows(wide[:, first : first + width], torch.tensor(ids, dtype=torch.int64), update)
    # A sum below 4, of a row that is named twice, may be rounded once on its way or not.
    is_exact = dtype == torch.float32 or ids != [2, 2, 5]
    limit = 0.0 if is_exact else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(wide, expected, rtol=0, atol=limit)
