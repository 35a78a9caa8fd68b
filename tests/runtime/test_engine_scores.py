"""Log-probabilities through the whole engine, of new tokens and of prompts, against transformers.

Tiny random models in float32, under policies that put their rows anywhere; every stream of
operations is proven legal as it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from freight.plan import scratch
from freight.runtime.engine import Engine
from freight.runtime.request import Completion, Logprob, Request, SamplingParams

from . import tiny
from .test_engine_memory import check_memory
from .test_engine_parity import gemma2, gpt_oss, granite, mixtral, opt
from .test_engine_policies import POLICIES

PROMPTS = tiny.prompts(7, 40)
NAMES = [
    "cpu: all in memory",
    "cpu: row by row",
    "cpu: KV on disk",
    "cpu: activations on disk",
    "cpu: odd mix",
    "sim: odd mix",
    "sim: odd mix, K=7",
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PreTrainedModel:
    return tiny.make_model(model_dir)


def answer(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    done = {completion.index: completion for completion in engine.run(iter(requests))}
    assert sorted(done) == [request.index for request in requests]
    return [done[request.index] for request in requests]


def run(
    directory: Path,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **options: Any,
) -> list[Completion]:
    """Answers to prompts with equal settings, each row's seed its own."""
    requests = [
        Request(index=i, prompt_ids=prompt, params=replace(params, seed=100 + i))
        for i, prompt in enumerate(prompts)
    ]
    with tiny.engine(directory, prompts, params.max_tokens, params, **options) as engine:
        completions = answer(engine, requests)
        check_memory(engine)
        free = engine.placement.kv_cache
        assert not free.rows
    return completions


@torch.inference_mode()
def true_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Row t [V] scores the token after position t."""
    return model(torch.tensor([list(token_ids)])).logits[0].float().log_softmax(-1)


def check_scores(
    found: Sequence[Logprob], expected: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> None:
    assert len(found) == len(token_ids) == len(expected)
    for item, row, token_id in zip(found, expected, token_ids, strict=True):
        assert item.token_id == token_id
        assert item.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        top = row.topk(num_top)
        assert [other.token_id for other in item.top] == top.indices.tolist()
        assert [o.logprob for o in item.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert [other.rank for other in item.top] == list(range(1, num_top + 1))
        rank = int((row > row[token_id]).sum()) + 1
        assert item.rank in (rank, None)
        assert item.rank is not None or rank > num_top


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_transformers(
    name: str, model: PreTrainedModel, model_dir: Path
) -> None:
    """Of the model's own logits: temperature, penalties and biases change the tokens only."""
    params = SamplingParams(
        max_tokens=6,
        temperature=1.5,
        top_k=40,
        repetition_penalty=1.3,
        logit_bias={7: 5.0},
        logprobs=4,
        prompt_logprobs=3,
    )
    for prompt, completion in zip(PROMPTS, run(model_dir, params, **POLICIES[name]), strict=True):
        rows = true_logprobs(model, [*prompt, *completion.token_ids])
        output = completion.outputs[0]
        assert output.logprobs is not None and completion.prompt_logprobs is not None
        new = rows[len(prompt) - 1 : -1]
        check_scores(output.logprobs, new, completion.token_ids, 4)
        assert all(item.rank is not None for item in output.logprobs)
        total = sum(item.logprob for item in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(total)
        first, *others = completion.prompt_logprobs
        assert first is None
        check_scores([item for item in others if item], rows[: len(prompt) - 1], prompt[1:], 3)


@pytest.mark.parametrize("name", ["cpu: odd mix", "sim: odd mix"])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_alone(
    name: str, max_tokens: int, model: PreTrainedModel, model_dir: Path, monkeypatch: Any
) -> None:
    """Chunks of a few positions; a prompt of one token has nothing to score."""
    monkeypatch.setattr(scratch, "_SCORED_VALUES", 5 * 320)
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0)
    prompts = [[5], *PROMPTS, [9]]
    completions = run(model_dir, params, prompts, **POLICIES[name])
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == max_tokens
        assert completion.finish_reason == "length"
        assert completion.prompt_logprobs is not None
        first, *others = completion.prompt_logprobs
        rows = true_logprobs(model, prompt)[:-1]
        assert first is None and len(others) == len(prompt) - 1
        for item, row, token_id in zip(others, rows, prompt[1:], strict=True):
            assert item is not None and item.top == ()
            assert item.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert (item.rank == 1) == (int(row.argmax()) == token_id)


def test_some_rows_ask_and_others_do_not(model: PreTrainedModel, model_dir: Path) -> None:
    kinds = [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, logprobs=2),
        SamplingParams(max_tokens=0, prompt_logprobs=1),
        SamplingParams(max_tokens=3, prompt_logprobs=4, logprobs=0),
    ]
    requests = [
        Request(index=i, prompt_ids=prompt, params=kinds[i % 4]) for i, prompt in enumerate(PROMPTS)
    ]
    asks = SamplingParams(logprobs=4, prompt_logprobs=4)
    plain = tiny.tokens(tiny.reference(model, PROMPTS, 5))
    for name in ("cpu: odd mix", "sim: odd mix, K=7"):
        with tiny.engine(model_dir, PROMPTS, 5, asks, **POLICIES[name]) as engine:
            completions = answer(engine, requests)
        for i, completion in enumerate(completions):
            own = kinds[i % 4]
            assert list(completion.token_ids) == plain[i][: own.max_tokens]
            rows = true_logprobs(model, [*PROMPTS[i], *completion.token_ids])
            assert (completion.prompt_logprobs is None) == (own.prompt_logprobs is None)
            assert (completion.outputs[0].logprobs is None) == (own.logprobs is None)
            if completion.outputs[0].logprobs is not None:
                new = rows[len(PROMPTS[i]) - 1 : -1]
                num_top = own.logprobs or 0
                check_scores(completion.outputs[0].logprobs, new, plain[i][: len(new)], num_top)
            if completion.prompt_logprobs is not None:
                found = [item for item in completion.prompt_logprobs if item]
                old = rows[: len(PROMPTS[i]) - 1]
                check_scores(found, old, PROMPTS[i][1:], own.prompt_logprobs or 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_need_no_logits_of_whole_prompts(
    dtype: str, model: PreTrainedModel, model_dir: Path
) -> None:
    """Memory for them grows with the prompts' length times the width, not the vocabulary. Beside
    it there is scratch for as many positions as are scored at once."""
    prompts = tiny.prompts(8, 200)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    sizes = []
    for asked in (None, params):
        with tiny.engine(
            model_dir, prompts, 1, asked, **{**POLICIES["cpu: all in memory"], "dtype": dtype}
        ) as engine:
            usage = engine.plan.geometry.usage["cpu"]
            sizes.append(sum(usage.values()) - usage["workspace"])
            requests = tiny.requests(prompts, asked or SamplingParams(max_tokens=1))
            answer(engine, list(requests))
            check_memory(engine)
    per_token = 64 * 4 + 4 * (3 + 2 * 2)
    assert 0 < sizes[1] - sizes[0] <= 12 * 200 * per_token


@pytest.mark.parametrize("name", ["cpu: odd mix", "sim: odd mix"])
@pytest.mark.parametrize(
    "config",
    [gemma2(), mixtral(), opt(word_embed_proj_dim=32), granite(), gpt_oss()],
    ids=["capped logits", "experts", "narrow head", "scaled logits", "sinks"],
)
def test_heads_and_streams_of_other_families(
    config: PretrainedConfig, name: str, tmp_path: Path
) -> None:
    model = tiny.make_model(tmp_path, config=config)
    params = SamplingParams(max_tokens=5, n=3, temperature=1, logprobs=2, prompt_logprobs=2)
    prompts = tiny.prompts(4, 25)
    chosen = {**POLICIES[name], "micro_batch_size": 4}
    completions = run(tmp_path, params, prompts, **chosen)
    for prompt, completion in zip(prompts, completions, strict=True):
        for output in completion.outputs:
            rows = true_logprobs(model, [*prompt, *output.token_ids])
            assert output.logprobs is not None and completion.prompt_logprobs is not None
            check_scores(output.logprobs, rows[len(prompt) - 1 : -1], output.token_ids, 2)
            found = [item for item in completion.prompt_logprobs if item]
            check_scores(found, rows[: len(prompt) - 1], prompt[1:], 2)
