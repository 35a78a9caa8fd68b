"""Integer products: the answers are those of a model whose linear layers are a numpy formula.

Held against transformers in float32, each ``nn.Linear`` replaced by codes, exact sums and scales;
under every kind of policy alike, for an approximation must not depend on where bytes lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, OPTConfig, PretrainedConfig, PreTrainedModel

from freight.errors import InputError
from freight.runtime import device
from freight.runtime.engine import Engine

from . import tiny
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 8
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is fast at it, also while another process keeps this one busy."""
    monkeypatch.setattr(device, "computes_int8", lambda dtype: True)


def codes_and_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(x / np.where(scale > 0, scale, 1)).astype(np.int32)
    return codes, scale


class Integers(torch.nn.Module):
    """A linear layer whose product is one of integers."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.codes, self.scales = codes_and_scales(plain.weight.detach().numpy())
        self.bias = None if plain.bias is None else plain.bias.detach().numpy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).numpy()
        codes, scales = codes_and_scales(rows)
        y = (codes @ self.codes.T).astype(np.float32) * scales * self.scales.T
        y = y if self.bias is None else y + self.bias
        return torch.from_numpy(y).view(*x.shape[:-1], -1)


def in_integers(model: PreTrainedModel) -> PreTrainedModel:
    """Every linear layer but a head that shares the table that rows are looked up in."""
    is_tied = model.config.tie_word_embeddings
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and not (is_tied and name == "lm_head"):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Integers(module))
    return model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("integers")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    model = in_integers(tiny.make_model(model_dir, **SIZES))
    return tiny.tokens(tiny.reference(model, PROMPTS, STEPS))


@pytest.mark.parametrize("name", [n for n in POLICIES if "slow" not in n])
def test_same_tokens_under_every_policy(
    name: str, model_dir: Path, expected: list[list[int]]
) -> None:
    options = {**POLICIES[name], "compute": "int8", "compressed_dir": model_dir / "kept"}
    with tiny.engine(model_dir, PROMPTS, STEPS, **options) as engine:
        assert engine.plan.layout.compressed
        assert tiny.run(engine, PROMPTS, STEPS) == expected


def test_they_are_not_those_of_plain_products(
    model_dir: Path, expected: list[list[int]]
) -> None:
    with tiny.engine(model_dir, PROMPTS, STEPS, **tiny.ON_CPU) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) != expected
