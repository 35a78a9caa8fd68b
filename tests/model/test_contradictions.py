"""Switches that no family combines are refused rather than computed as something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freight.model.config import parse_config
from freight.model.contradictions import contradictions

LLAMA = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
)


def test_a_model_without_contradictions() -> None:
    assert contradictions(LLAMA) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"attention_gates": "queries", "fused_qkv": True},
            "gates of what is attended are not stacked",
        ),
        (
            {"attention_gates": "queries", "qkv_blocks": 2},
            "gates of what is attended are not stacked",
        ),
        ({"parallel": True, "residual_scale": 0.5}, "parts side by side"),
        ({"parallel": True, "norm_place": "both"}, "parts side by side"),
        ({"norm_place": "experts"}, "norms are to be of what experts make"),
        ({"slope_span": 8.0, "qkv_blocks": 2}, "sink with the distance"),
        ({"slope_span": 8.0, "attention_gates": "queries"}, "sink with the distance"),
        ({"attention_gates": "both"}, "attention_gates is 'both', supported are none, queries"),
        ({"gate_function": "tanh"}, "gate_function is 'tanh', supported are sigmoid"),
        ({"mlp_limits": (0.2, None)}, "gates have a limit of 0.2, it must be 0.3 or more"),
        ({"mlp_limits": (7.0,)}, "1 limits of gates are given for 2 layers"),
        ({"mlp_limits": (7.0, None), "gate_limit": 7.0}, "limits by layer, and one for all"),
        ({"norm": "rms_minus_one"}, "supported are rms"),
    ],
    ids=str,
)
def test_what_cannot_be_combined(changes: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in contradictions(replace(LLAMA, **changes)))


def test_over_latents_gates_are_apart_from_queries() -> None:
    raw = {"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128}
    raw |= {"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    latents = parse_config(raw)
    for gates in ("heads", "apart"):
        assert contradictions(replace(latents, attention_gates=gates)) == []
    (problem,) = contradictions(replace(latents, attention_gates="queries"))
    assert "over latents has gates apart from queries" in problem
