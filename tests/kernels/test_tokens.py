"""Norms, rotations and activations against formulas in float64: all widths, heads, types, and rows
that lie in wider ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels import threads, tokens
from freight.model.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=["fast", "reference"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything with the compiled loops, and without."""
    assert threads.find_loops() is not None
    with monkeypatch.context() as patch:
        if request.param == "reference":
            patch.setattr(tokens, "find_loops", lambda: None)
        yield request.param


def workspace() -> Workspace:
    return Workspace(torch.full((1 << 22,), 255, dtype=torch.uint8))


def within(columns: int, beyond: int, x: torch.Tensor) -> torch.Tensor:
    """x as the first columns of a tensor that is wider by ``beyond``."""
    wide = torch.full((x.shape[0], columns + beyond), 7.0, dtype=x.dtype)
    wide[:, :columns] = x
    return wide[:, :columns]


shapes = st.tuples(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 70), st.sampled_from([0, 3, 64])
)


@settings(deadline=None, max_examples=80)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    centred=st.booleans(),
    has_bias=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_norms_are_those_of_the_formula(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    centred: bool,
    has_bias: bool,
    in_place: bool,
    seed: int,
) -> None:
    count, num_heads, width, beyond = shape
    torch.manual_seed(seed)
    columns, eps = num_heads * width, 1e-3
    # Heads of tokens that lie apart are no rows of one matrix: only loops take them.
    beyond = beyond if num_heads == 1 else 0
    x = within(columns, beyond, (torch.randn(count, columns) * 3 + 1).to(dtype))
    gain, bias = torch.randn(width), torch.randn(width) if has_bias else None
    heads = x.double().view(count, num_heads, width)
    if centred:
        heads = heads - heads.mean(-1, keepdim=True)
    wanted = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    wanted = wanted + (0 if bias is None else bias.double())
    out = x if in_place else within(columns, beyond, torch.zeros(count, columns, dtype=dtype))
    tokens.normalise(
        x,
        out,
        gain,
        bias,
        num_heads=num_heads,
        eps=eps,
        centred=centred,
        workspace=workspace(),
    )
    error = (out.double().view_as(wanted) - wanted).abs()
    assert (error <= ROUNDING[dtype] * (wanted.abs() + 1)).all()
    behind = out.as_strided((count - 1, beyond), (out.stride(0), 1), columns)
    assert (behind == 7.0).all(), "what lies between the rows is not touched"


@settings(deadline=None, max_examples=80)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_rotations_are_those_of_the_formula(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    count, num_heads, width, beyond = shape
    half = data.draw(st.integers(0, width // 2))
    beyond = beyond if num_heads == 1 else 0
    torch.manual_seed(seed)
    x = within(num_heads * width, beyond, torch.randn(count, num_heads * width).to(dtype))
    angles = torch.randn(count + 2, half)
    cos, sin = angles.cos().to(dtype)[2:], angles.sin().to(dtype)[2:]
    wanted = x.double().reshape(count, num_heads, width).clone()
    turns = torch.complex(cos.double(), sin.double())[:, None]
    turned = torch.complex(wanted[..., :half], wanted[..., half : 2 * half]) * turns
    wanted[..., :half], wanted[..., half : 2 * half] = turned.real, turned.imag
    tokens.rotate(x, num_heads, cos, sin, workspace())
    error = (x.double().reshape(wanted.shape) - wanted).abs()
    assert (error <= 3 * ROUNDING[dtype] * (wanted.abs() + 1)).all()


FUNCTIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


@settings(deadline=None, max_examples=120)
@given(
    count=st.integers(1, 40),
    width=st.integers(1, 300),
    beyond=st.sampled_from([0, 3, 64]),
    dtype=st.sampled_from(DTYPES),
    function=st.sampled_from([*FUNCTIONS]),
    is_gated=st.booleans(),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 1000),
)
def test_activations_are_those_of_the_formula(
    count: int,
    width: int,
    beyond: int,
    dtype: torch.dtype,
    function: str,
    is_gated: bool,
    spread: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = within(width, beyond, (torch.randn(count, width) * spread).to(dtype))
    other = within(width, 2 * beyond, torch.randn(count, width).to(dtype))
    gate = other.double() if is_gated else torch.ones(1, dtype=torch.float64)
    wanted = FUNCTIONS[function](x.double()) * gate
    # A loop rounds once. torch rounds the function too, whose tails it makes of differences: its
    # errors go by x.
    has_loop = function == "gelu_tanh" or (function == "silu" and is_gated)
    by_loop = tokens.find_loops() is not None and has_loop
    size = wanted.abs() if by_loop else 3 * torch.maximum((x.double() * gate).abs(), wanted.abs())
    tokens.activate(x, function, other if is_gated else None)
    error = (x.double() - wanted).abs()
    assert (error <= ROUNDING[dtype] * size + 1e-6).all()
    behind = x.as_strided((count - 1, beyond), (x.stride(0), 1), width)
    assert (behind == 7.0).all(), "what lies between the rows is not touched"


@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
def test_activations_of_extremes(function: str) -> None:
    ends = [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 1e4, -1e4, 1e18, -1e18, math.inf, math.nan]
    x = torch.tensor([ends * 2], dtype=torch.float32)
    wanted = FUNCTIONS[function](x.double())
    gated = x.clone()
    tokens.activate(x, function)
    tokens.activate(gated, function, torch.ones_like(gated))
    is_number = ~wanted.isnan()
    torch.testing.assert_close(gated, x, rtol=1e-6, atol=1e-15, equal_nan=True)
    torch.testing.assert_close(x[is_number].double(), wanted[is_number], rtol=1e-5, atol=1e-15)
    assert x[~is_number].isnan().all()


def test_a_tokens_numbers_do_not_depend_on_its_neighbours(kernels: str) -> None:
    if kernels == "reference":
        pytest.skip("torch may sum another number of rows in another order")
    torch.manual_seed(0)
    x, gain = torch.randn(600, 272), torch.randn(272)
    cos, sin = torch.randn(2, 600, 40)

    def both(some: torch.Tensor, first: int) -> torch.Tensor:
        out = torch.empty_like(some)
        tokens.normalise(
            some, out, gain, None, num_heads=1, eps=1e-5, centred=True, workspace=workspace()
        )
        own = slice(first, first + len(some))
        tokens.rotate(out, 2, cos[own], sin[own], workspace())
        return out

    together = both(x, 0)
    for row in (0, 1, 299, 599):
        assert torch.equal(both(x[row : row + 1].clone(), row)[0], together[row])
