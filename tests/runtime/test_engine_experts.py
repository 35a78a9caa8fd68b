"""Experts are load units of their own: brought once per sweep for the whole block, if chosen.

The oracle is the router of transformers, run row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from freight.plan.parts import Piece
from freight.runtime.engine import Engine

from . import tiny

STEPS = 6
PROMPTS = tiny.prompts(5, 9)
CONFIGS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**tiny.SIZES, num_local_experts=6, num_experts_per_tok=1),
    "qwen3-moe": Qwen3MoeConfig(
        **tiny.SIZES,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        mlp_only_layers=[1],
    ),
}
ON_DISK: dict[str, Any] = {
    "device": "cpu",
    "weights_percent": (0.0, 0.0, 100.0),
    "micro_batch_size": 2,
    "num_micro_batches": 2,
}
ON_SIM: dict[str, Any] = {
    **ON_DISK,
    "device": "sim",
    "weights_percent": (10.0, 40.0, 50.0),
    "cpu_attention_percent": 50.0,
}


def chosen_experts(model: PreTrainedModel, prompt: Sequence[int]) -> list[dict[int, set[int]]]:
    """Per step: layer -> experts that the row's new tokens chose, in the last layer its last one,
    behind which none is attended."""
    last_layer = len(model.model.layers) - 1
    steps: list[dict[int, set[int]]] = []
    current: dict[int, set[int]] = {}
    hooks = []
    for layer, block in enumerate(model.model.layers):
        for module in block.modules():
            if type(module).__name__.endswith("TopKRouter"):
                hooks.append(
                    module.register_forward_hook(
                        lambda _m, _i, out, layer=layer: current.update(
                            {layer: set(out[2][-(layer == last_layer) :].flatten().tolist())}
                        )
                    )
                )
    cache, pending = None, list(prompt)
    for _ in range(STEPS):
        current.clear()
        with torch.inference_mode():
            out = model(torch.tensor([pending]), past_key_values=cache, use_cache=True)
        cache, pending = out.past_key_values, [int(out.logits[0, -1].argmax())]
        steps.append({layer: set(experts) for layer, experts in current.items()})
    for hook in hooks:
        hook.remove()
    return steps


def count_brought(engine: Engine) -> dict[str, int]:
    """Counts the weights that come during sweeps, by the tier that they come from."""
    store = engine.placement.weights
    brought = {"disk": 0, "cpu": 0}
    read, read_into_slots = store.read, store.read_into_slots
    host_stretch = store.host_stretch

    def count_read(piece: Piece, into: torch.Tensor) -> None:
        brought["disk"] += piece.logical_bytes
        read(piece, into)

    def count_reads(pieces: Sequence[tuple[Piece, int]]) -> None:
        if len(pieces) > 1:  # one is read as any other
            brought["disk"] += sum(piece.logical_bytes for piece, _ in pieces)
        read_into_slots(pieces)

    def count_stretch(unit: int, piece: Piece) -> torch.Tensor:
        brought["cpu"] += piece.logical_bytes
        return host_stretch(unit, piece)

    store.read, store.host_stretch = count_read, count_stretch  # type: ignore[method-assign]
    store.read_into_slots = count_reads  # type: ignore[method-assign]
    return brought


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("options", [ON_DISK, ON_SIM], ids=["cpu", "sim"])
def test_only_chosen_experts_are_brought_and_once(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.make_model(tmp_path, config=CONFIGS[name])
    choices = [chosen_experts(model, prompt) for prompt in PROMPTS]
    block = options["micro_batch_size"] * options["num_micro_batches"]
    with tiny.engine(tmp_path, PROMPTS, STEPS, **options) as engine:
        brought = count_brought(engine)
        answers = tiny.run(engine, PROMPTS, STEPS)
        layout = engine.plan.layout
    assert answers == tiny.tokens(tiny.reference(model, PROMPTS, STEPS))

    expected = {"disk": 0, "cpu": 0}
    most = {"disk": 0, "cpu": 0}
    for first in range(0, len(PROMPTS), block):
        for step in range(STEPS):
            for unit in layout.units:
                rows = [choices[row][step] for row in range(len(PROMPTS))[first : first + block]]
                needed = unit.unit.expert is None or any(
                    unit.unit.expert in row[unit.unit.layer] for row in rows
                )
                for piece in unit.pieces:
                    expected[piece.tier] += piece.logical_bytes * needed
                    most[piece.tier] += piece.logical_bytes
    assert brought == expected
    assert expected["disk"] < most["disk"]
