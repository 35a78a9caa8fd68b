"""The programme's steps, against the modules of transformers and torch.

Weights come in parts, as tiers give them; what they are cut into must not show.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from freight.model.families import ACTIVATIONS
from freight.model.layers import Frame, WeightParts, run_unit
from freight.model.programme import (
    Activate,
    Add,
    Embed,
    Multiply,
    Norm,
    Project,
    Rotate,
    Step,
    Unit,
    Weight,
)
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
    borders=st.lists(st.integers(1, 16), max_size=4), biased=st.booleans(), seed=st.integers(0, 99)
)
def test_project_from_parts(borders: list[int], biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(T, D), torch.randn(17, D), torch.randn(17)
    step = Project(x="x", out="y", weight=matrix(17), bias=vector(17) if biased else None)
    given = frame({"x": x}, {"w": cut_up(weight, borders), "b": [(0, bias[None])]})
    expected = F.linear(x, weight, bias if biased else None)
    torch.testing.assert_close(run([step], given)["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm(dtype: torch.dtype) -> None:
    """But for the order of the sum: the mean is taken and scaled in float32 in any case."""
    torch.manual_seed(0)
    module = LlamaRMSNorm(D, eps=1e-3).to(dtype)
    module.weight.data.normal_()
    x = (3 * torch.randn(T, D)).to(dtype)
    step = Norm(x="x", out="y", weight=vector(D, "g"), eps=1e-3)
    given = frame({"x": x.clone()}, {"g": [(0, module.weight.data[None])]})
    values = run([step], given)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(values["y"], module(x).detach(), rtol=2 * rounding, atol=0)
    assert torch.equal(values["x"], x)


@pytest.mark.parametrize("rotary", [8, 4])
def test_rotate(rotary: int) -> None:
    """Half the head against the other half; what is not rotated stays."""
    torch.manual_seed(0)
    heads, width = 3, 8
    x = torch.randn(T, heads * width)
    angle = torch.randn(T, rotary // 2)
    given = frame({"q": x.clone(), "x": x}, {}, cos=angle.cos(), sin=angle.sin())
    mine = run([Rotate(x="q", num_heads=heads)], given)["q"].view(T, heads, width)
    turned = x.view(T, heads, width)[..., :rotary].transpose(0, 1)[None]
    cos, sin = (torch.cat([f(angle), f(angle)], -1)[None] for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(turned, turned, cos, sin)
    torch.testing.assert_close(mine[..., :rotary], expected[0].transpose(0, 1))
    assert torch.equal(mine[..., rotary:], x.view(T, heads, width)[..., rotary:])


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


def test_the_embedding_is_not_a_step() -> None:
    with pytest.raises(AssertionError, match="gathered by rows"):
        run([Embed(out="x", weight=matrix(4))], frame({"x": torch.zeros(T, D)}, {}))


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
