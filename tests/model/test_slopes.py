"""Scores that sink with the distance: columns of queries and keys against ALiBi's own numbers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from freight.errors import InputError
from freight.model.approximation import approximate
from freight.model.config import parse_config
from freight.model.frame import Frame
from freight.model.slope_steps import Narrow, Widen, slopes_of
from freight.model.slopes import narrow, widen
from freight.model.workspace import Workspace

TOKENS, WIDTH = 3000, 8


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 112])
def test_slopes_are_those_of_bloom_and_mpt(num_heads: int) -> None:
    own = torch.tensor(slopes_of(num_heads, 8.0))
    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)
    torch.testing.assert_close(own, theirs[:, 0, 1])
    torch.testing.assert_close(own, -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_columns_hold_slopes_and_positions(dtype: torch.dtype) -> None:
    """A score is what it was, and the slope times the distance; what is added to all is free."""
    torch.manual_seed(0)
    heads, scale = 6, WIDTH**-0.5
    values = {name: torch.randn(TOKENS, heads * WIDTH).to(dtype) for name in "qkv"}
    given = {name: value.clone() for name, value in values.items()}
    frame = Frame(
        weights={},
        workspace=Workspace(torch.empty(1 << 24, dtype=torch.uint8)),
        values=values,
        positions=torch.arange(TOKENS),
    )
    for role in ("q", "k", "v"):
        step = Widen(x=role, out=role * 2, num_heads=heads, role=role, span=8.0, scale=scale)
        widen(step, frame)
    last, keys = (values[name].view(TOKENS, heads, -1).double() for name in ("qq", "kk"))
    scores = torch.einsum("nh,tnh->nt", last[-1], keys) * scale
    plain = (given[name].view(TOKENS, heads, WIDTH).double() for name in "qk")
    wanted = torch.einsum("nh,tnh->nt", next(plain)[-1], next(plain)) * scale
    slopes = torch.tensor(slopes_of(heads, 8.0), dtype=torch.float64)[:, None]
    wanted += slopes * (torch.arange(TOKENS) - TOKENS + 1)
    off = scores - wanted
    torch.testing.assert_close(off, off[:, -1:].expand_as(off), rtol=0, atol=0.02)
    narrow(Narrow(x="vv", out="back", num_heads=heads), frame)
    assert torch.equal(values["back"], given["v"])


def test_narrow_values_have_zeros_behind_them() -> None:
    values = {"v": torch.randn(5, 2 * WIDTH)}
    room = torch.full((1 << 12,), 255, dtype=torch.uint8)
    frame = Frame(weights={}, workspace=Workspace(room), values=values)
    widen(Widen(x="v", out="wide", num_heads=2, role="v", columns=4), frame)
    wide = values["wide"].view(5, 2, WIDTH + 4)
    assert torch.equal(wide[..., :WIDTH], values["v"].view(5, 2, WIDTH))
    assert not wide[..., WIDTH:].any()
    narrow(Narrow(x="wide", out="back", num_heads=2, columns=4), frame)
    assert torch.equal(values["back"], values["v"])


def test_keys_that_carry_positions_are_not_compressed() -> None:
    raw = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}
    config = parse_config(raw)
    assert (config.head_dim, config.projected_width) == (24, 16)
    with pytest.raises(InputError, match="carry their positions"):
        approximate(config, kv_bits=4)
