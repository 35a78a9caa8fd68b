"""What is counted from the programme, against transformers and against formulas written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from freight.model.config import ModelConfig, parse_config
from freight.model.decoder import build_programme, count_parameters
from freight.model.programme import Programme, Unit

SIZES: dict[str, Any] = {
    "vocab_size": 1500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "wide heads": LlamaConfig(**SIZES, head_dim=48),
    "mistral": MistralConfig(**{**SIZES, "num_key_value_heads": 1}),
    "qwen2": Qwen2Config(**SIZES),
}


def freight_config(config: Any) -> ModelConfig:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    architecture = f"{names[config.model_type]}ForCausalLM"
    return parse_config({**config.to_dict(), "architectures": [architecture]})


def distinct_elements(programme: Programme) -> int:
    """Elements of all weights; the head's chunks share one norm."""
    sizes: Counter[tuple[str, int]] = Counter()
    for unit in programme.units:
        for weight in unit.weights:
            sizes[weight.name, weight.first_row] = weight.num_elements
    return sum(sizes.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(CONFIGS[name]).num_parameters()
    config = freight_config(CONFIGS[name])
    elements = distinct_elements(build_programme(config))
    shared = config.vocab_size * config.hidden_size if config.tied_embeddings else 0
    assert elements - shared == expected == count_parameters(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    num_tokens = 7
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    units = build_programme(freight_config(CONFIGS[name])).units
    projections = sum(unit.matmul_flops(num_tokens) for unit in units)
    # transformers scores every pair, also those that the mask hides
    attention = sum(unit.attention_flops(num_tokens * num_tokens) for unit in units)
    assert counter.get_total_flops() == projections + attention


def test_flops_by_hand() -> None:
    D, F, N, K, H, V = 64, 160, 4, 2, 16, 1500
    units = build_programme(freight_config(CONFIGS["llama"])).units
    embedding, attention, mlp, *_ = units
    assert embedding.matmul_flops(10) == 0
    assert attention.matmul_flops(10) == 2 * 10 * (D * N * H + 2 * D * K * H + N * H * D)
    assert attention.attention_flops(10) == 10 * N * (2 * H + 2 * H)
    assert mlp.matmul_flops(10) == 2 * 10 * 3 * D * F
    assert mlp.attention_flops(10) == 0
    heads = [unit for unit in units if unit.kind == "head"]
    assert sum(unit.matmul_flops(10) for unit in heads) == 2 * 10 * D * V


def test_the_head_comes_in_chunks_no_larger_than_a_layer_s_units() -> None:
    units = build_programme(freight_config(CONFIGS["llama"])).units
    heads = [unit for unit in units if unit.kind == "head"]
    most = max(unit.num_elements for unit in units if unit.kind in ("attention", "mlp"))
    assert len(heads) > 1
    place = 0
    for unit in heads:
        matrix = next(weight for weight in unit.weights if weight.is_matrix)
        assert matrix.first_row == place and matrix.num_elements <= most
        place += matrix.num_rows
    assert place == 1500


def test_order_of_computation() -> None:
    units = build_programme(freight_config(CONFIGS["llama"])).units
    order = [(unit.kind, unit.layer) for unit in units if unit.kind != "head"]
    layers = [(kind, layer) for layer in range(3) for kind in ("attention", "mlp")]
    assert order == [("embedding", None), *layers]


def test_tokens_are_picked_behind_the_last_attention() -> None:
    """The last layer's MLP and the head work on what the head needs; a stage that sends the
    residual stream on, or must not pick, works on all up to its last unit."""
    whole = build_programme(freight_config(CONFIGS["llama"]))
    kinds = [unit.kind for unit in whole.units]
    assert kinds[whole.picks_at :] == ["mlp", *["head"] * kinds.count("head")]
    assert replace(whole, needs_all=True).picks_at == kinds.index("head")
    departure = Unit(name="departure", kind="head", layer=None, steps=())
    units = (*whole.units[: kinds.index("head")], departure)
    assert Programme(units=units, carried=whole.carried).picks_at == len(units) - 1
