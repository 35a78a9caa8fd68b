"""Models whose layers are one part each, as they were published, and what is refused of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freight.errors import ModelError
from freight.model.config import parse_config
from freight.model.contradictions import contradictions
from freight.model.decoder import count_parameters

PATTERNS = {
    "8B": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "9B": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "30B": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_key_value_heads": 8,
    "residual_in_fp32": False,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131_072,
}
NEMOTRON_H_8B: dict[str, Any] = {
    **NEMOTRON_H,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": PATTERNS["8B"],
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "mamba_head_dim": 64,
}


@pytest.mark.parametrize(
    ("raw", "parameters", "num_attending"),
    [
        (NEMOTRON_H_8B, 8_100_852_736, 4),
        (
            {
                **NEMOTRON_H,
                "hidden_size": 4480,
                "intermediate_size": 15_680,
                "num_hidden_layers": 56,
                "hybrid_override_pattern": PATTERNS["9B"],
                "num_attention_heads": 40,
                "head_dim": 128,
                "mamba_head_dim": 80,
            },
            8_888_227_328,
            4,
        ),
        (
            {
                **NEMOTRON_H,
                "hidden_size": 2688,
                "intermediate_size": 1856,
                "num_hidden_layers": 52,
                "hybrid_override_pattern": PATTERNS["30B"],
                "num_attention_heads": 32,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
                "n_routed_experts": 128,
                "num_experts_per_tok": 6,
                "n_shared_experts": 1,
                "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712,
                "routed_scaling_factor": 2.5,
            },
            31_577_940_288,
            6,
        ),
    ],
    ids=["nemotron-h-8b", "nemotron-nano-9b-v2", "nemotron-3-nano-30b-a3b"],
)
def test_numbers_of_parameters_are_those_published(
    raw: dict[str, Any], parameters: int, num_attending: int
) -> None:
    config = parse_config(raw)
    assert count_parameters(config) == parameters
    assert config.num_attention_layers == num_attending
    assert config.num_recurrent_layers == raw["hybrid_override_pattern"].count("M")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hybrid_override_pattern": "M-|"}, "must list linear_attention"),
        ({"hybrid_override_pattern": "M-*"}, "3 of 52 layers"),
        ({"hybrid_override_pattern": None}, "layer_types is None"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit is"),
        ({"time_step_limit": [0.001, float("inf")]}, "time_step_limit is"),
        (
            {
                "hybrid_override_pattern": "ME" * 26,
                "moe_latent_size": 1024,
                "moe_shared_expert_intermediate_size": 0,
            },
            "an MLP beside them",
        ),
        ({"use_bias": True}, "use_bias is True"),
        ({"residual_in_fp32": True}, "residual_in_fp32 is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
    ],
)
def test_layers_of_one_part_that_are_not_known_are_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**NEMOTRON_H_8B, **change})


def test_parts_of_layers_by_letters_and_by_names() -> None:
    raw = {**NEMOTRON_H_8B, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*-"}
    del raw["time_step_limit"]
    found = parse_config(raw)
    assert found.parts == ("mixer", "mlp", "mixer", "mlp")
    assert [found.attends(layer) for layer in range(4)] == [False, False, True, False]
    assert [found.keeps_state(layer) for layer in range(4)] == [True, False, False, False]
    assert [found.has_experts(layer) for layer in range(4)] == [False, True, False, False]
    for kinds in (
        ["mamba", "moe", "attention", "mlp"],
        ["linear_attention", "moe", "full_attention", "mlp"],
    ):
        named = {**raw, "hybrid_override_pattern": None, "layers_block_type": kinds}
        unbounded = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
        assert parse_config({**named, "num_hidden_layers": None, **unbounded}) == found


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (("mixer", "mlp", "mixer"), "3 of 4 layers"),
        (("mixer", "mlp", "mixer", "none"), "each must be both, mixer or mlp"),
        (("mlp", "mlp", "mixer", "mlp"), "its mlp, is said to have"),
        (("mixer", "mixer", "mixer", "mlp"), "its mixer, is said to have"),
    ],
)
def test_parts_that_layers_cannot_have_are_refused(parts: tuple[str, ...], words: str) -> None:
    raw = {**NEMOTRON_H_8B, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*-"}
    problems = contradictions(replace(parse_config(raw), parts=parts))
    assert any(words in problem for problem in problems)
