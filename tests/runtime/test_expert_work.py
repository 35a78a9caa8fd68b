"""Experts that are computed together do what each of them does alone.

The oracle is the same engine with every expert alone, which other tests hold against transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from freight.runtime.expert_work import ExpertWork, _rounds
from freight.runtime.weights import WeightStore

from . import tiny

CONFIGS: dict[str, PretrainedConfig] = {
    # What each expert makes is gated at once, has biases and limits, or goes with the others'.
    "gated": Qwen3MoeConfig(
        **tiny.SIZES, head_dim=16, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64
    ),
    "biased": GptOssConfig(
        **tiny.SIZES, head_dim=16, num_local_experts=8, num_experts_per_tok=3, sliding_window=32
    ),
    "few": MixtralConfig(**tiny.SIZES, num_local_experts=4, num_experts_per_tok=2),
}
IN_MEMORY: dict[str, Any] = {"device": "cpu", "weights_percent": (0.0, 100.0, 0.0)}
PROMPTS = tiny.prompts(7, 14)
STEPS = 5


def logits(directory: Path, options: dict[str, Any]) -> list[torch.Tensor]:
    """Of all tokens of all rows, in order."""
    with tiny.engine(directory, PROMPTS, STEPS, **{**IN_MEMORY, **options}) as engine:
        captured = tiny.capture_logits(engine)
        tiny.run(engine, PROMPTS, STEPS)
    return [captured[place] for place in sorted(captured)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations_percent": (0.0, 43.0, 57.0), "micro_batch_size": 3},  # tokens in two places
        {"device": "sim", "weights_percent": (100.0, 0.0, 0.0), "micro_batch_size": 2},
        {"weight_bits": 4},
        {"compute": "int8"},
    ],
    ids=lambda own: " ".join(own) or "in memory",
)
@pytest.mark.parametrize("every", [1, 3])
def test_together_as_alone(
    name: str, options: dict[str, Any], every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, in float32; also where one of so many units is taken for one that does not
    stay."""
    tiny.make_model(tmp_path, config=CONFIGS[name])
    counts: list[int] = []
    together = ExpertWork._together

    def counted(self: ExpertWork, *arguments: Any) -> None:
        counts.append(len(arguments[2].names))
        together(self, *arguments)

    monkeypatch.setattr(ExpertWork, "_together", counted)
    stays = WeightStore.stays
    if every > 1:
        patched = lambda self, unit: unit % every > 0 and stays(self, unit)  # noqa: E731
        monkeypatch.setattr(WeightStore, "stays", patched)
    found = logits(tmp_path, options)
    assert counts and max(counts) > 1
    counts.clear()
    monkeypatch.setattr(WeightStore, "stays", lambda self, unit: False)
    alone = logits(tmp_path, options)
    assert not counts
    assert len(found) == len(alone) == STEPS * len(PROMPTS)
    assert all(torch.equal(*own) for own in zip(found, alone, strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_rounds_have_a_token_once_and_in_order(tokens: list[int]) -> None:
    """All choices, each token's in their order, in as few rounds as there can be."""
    own = np.array(tokens, np.int64)
    order, rounds = _rounds(own)
    assert sorted(order.tolist()) == list(range(len(tokens)))
    assert [i for some in rounds for i in range(len(tokens))[some]] == list(range(len(tokens)))
    had = [[place for place in order[some]] for some in rounds]
    for places in had:
        assert (np.diff(own[places]) > 0).all()
    for token in set(tokens):
        assert [p for places in had for p in places if own[p] == token] == [
            place for place, other in enumerate(tokens) if other == token
        ]
    assert len(rounds) == max(tokens.count(token) for token in tokens)


def test_updates_of_many_experts_are_added_in_their_order() -> None:
    """As one after the other adds and rounds them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8, generator=generator).bfloat16()
    tokens = np.array([0, 2, 0, 1, 2, 0], np.int64)
    update = (100 * torch.randn(6, 8, generator=generator)).bfloat16()
    expected = x.clone()
    for place, token in enumerate(tokens):
        expected[token] += update[place]
    order, rounds = _rounds(tokens)
    for some in rounds:
        places = torch.from_numpy(order[some])
        x.index_add_(0, torch.from_numpy(tokens[order[some]]), update[places])
    assert torch.equal(x, expected)
