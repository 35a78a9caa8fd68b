"""Rows answered over ranks: what the engine on one machine answers, with every way of sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freight.distributed.tensor.engine import TensorEngine
from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.switch import Switch, pinned
from freight.distributed.tensor.virtual import VirtualRanks
from freight.errors import InputError
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.runtime.params import SamplingParams
from freight.runtime.request import Completion

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS
from .processes import run_ranks

WAYS = (Cut(batch="yx"), Cut(gathered="xyz"))
SWITCH = Switch((8,), WAYS)


def engine_of(directory: Path, prompts: list[list[int]], params: SamplingParams) -> TensorEngine:
    model = load_model(directory, VirtualRanks(Mesh.of(x=2, y=2, z=2)), WAYS, dtype=torch.float32)
    work = tiny.workload(prompts, params.max_tokens, params)
    return TensorEngine(model, SWITCH, workload=work, tokenizer=None, rows=4, call_tokens=24)


def answers(found: list[Completion]) -> list[Any]:
    return [
        [(out.token_ids, out.finish_reason, out.stop_reason) for out in own.outputs]
        for own in sorted(found, key=lambda own: own.index)
    ]


@pytest.mark.parametrize("name", ["llama", "falcon 7b", "mixtral"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=5, n=3, temperature=0.8, top_k=20, seed=3),
        SamplingParams(max_tokens=9, stop_token_ids=tuple(range(0, 300, 4)), min_tokens=2),
    ],
    ids=["greedy", "samples", "stops"],
)
def test_answers_are_those_of_one_machine(
    name: str, params: SamplingParams, tmp_path: Path
) -> None:
    """More rows than seats, prompts in chunks, prefill in another way than decoding."""
    tiny.make_model(tmp_path, config=CONFIGS[name])
    prompts = tiny.prompts(9, 17)
    with tiny.engine(tmp_path, prompts, params.max_tokens, params, device="cpu") as one:
        wanted = answers([*one.run(tiny.requests(prompts, params))])
    engine = engine_of(tmp_path, prompts, params)
    found = answers([*engine.run(tiny.requests(prompts, params))])
    assert found == wanted
    taken = {what for _, what in engine.model.executor.moved}
    assert "weights" in taken and "of weights on each of 8 ranks" in engine.status()
    engine.close()


def test_tokens_are_scored(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    prompts, params = tiny.prompts(3, 9), SamplingParams(max_tokens=3, logprobs=2)
    with tiny.engine(tmp_path, prompts, 3, params, device="cpu") as one:
        wanted = {own.index: own for own in one.run(tiny.requests(prompts, params))}
    for own in engine_of(tmp_path, prompts, params).run(tiny.requests(prompts, params)):
        for mine, other in zip(own.outputs, wanted[own.index].outputs, strict=True):
            assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def test_scores_of_prompts_are_refused(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    prompts, params = tiny.prompts(3, 9), SamplingParams(max_tokens=3, prompt_logprobs=1)
    with pytest.raises(InputError, match="the last token only"):
        next(engine_of(tmp_path, prompts, params).run(tiny.requests(prompts, params)))


def test_a_prompt_of_one_token_has_nothing_to_score(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    prompts, params = [[7], [11]], SamplingParams(max_tokens=3, prompt_logprobs=1)
    with tiny.engine(tmp_path, prompts, 3, params, device="cpu") as one:
        wanted = {own.index: own for own in one.run(tiny.requests(prompts, params))}
    for own in engine_of(tmp_path, prompts, params).run(tiny.requests(prompts, params)):
        assert own.outputs[0].token_ids == wanted[own.index].outputs[0].token_ids
        assert own.prompt_logprobs == wanted[own.index].prompt_logprobs


def test_the_first_rank_leads_the_others(tmp_path: Path) -> None:
    """Four processes, of which one has the rows."""
    reference = tiny.make_model(tmp_path)
    prompts = tiny.prompts(6, 12)
    torch.save(prompts, tmp_path / "prompts")
    first, *others = run_ranks("answers", 4, tmp_path)
    assert first == tiny.tokens(tiny.reference(reference, prompts, 5))
    assert others == [None] * 3
    assert pinned(Cut()).ways == (Cut(),)
