"""Triton's norms, rotations and appending of plain keys, against float64 and to the bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.cuda.choice import NO_KERNELS
from freight.kernels.paged import append_rows
from freight.kernels.pages import Pages
from freight.kernels.tokens import normalise, rotate
from freight.model.workspace import Workspace

from .triton_bed import DEVICE, EXAMPLES, in_use, loaded

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
dtypes = st.sampled_from([*TOLERANCES])


def no_room() -> Workspace:
    """A kernel takes nothing from it."""
    return Workspace(torch.empty(0, dtype=torch.uint8, device=DEVICE))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same on the device, with something between rows, which must stay."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), 7.0, dtype=x.dtype, device=DEVICE)
    wide[:, : x.shape[1]] = x.to(DEVICE)
    return wide[:, : x.shape[1]]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 7, 64, 128, 129, 1024, 1500]),
    dtype=dtypes,
    centred=st.booleans(),
    adds_one=st.booleans(),
    has_bias=st.booleans(),
    is_own=st.booleans(),
    is_in_place=st.booleans(),
)
def test_norms(
    tokens: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    centred: bool,
    adds_one: bool,
    has_bias: bool,
    is_own: bool,
    is_in_place: bool,
) -> None:
    """``is_own``: each head has a gain of its own."""
    dice = torch.Generator().manual_seed(width)
    x = (torch.randn(tokens, heads * width, generator=dice) + 0.5).to(dtype)
    gain = torch.randn(heads * width if is_own else width, generator=dice).to(dtype)
    bias = torch.randn(width, generator=dice).to(dtype) if has_bias else None
    wide = x.double().view(tokens, heads, width)
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    wide = wide * (gain.double() + adds_one).view(-1, width)
    if bias is not None:
        wide = wide + bias.double()
    own = apart(x)
    out = own if is_in_place else apart(torch.zeros_like(x))
    with in_use(loaded()):
        normalise(
            own,
            out,
            gain.to(DEVICE),
            None if bias is None else bias.to(DEVICE),
            num_heads=heads,
            eps=1e-5,
            centred=centred,
            adds_one=adds_one,
            workspace=no_room(),
        )
    wanted = wide.view(tokens, -1)
    largest = max(1.0, float(wanted.abs().max()))
    assert (out.cpu().double() - wanted).abs().max() <= TOLERANCES[dtype] * largest
    whole = out.as_strided((tokens, heads * width + 5), (heads * width + 5, 1))
    assert (whole[:, -5:] == 7.0).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tokens=st.integers(1, 4),
    heads=st.integers(1, 20),
    half=st.sampled_from([1, 8, 33, 64, 70]),
    beyond=st.integers(0, 3),
    pairs=st.booleans(),
    dtype=dtypes,
)
def test_rotations(
    tokens: int, heads: int, half: int, beyond: int, pairs: bool, dtype: torch.dtype
) -> None:
    """Of each head as many numbers as are turned, and some beyond that stay."""
    dice = torch.Generator().manual_seed(heads)
    width = 2 * half + beyond
    x = torch.randn(tokens, heads * width, generator=dice).to(dtype)
    angles = torch.randn(tokens, half, generator=dice)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = x.double().view(tokens, heads, width).clone()
    low, high = (
        (wanted[..., : 2 * half : 2], wanted[..., 1 : 2 * half : 2])
        if pairs
        else (wanted[..., :half], wanted[..., half : 2 * half])
    )
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = low * c - high * s, high * c + low * s
    low.copy_(turned[0])
    high.copy_(turned[1])
    own = apart(x)
    with in_use(loaded()):
        rotate(own, heads, apart(cos), apart(sin), no_room(), pairs=pairs)
    found = own.cpu().double().view(tokens, heads, width)
    assert (found - wanted).abs().max() <= 4 * TOLERANCES[dtype]
    assert torch.equal(found[..., 2 * half :], wanted[..., 2 * half :])


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=1, unique=True),
    heads=st.integers(1, 11),
    width=st.sampled_from([1, 24, 128, 200]),
    dtype=dtypes,
)
def test_plain_keys_are_put_where_torch_puts_them(
    places: list[tuple[int, int]], heads: int, width: int, dtype: torch.dtype
) -> None:
    dice = torch.Generator().manual_seed(width)
    both = torch.randn(len(places), 3 * heads, width, generator=dice).to(DEVICE, dtype)
    k, v = both[:, :heads], both[:, 2 * heads :]
    size = 2 * heads * 8 * width * dtype.itemsize
    ids = torch.tensor(places, device=DEVICE).t().contiguous()
    found = []
    for kernels in (loaded(), NO_KERNELS):
        # A page has more bytes than it uses.
        raw = torch.zeros(7, size + 16, dtype=torch.uint8, device=DEVICE)
        pages = Pages(raw=raw, num_heads=heads, page_tokens=8, width=width, dtype=dtype)
        with in_use(kernels):
            append_rows(pages, ids[0], ids[1], k, v)
        found.append(raw)
    assert torch.equal(*found)


def test_columns_that_lie_apart_are_left_to_torch() -> None:
    x = torch.randn(6, 4, device=DEVICE).t()
    assert not loaded().rotate(x, 1, x, x, pairs=False)  # type: ignore[misc]
    assert not loaded().normalise(  # type: ignore[misc]
        x, x, x[0], None, num_heads=1, eps=1e-5, centred=False, adds_one=False
    )
