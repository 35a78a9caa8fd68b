"""Experts that are computed together do what each of them does alone: bit by bit where the same
loops multiply.

The oracle is the same engine with every expert alone, which other tests hold against transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from freight.kernels import few_pairs, pairs, products
from freight.kernels.cuda.choice import NO_KERNELS, load_kernels, use_kernels
from freight.kernels.device_rows import DeviceRows
from freight.kernels.few_pairs import SeveralRows
from freight.kernels.threads import find_loops
from freight.model.expert_rows import combine
from freight.model.expert_steps import Combine
from freight.model.frame import Frame, Together
from freight.model.workspace import Workspace
from freight.plan.sweep import StreamModel
from freight.runtime.expert_work import ExpertWork, _rounds

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


def logits(
    directory: Path, options: dict[str, Any], prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[torch.Tensor]:
    """Of all tokens of all rows, in order."""
    with tiny.engine(directory, prompts, STEPS, **{**IN_MEMORY, **options}) as engine:
        captured = tiny.capture_logits(engine)
        tiny.run(engine, prompts, STEPS)
    return [captured[place] for place in sorted(captured)]


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = StreamModel.groups

    def alone(self: StreamModel, layer: int, chosen: Collection[int]) -> list[tuple[int, ...]]:
        return [(unit,) for group in groups(self, layer, chosen) for unit in group]

    monkeypatch.setattr(StreamModel, "groups", alone)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations_percent": (0.0, 43.0, 57.0), "micro_batch_size": 3},  # tokens in two places
        {"device": "sim", "weights_percent": (100.0, 0.0, 0.0), "micro_batch_size": 2},
        {"device": "sim", "weights_percent": (0.0, 100.0, 0.0), "micro_batch_size": 4},
        {"device": "sim", "weights_percent": (30.0, 40.0, 30.0)},
        {"weights_percent": (0.0, 55.0, 45.0)},
        {"weight_bits": 4},
        {"compute": "int8"},
    ],
    ids=lambda own: " ".join(map(str, own.values())) or "in memory",
)
def test_together_as_alone(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, in float32; also where experts come through the ring."""
    tiny.make_model(tmp_path, config=CONFIGS[name])
    counts: list[int] = []
    together = ExpertWork._together

    def counted(self: ExpertWork, *arguments: Any) -> None:
        counts.append(len(arguments[3].names))
        assert len(arguments[3].tokens) <= self._chunk_tokens  # what there is scratch for
        together(self, *arguments)

    monkeypatch.setattr(ExpertWork, "_together", counted)
    found = logits(tmp_path, options)
    assert counts and max(counts) > 1
    counts.clear()
    one_by_one(monkeypatch)
    alone = logits(tmp_path, options)
    assert not counts
    assert len(found) == len(alone) == STEPS * len(PROMPTS)
    assert all(torch.equal(*own) for own in zip(found, alone, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_bits": 4},
        {"weight_bits": 8},
        {"weights_percent": (0.0, 55.0, 45.0)},  # cut in a matrix that the next one gates
        {"device": "sim", "weights_percent": (20.0, 80.0, 0.0)},
        {"weights_percent": (0.0, 55.0, 45.0), "weight_bits": 4},
    ],
    ids=str,
)
def test_by_tables_of_loops(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where tables tell loops what to multiply: few tokens, and more of plain rows."""
    if (loops := find_loops()) is None or loops.few_pairs is None or loops.tiles is not None:
        pytest.skip("other loops multiply here")
    for module in (pairs, products):
        monkeypatch.setattr(module, "LEAST_PRODUCTS", 1)
    monkeypatch.setattr(pairs, "_times", lambda tokens: (9.0, 1.0, 2.0))  # as rows come, if few
    monkeypatch.setattr(few_pairs, "LEAST_SHARED_OF_FEW", 1)
    config = CONFIGS[name].to_dict() | {"hidden_size": 128}
    tiny.make_model(tmp_path, config=type(CONFIGS[name])(**config), dtype=torch.bfloat16)
    called: list[tuple[int, int, bool]] = []
    multiply = SeveralRows.multiply

    def counted(self: SeveralRows, *arguments: Any, are_few: bool) -> None:
        called.append((len(arguments[1]), int(arguments[3].max()), are_few))
        multiply(self, *arguments, are_few=are_few)

    monkeypatch.setattr(SeveralRows, "multiply", counted)
    given = {"dtype": "bfloat16", **options}
    prompts = tiny.prompts(5, 24)
    found = logits(tmp_path, given, prompts)
    assert max(most for _, most, are_few in called if are_few) > 1 < max(n for n, _, _ in called)
    are_plain = "weight_bits" not in options
    assert any(count > 1 and not are_few for count, _, are_few in called) == are_plain
    called.clear()
    one_by_one(monkeypatch)
    alone = logits(tmp_path, given, prompts)
    assert all(count == 1 for count, *_ in called)  # when it was compiled
    assert all(torch.equal(*own) for own in zip(found, alone, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("percent", [(100.0, 0.0, 0.0), (20.0, 80.0, 0.0)])
def test_by_one_launch_on_a_device(
    name: str, percent: tuple[float, float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernel in its interpreter: with and without it logits are the same, and it takes the
    products of several experts, also where these lie in parts."""
    pytest.importorskip("triton", reason="triton is not installed")
    kernels = load_kernels()
    assert kernels is not None
    tiny.make_model(tmp_path, config=CONFIGS[name])
    given = {"device": "sim", "weights_percent": percent}
    expected = logits(tmp_path, given)
    called: list[tuple[int, int]] = []
    multiply = DeviceRows.multiply

    def counted(self: DeviceRows, *arguments: Any) -> None:
        called.append((len(arguments[1]), int(arguments[3].max())))
        multiply(self, *arguments)

    monkeypatch.setattr(DeviceRows, "multiply", counted)
    cpu = torch.device("cpu")
    use_kernels(cpu, replace(NO_KERNELS, multiply_sets=kernels.multiply_sets))
    try:
        found = logits(tmp_path, given)
    finally:
        use_kernels(cpu, NO_KERNELS)
    assert max(count for count, _ in called) > 1 and max(most for _, most in called) > 1
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


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
    parts = [torch.from_numpy(order[some]) for some in rounds]
    nothing = np.empty(0, np.int64)
    together = Together(
        weights=(),
        find_rows=lambda steps, gates=False: None,
        numbers=nothing,
        firsts=nothing,
        counts=nothing,
        rounds=[(places, torch.from_numpy(tokens)[places]) for places in parts],
    )
    frame = Frame(
        weights={},
        workspace=Workspace(torch.empty(0, dtype=torch.uint8)),
        values={"x": x, "y": update},
        chosen=torch.from_numpy(tokens),
        shares=torch.ones(6, dtype=x.dtype),
        together=together,
    )
    combine(Combine(x="x", y="y"), frame)
    assert torch.equal(x, expected)
