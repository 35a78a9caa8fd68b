"""Several residual streams: what blocks work on and leave, against transformers' own modules and in
float64, over any number of tokens; and what they cannot be combined with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection, HYV4HyperHead

from freight.model.config import parse_config
from freight.model.contradictions import contradictions
from freight.model.frame import Frame
from freight.model.layers import run_unit
from freight.model.passing import handed_on
from freight.model.programme import Unit, Weight
from freight.model.stream_steps import Average, Collapse, Expand, Spread
from freight.model.workspace import Workspace
from freight.plan.scratch import _unit_bytes

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03}


def vector(name: str, count: int) -> Weight:
    return Weight(
        name=name, out_dims=(), in_dims=("D",), num_rows=1, num_columns=count, is_wide=True
    )


def run(steps: tuple[Any, ...], values: dict[str, torch.Tensor], module: Any, names: str) -> None:
    """The steps on these values, with the weights of a module of transformers."""
    given = {}
    if module is not None:
        owned = {n.removeprefix("hc_"): p.detach() for n, p in module.named_parameters()}
        given = {name: [(0, owned[name].reshape(1, -1))] for name in names.split()}
    scratch = Workspace(torch.empty(64 << 20, dtype=torch.uint8))
    unit = Unit(name="block", kind="mlp", layer=0, steps=steps)
    run_unit(unit, Frame(weights=given, workspace=scratch, values=values))


def collapse(module: Any, shares: str | None, **more: Any) -> Collapse:
    sizes = {n.removeprefix("hc_"): p.numel() for n, p in module.named_parameters()}
    weight, base, scale = (vector(name, sizes[name]) for name in ("fn", "base", "scale"))
    return Collapse(
        x="streams",
        out="x",
        shares=shares,
        weight=weight,
        base=base,
        scale=scale,
        num_streams=module.hc_mult,
        eps=module.input_norm.eps,
        **more,
    )


def randomised(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def beside(streams: torch.Tensor) -> torch.Tensor:
    """As they are among what passes from unit to unit: columns of wider rows."""
    rows = torch.zeros(len(streams), streams.shape[1] + 24, dtype=streams.dtype)
    rows[:, 8:-16] = streams
    return rows[:, 8:-16]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    num_tokens=st.sampled_from([1, 3, 64, 65, 200]),
    count=st.integers(1, 5),
    rounds=st.integers(0, 6),
    width=st.sampled_from([24, 48, 1040]),  # for torch, and for loops in one block or several
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_blocks_are_those_of_transformers(
    seed: int, num_tokens: int, count: int, rounds: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    eps = 1e-3
    mixed = rounds > 0
    if mixed:
        more = {"hc_sinkhorn_iters": rounds, "num_hidden_layers": 2}
        config: Any = DeepseekV4Config(hidden_size=width, hc_mult=count, hc_eps=eps, **more)
        module = randomised(DeepseekV4HyperConnection(config))
        step = collapse(module, "shares", floor=eps, magnitude=2.0, rounds=rounds)
    else:
        config = HYV4Config(hidden_size=width, hc_mult=count, hc_eps=eps, hc_magnitude=1.5)
        module = randomised(HYV4HyperConnection(config))
        step = collapse(module, "shares", floor=eps, magnitude=1.5, least_share=eps)
    streams, update = torch.randn(num_tokens, count * width), torch.randn(num_tokens, width)
    values = {"streams": beside(streams.to(dtype)), "update": update.to(dtype)}
    apart = values["streams"].float().view(1, num_tokens, count, width)
    with torch.no_grad():
        post, *mixes, x = module(apart)
        wanted = post[..., None] * values["update"].float()[:, None]
        wanted = wanted + (mixes[0].transpose(-1, -2) @ apart if mixes else apart)
    run((step,), values, module, "fn base scale")
    torch.testing.assert_close(values["x"].float(), x[0], rtol=0, atol=TOLERANCE[dtype] * count)
    leave = Expand(x="streams", y="update", shares="shares", num_streams=count, mixed=mixed)
    run((leave,), values, None, "")
    found = values["streams"].float().view(num_tokens, count, width)
    torch.testing.assert_close(found, wanted[0], rtol=0.01, atol=TOLERANCE[dtype] * count)


@pytest.mark.parametrize("kind", [DeepseekV4HyperHead, HYV4HyperHead])
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_the_last_sum_is_that_of_transformers(kind: Any, num_tokens: int) -> None:
    torch.manual_seed(1)
    own = HYV4Config if kind is HYV4HyperHead else DeepseekV4Config
    module = randomised(kind(own(hidden_size=24, hc_mult=3, num_hidden_layers=2)))
    streams = torch.randn(num_tokens, 3 * 24)
    values = {"streams": beside(streams)}
    run((collapse(module, None, floor=module.eps),), values, module, "fn base scale")
    with torch.no_grad():
        wanted = module(streams.view(1, num_tokens, 3, 24))[0]
    torch.testing.assert_close(values["x"], wanted, rtol=0, atol=1e-5)


def test_streams_begin_alike_and_have_a_mean() -> None:
    x = torch.randn(70, 8)
    values = {"x": x, "streams": beside(torch.zeros(70, 24))}
    run((Spread(x="x", out="streams", num_streams=3),), values, None, "")
    assert torch.equal(values["streams"], x.repeat(1, 3))
    values["streams"].copy_(torch.randn(70, 24))
    run((Average(x="streams", out="mean", num_streams=3),), values, None, "")
    wanted = values["streams"].reshape(70, 3, 8).mean(1)
    torch.testing.assert_close(values["mean"], wanted)


HY4: dict[str, Any] = {
    "architectures": ["HYV4ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 320,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_place": "both"}, "a norm before them"),
        ({"residual_scale": 0.5}, "not scaled"),
        ({"layer_inputs": 8}, "one after the other"),
        ({"layer_scales": True}, "not scaled"),
        ({"factors": (("mlp.up", 2.0),)}, "not scaled"),
        ({"count": 0}, "0 residual streams"),
        ({"floor": 0.0}, "no numbers above 0"),
        ({"magnitude": float("nan")}, "no numbers above 0"),
        ({"floor": 1e308}, "no numbers above 0"),
        ({"rounds": 10**9}, "mixed in 1000000000 rounds"),
        ({"mlp_limits": (1e308,) * 3}, "a limit of 1e+308"),
    ],
)
def test_what_they_cannot_be_combined_with(changes: dict[str, Any], words: str) -> None:
    config = parse_config(HY4)
    assert config.streams is not None and not contradictions(config)
    own = {name: value for name, value in changes.items() if hasattr(config.streams, name)}
    changes = {"streams": replace(config.streams, **own)} if own else changes
    assert any(words in problem for problem in contradictions(replace(config, **changes)))


def test_what_layers_hand_on() -> None:
    config = parse_config(HY4)
    assert handed_on(config) == (("streams", 4 * 64),)
    assert handed_on(replace(config, streams=None)) == (("x", 64),)


def test_a_limit_of_nothing_is_none() -> None:
    limits = {
        limit: parse_config({**HY4, "swiglu_limit": limit}).experts
        for limit in (0, 0.0, -1.0, 10.0)
    }
    found = {limit: own.limits for limit, own in limits.items() if own is not None}
    assert found == {0: (), -1.0: (), 10.0: (10.0,) * 3}


@pytest.mark.parametrize("num_tokens", [1, 70, 300])
@pytest.mark.parametrize("kind", ["collapse", "expand", "average"])
def test_scratch_is_what_is_planned(kind: str, num_tokens: int) -> None:
    """By torch, which takes more than loops do."""
    width, count = 72, 4
    module = randomised(HYV4HyperConnection(HYV4Config(hidden_size=width, hc_mult=count)))
    steps: dict[str, Any] = {
        "collapse": collapse(module, "shares", floor=1e-6),
        "expand": Expand(x="streams", y="x", shares="shares", num_streams=count, mixed=False),
        "average": Average(x="streams", out="x", num_streams=count),
    }
    carried = {"x": width, "streams": count * width, "shares": count}
    values = {name: torch.randn(num_tokens, size) for name, size in carried.items()}
    owned = {n.removeprefix("hc_"): p.detach() for n, p in module.named_parameters()}
    scratch = Workspace(torch.empty(64 << 20, dtype=torch.uint8))
    unit = Unit(name="block", kind="mlp", layer=0, steps=(steps[kind],))
    given_ = {name: [(0, own.reshape(1, -1))] for name, own in owned.items()}
    run_unit(unit, Frame(weights=given_, workspace=scratch, values=values))
    held = _unit_bytes(unit, 0, carried, 4, lambda _: 0, ())
    told = _unit_bytes(unit, num_tokens, carried, 4, lambda _: 0, ())
    values_bytes = 4 * num_tokens * (sum(carried.values()) + width)
    assert held < 1024 and 0 < scratch.peak_bytes <= told - values_bytes
    assert told - values_bytes < 2 * scratch.peak_bytes + 1024
