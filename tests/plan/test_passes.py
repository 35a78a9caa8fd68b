"""Passes over values: measured ones count where they were measured, gates once for both steps."""

from __future__ import annotations

from typing import Any

import pytest

from freight.model.config import parse_config
from freight.model.decoder import build_programme
from freight.model.programme import Activate, Multiply, Unit, Weigh
from freight.plan.passes import bytes_passed

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def unit_of(kind: str) -> Unit:
    programme = build_programme(parse_config(CONFIG))
    return next(unit for unit in programme.units if unit.kind == kind)


def passed(kind: str, *, gates_apart: bool = False, **measured: float) -> float:
    return sum(bytes_passed(unit_of(kind), 2, measured, gates_apart=gates_apart))


def test_what_was_measured_counts() -> None:
    """An MLP of 64 and 96 numbers: a norm of the one, silu and a product of the other."""
    steps = unit_of("mlp").steps
    assert sum(isinstance(step, Activate | Multiply) for step in steps) == 2
    assert passed("mlp") == 2 * (7.0 * 64 + (4.5 + 3.0) * 96)
    assert passed("mlp", norm=1.0) == 2 * (1.0 * 64 + 7.5 * 96)
    assert passed("mlp", norm=1.0, silu=2.0, gate=0.0) == 2 * 64
    assert passed("mlp", norm=1.0, silu=2.0, gate=0.0, gates_apart=True) == 2 * (64 + 2.0 * 96)


def test_gates_that_no_product_makes() -> None:
    """The scan's output is gated by its input: a pass whatever products take in."""
    config = {
        **CONFIG,
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba"],
        "num_key_value_heads": 4,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "rms_norm_eps": 1e-5,
    }
    programme = build_programme(parse_config(config))
    (unit,) = (unit for unit in programme.units if unit.kind == "recurrence")
    with_gates, without = (
        sum(bytes_passed(unit, 2, {"silu": 4.0, "gate": gate}, gates_apart=False))
        for gate in (4.0, 0.0)
    )
    assert with_gates == without


def test_rotations_of_queries_and_keys() -> None:
    assert passed("attention", norm=0.0) - passed("attention", norm=0.0, rotation=1.0) == (
        pytest.approx(2 * 6.0 * (64 + 64))
    )


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        {"model_type": "bloom", "hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 50},
        {
            **CONFIG,
            "model_type": "mimo_v2_flash",
            "head_dim": 24,
            "v_head_dim": 16,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
        {**CONFIG, "model_type": "deepseek_v3", "num_key_value_heads": 4},
    ],
    ids=["llama", "bloom", "mimo", "kimi"],
)
def test_halves_of_a_unit_pass_over_what_the_whole_does(config: dict[str, Any]) -> None:
    programme = build_programme(parse_config(config))
    (unit,) = (unit for unit in programme.units if unit.kind == "attention")
    of_halves = (bytes_passed(half, 2, {}, gates_apart=False) for half in unit.halves())
    whole = sum(bytes_passed(unit, 2, {}, gates_apart=False))
    assert sum(map(sum, of_halves)) == pytest.approx(whole)
    assert whole > 0


@pytest.mark.parametrize(
    ("family", "named"),
    [("laguna", ["norm", "gates", "out"]), ("qwen3_5_text", ["norm", "q", "out"])],
)
def test_the_second_half_of_a_unit_makes_its_gates_for_itself(
    family: str, named: list[str]
) -> None:
    """With the norm before them; where the matrix of queries makes them, of that."""
    own = {"model_type": family, "layer_types": ["full_attention"], "num_key_value_heads": 2}
    config = {**CONFIG, **own, "head_dim": 24}
    programme = build_programme(parse_config(config))
    (unit,) = (unit for unit in programme.units if unit.kind == "attention")
    first, second = unit.halves()
    weighed = [step for step in second.steps if isinstance(step, Weigh)]
    assert len(weighed) == 1
    passes = [*zip(second.steps, bytes_passed(second, 2, {}, gates_apart=False), strict=True)]
    assert [own for step, own in passes if step is weighed[0]] == [2 * 2.0 * 4 * 24]
    names = [weight.name.removeprefix("layers.0.attention.") for weight in second.weights]
    assert names == named
    assert ("gates" in [weight.name.rpartition(".")[2] for weight in first.weights]) is False
    assert {*first.weights} | {*second.weights} == {*unit.weights}
