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
        ({"slope_span": 8.0, "qkv_blocks": 2}, "sink with the distance"),
        ({"slope_span": 8.0, "attention_gates": "queries"}, "sink with the distance"),
        ({"norm": "rms_minus_one"}, "supported are rms"),
    ],
    ids=str,
)
def test_what_cannot_be_combined(changes: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in contradictions(replace(LLAMA, **changes)))
