"""Rotary frequencies of every kind and length, against transformers' rotary embedding."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from freight.errors import ModelError
from freight.model.config import parse_config
from freight.model.rope import inverse_frequencies
from freight.model.rope_config import RopeConfig, RopeKind, depends_on_length

MAX_POSITIONS = 128
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": MAX_POSITIONS,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(16)],
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, other base": {"rope_theta": 1e6},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "dynamic, other base": {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn, long": {"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}},
    "yarn, no growth": {"rope_scaling": {**YARN, "factor": 1.0}},
    "yarn, factor null": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2}},
    "yarn, equal betas": {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 1}},
    "yarn, no truncation": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 0.75}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "longrope": {"rope_scaling": LONG},
    "longrope, factor": {"rope_scaling": {**LONG, "factor": 8.0}},
    "longrope, no growth": {"rope_scaling": {**LONG, "factor": 1.0}},
    "longrope, attention factor": {"rope_scaling": {**LONG, "attention_factor": 1.5}},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3, equal factors": {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
    "llama3, long": {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
    },
}


@pytest.mark.parametrize("seq_len", [1, 31, 32, 33, 100, 128, 129, 300, 1000])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_frequencies_equal_those_of_transformers(kind: dict[str, Any], seq_len: int) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **copy.deepcopy(kind)))
    position_ids = torch.arange(seq_len)[None]
    cos, sin = theirs(torch.empty(0, dtype=torch.float32), position_ids)

    config = parse_config({"architectures": ["LlamaForCausalLM"], **SIZES, **kind})
    ours, scaling = inverse_frequencies(config.ropes[0], seq_len, config.max_positions)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=2e-7, atol=0)
    assert scaling == pytest.approx(theirs.attention_scaling, rel=1e-12)
    angles = torch.arange(seq_len)[:, None] * ours
    torch.testing.assert_close(angles.cos() * scaling, cos[0, :, :16], rtol=0, atol=1e-4)
    torch.testing.assert_close(angles.sin() * scaling, sin[0, :, :16], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_length_matters_exactly_where_it_is_said_to(kind: dict[str, Any]) -> None:
    config = parse_config({"architectures": ["LlamaForCausalLM"], **SIZES, **kind})
    short, _ = inverse_frequencies(config.ropes[0], 8, config.max_positions)
    long, _ = inverse_frequencies(config.ropes[0], 4096, config.max_positions)
    assert depends_on_length(config.ropes[0]) == (not torch.equal(short, long))


NUMBERS = ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
NUMBERS_TOO = ("attention_factor", "mscale", "mscale_all_dim")
ODD = st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1e9, 1e300, float("inf"), float("nan"), -1.0])


@given(
    kind=st.sampled_from(get_args(RopeKind)),
    changes=st.dictionaries(st.sampled_from([*NUMBERS, *NUMBERS_TOO]), ODD | st.floats()),
    length=st.integers(-1, 64) | st.just(10**30),
    stretch=st.none() | ODD,
)
@example(kind="yarn", changes={"factor": 0.0}, length=32, stretch=None)
@example(kind="yarn", changes={"theta": 1.0}, length=32, stretch=None)
@example(kind="longrope", changes={}, length=1, stretch=None)
@example(kind="longrope", changes={}, length=32, stretch=0.0)
@example(kind="dynamic", changes={"factor": 1e9}, length=32, stretch=None)
@settings(max_examples=200, deadline=None)
def test_any_numbers_are_refused_or_turn_heads(
    kind: RopeKind, changes: dict[str, float], length: int, stretch: float | None
) -> None:
    own = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    waves = (1.0, 1.0 if stretch is None else stretch, 2.0, 3.0) if kind == "longrope" else ()
    fields: dict[str, Any] = {**own, **changes, "short_factor": waves, "long_factor": waves}
    try:
        rope = RopeConfig(rotary_dim=8, kind=kind, original_max_positions=length, **fields)
    except ModelError:
        return
    for seq_len in (1, 1000):
        frequencies, scaling = inverse_frequencies(rope, seq_len, MAX_POSITIONS)
        assert torch.isfinite(frequencies).all()
        assert 0 < scaling < float("inf")


@pytest.mark.parametrize("share", [1e300, -1.0, 1e7, float("nan")])
def test_what_no_latents_were_scaled_by_is_refused(share: float) -> None:
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": share}
    latents = {"architectures": ["DeepseekV3ForCausalLM"], "rope_scaling": rope}
    with pytest.raises(ModelError, match="mscale_all_dim"):
        parse_config({**SIZES, **latents})
