"""Rows answered over ranks: what the engine on one machine answers, with every way of sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freight.distributed.tensor.engine import TensorEngine
from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.switch import Switch, pinned
from freight.distributed.tensor.virtual import VirtualRanks
from freight.distributed.tensor.ways import Way
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.named import DYNAMIC, Dynamic
from freight.runtime.params import SamplingParams
from freight.runtime.request import Completion

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS
from .processes import run_ranks

WAYS = (Cut(batch="yx"), Cut(gathered="xyz"))
SCHEMES = (DYNAMIC["Megatron attention, Megatron MLP"], Dynamic(gathered=True))


def engine_of(
    directory: Path,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    ways: tuple[Way, Way] = WAYS,
    call_tokens: int = 24,
    together: bool = False,
) -> TensorEngine:
    is_cut = isinstance(ways[0], Cut)
    mesh = Mesh.of(x=2, y=2, z=2) if is_cut else Mesh.of(x=2)
    model = load_model(directory, VirtualRanks(mesh), ways, dtype=torch.float32)
    work = tiny.workload(prompts, params.max_tokens, params)
    return TensorEngine(
        model,
        Switch((8,), ways),
        workload=work,
        tokenizer=None,
        rows=4,
        call_tokens=call_tokens,
        together=together,
    )


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


SCORED = [
    SamplingParams(max_tokens=3, prompt_logprobs=0),
    SamplingParams(max_tokens=0, prompt_logprobs=3),
    SamplingParams(max_tokens=4, prompt_logprobs=5, logprobs=1, n=2, seed=3, temperature=1.0),
    SamplingParams(max_tokens=4),
]
"""Of rows that are together."""


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("call_tokens", [9, 64])
@pytest.mark.parametrize("ways", [WAYS, (Cut(), Cut(gathered="x", batch="y")), SCHEMES])
def test_prompts_are_scored(
    ways: tuple[Way, Way], call_tokens: int, together: bool, tmp_path: Path
) -> None:
    """In calls that have a few of their tokens, or several prompts; as one machine scores them."""
    tiny.make_model(tmp_path)
    prompts = tiny.prompts(9, 23)
    requests = [
        replace(own, params=SCORED[place % 4], score_from=min(1 + place, len(own.prompt_ids)))
        for place, own in enumerate(tiny.requests(prompts, SCORED[0]))
    ]
    with tiny.engine(tmp_path, prompts, 4, SCORED[2], device="cpu") as one:
        wanted = {own.index: own for own in one.run(iter(requests))}
    options: dict[str, Any] = {"ways": ways, "call_tokens": call_tokens, "together": together}
    engine = engine_of(tmp_path, prompts, SCORED[2], **options)
    found = {own.index: own for own in engine.run(iter(requests))}
    assert found.keys() == wanted.keys()
    for index, other in wanted.items():
        mine = found[index]
        assert [out.token_ids for out in mine.outputs] == [out.token_ids for out in other.outputs]
        assert (mine.prompt_logprobs is None) == (other.prompt_logprobs is None)
        pairs = zip(mine.prompt_logprobs or (), other.prompt_logprobs or (), strict=True)
        for one_score, other_score in pairs:
            assert (one_score is None) == (other_score is None)
            if one_score is not None and other_score is not None:
                assert one_score.token_id == other_score.token_id
                assert one_score.logprob == pytest.approx(other_score.logprob, abs=1e-4)
                assert one_score.rank == other_score.rank
                tops = [[top.token_id for top in own.top] for own in (one_score, other_score)]
                assert tops[0] == tops[1]


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
