"""Sampling through the whole engine: samples, endings, policies.

A tiny random Llama in float32, under policies that put its rows anywhere; every stream of
operations is proven legal as it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from freight.errors import InputError
from freight.plan.default import Planner
from freight.plan.policy import Policy
from freight.runtime.request import Request, SamplingParams
from freight.runtime.sampler import sample_seed
from freight.runtime.tokenizer import Tokenizer

from ..jobs.tiny_model import write_tiny_tokenizer
from . import tiny
from .test_engine_policies import POLICIES
from .test_engine_scores import NAMES, PROMPTS, answer, check_scores, run, true_logprobs


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PreTrainedModel:
    return tiny.make_model(model_dir)


# -- samples ------------------------------------------------------------------------------------

DRAWN = SamplingParams(max_tokens=7, temperature=1.2, n=5, logprobs=1)
SHAPES = {
    **{name: POLICIES[name] for name in NAMES},
    "families of 3": {**POLICIES["cpu: odd mix"], "micro_batch_size": 3},
    "families of 2, on sim": {
        **POLICIES["sim: odd mix"],
        "micro_batch_size": 2,
        "num_micro_batches": 3,
    },
    "more than n": {**POLICIES["sim: odd mix"], "micro_batch_size": 13},
    **{
        name: POLICIES[name]
        for name in ("cpu: refill, odd mix", "sim: refill, odd mix", "cpu: diagonal, odd mix")
    },
}


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel, model_dir: Path) -> list[list[tuple[int, ...]]]:
    """Each sample of each prompt as a row of its own."""
    requests = [
        Request(
            index=5 * i + sample,
            prompt_ids=prompt,
            params=replace(DRAWN, n=1, seed=sample_seed(100 + i, sample)),
        )
        for i, prompt in enumerate(PROMPTS)
        for sample in range(5)
    ]
    with tiny.engine(model_dir, [*PROMPTS] * 5, 7, **POLICIES["cpu: all in memory"]) as engine:
        tokens = [completion.token_ids for completion in answer(engine, requests)]
    return [tokens[i : i + 5] for i in range(0, len(tokens), 5)]


@pytest.mark.parametrize("name", SHAPES)
def test_samples_are_independent_rows(
    name: str, alone: list[list[tuple[int, ...]]], model_dir: Path
) -> None:
    completions = run(model_dir, DRAWN, **SHAPES[name])
    for completion, expected in zip(completions, alone, strict=True):
        assert [output.token_ids for output in completion.outputs] == expected
        assert completion.token_ids == completion.outputs[0].token_ids == expected[0]
        assert len(set(expected)) > 1
        assert completion.num_new_tokens == 5 * 7
        assert all(len(output.logprobs or ()) == 7 for output in completion.outputs)


@pytest.mark.parametrize("name", ["cpu: odd mix", "sim: odd mix"])
@pytest.mark.parametrize(
    "grain",
    [{"page_tokens": 16}, {"chunk_tokens": 8}, {"max_batch_tokens": 45}, {"chunk_tokens": 1}],
    ids=str,
)
def test_small_grains_change_nothing(
    name: str,
    grain: dict[str, int],
    model: PreTrainedModel,
    alone: list[list[tuple[int, ...]]],
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates = Planner._candidates

    def changed(self: Planner) -> Iterator[Policy]:
        return (replace(policy, **grain) for policy in candidates(self))

    monkeypatch.setattr(Planner, "_candidates", changed)
    params = replace(DRAWN, prompt_logprobs=1)
    chosen = {**POLICIES[name], "micro_batch_size": 11}
    completions = run(model_dir, params, **chosen)
    for prompt, completion, expected in zip(PROMPTS, completions, alone, strict=True):
        assert [output.token_ids for output in completion.outputs] == expected
        assert completion.prompt_logprobs is not None
        found = [item for item in completion.prompt_logprobs if item]
        check_scores(found, true_logprobs(model, prompt)[:-1], prompt[1:], 1)


def test_a_plan_of_its_own_choosing(
    model: PreTrainedModel, alone: list[list[tuple[int, ...]]], model_dir: Path
) -> None:
    """Left to the planner, samples stay together and no more prompts are counted than come."""
    with tiny.engine(model_dir, PROMPTS, 7, DRAWN, device="cpu") as engine:
        policy = engine.plan.policy
        assert policy.micro_batch_size % 5 == 0
        assert policy.max_batch_tokens == policy.micro_batch_size // 5 * 40
    completions = run(model_dir, DRAWN, device="cpu")
    for completion, expected in zip(completions, alone, strict=True):
        assert [output.token_ids for output in completion.outputs] == expected


def test_first_sample_is_that_of_a_single_one(
    alone: list[list[tuple[int, ...]]], model_dir: Path
) -> None:
    single = run(model_dir, replace(DRAWN, n=1), **POLICIES["cpu: odd mix"])
    assert [completion.token_ids for completion in single] == [own[0] for own in alone]


def prompt_tokens(directory: Path, params: SamplingParams, size: int) -> int:
    """Tokens that the first sweep of each micro-batch computes, over a run."""
    chosen = {**POLICIES["cpu: odd mix"], "micro_batch_size": size}
    with tiny.engine(directory, PROMPTS, params.max_tokens, params, **chosen) as engine:
        count = 0
        made = engine._performer

        def watched(batches: Any, scheduler: Any, lane: int) -> Any:
            nonlocal count
            describe = scheduler._describe

            def note(sweep: int, batch: Any, continues: bool) -> Any:
                nonlocal count
                count += 0 if continues else batch.num_tokens
                return describe(sweep, batch, continues)

            scheduler._describe = note
            return made(batches, scheduler, lane)

        engine._performer = watched  # type: ignore[method-assign]
        answer(engine, list(tiny.requests(PROMPTS, params)))
    return count


def test_a_prompt_is_computed_once(model: PreTrainedModel, model_dir: Path) -> None:
    total = sum(map(len, PROMPTS))
    assert prompt_tokens(model_dir, DRAWN, 10) == total
    assert prompt_tokens(model_dir, DRAWN, 5) == total
    assert prompt_tokens(model_dir, DRAWN, 2) == 3 * total  # families of 2, 2 and 1
    assert prompt_tokens(model_dir, replace(DRAWN, n=1), 2) == total


def test_samples_and_a_scored_prompt(model: PreTrainedModel, model_dir: Path) -> None:
    params = replace(DRAWN, prompt_logprobs=2)
    for size in (2, 6):
        chosen = {**POLICIES["sim: odd mix"], "micro_batch_size": size}
        for prompt, completion in zip(PROMPTS, run(model_dir, params, **chosen), strict=True):
            assert completion.prompt_logprobs is not None
            found = [item for item in completion.prompt_logprobs if item]
            check_scores(found, true_logprobs(model, prompt)[:-1], prompt[1:], 2)


# -- penalties ----------------------------------------------------------------------------------

PENALISED = {
    "repetition": SamplingParams(max_tokens=12, repetition_penalty=1.4),
    "presence": SamplingParams(max_tokens=12, presence_penalty=1.5),
    "frequency": SamplingParams(max_tokens=12, frequency_penalty=0.9),
    "all, biased": SamplingParams(
        max_tokens=12,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.7,
        logit_bias={5: 3.0, 17: -100.0},
    ),
}


def penalised(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy by transformers' own repetition penalty, and by OpenAI's formula of the others."""
    repeated = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    made: list[int] = []
    for _ in range(params.max_tokens):
        seen = torch.tensor([[*prompt, *made]])
        with torch.inference_mode():
            logits = model(seen).logits[:, -1].clone()
            for token, bias in params.logit_bias.items():  # first, as in vLLM
                logits[0, token] += bias
            logits = repeated(seen, logits)[0]
            for token, count in Counter(made).items():
                logits[token] -= count * params.frequency_penalty + params.presence_penalty
        made.append(int(logits.argmax()))
    return made


@pytest.mark.parametrize("name", ["cpu: odd mix", "sim: refill, odd mix"])
@pytest.mark.parametrize("penalty", PENALISED)
def test_penalties_count_what_was_said(
    penalty: str, name: str, model: PreTrainedModel, model_dir: Path
) -> None:
    params = PENALISED[penalty]
    expected = [penalised(model, list(prompt), params) for prompt in PROMPTS]
    plain = tiny.tokens(tiny.reference(model, PROMPTS, params.max_tokens))
    found = [list(own.token_ids) for own in run(model_dir, params, **POLICIES[name])]
    assert found == expected
    assert found != plain, "a penalty that changes nothing shows nothing"


# -- endings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy(model: PreTrainedModel) -> list[list[int]]:
    return tiny.tokens(tiny.reference(model, PROMPTS, 12))


def test_stop_tokens_end_a_row(greedy: list[list[int]], model_dir: Path) -> None:
    stops = tuple({row[3] for row in greedy})
    params = SamplingParams(max_tokens=12, stop_token_ids=stops, logprobs=0)
    for completion, row in zip(
        run(model_dir, params, **POLICIES["cpu: odd mix"]), greedy, strict=True
    ):
        end = next(place for place, token in enumerate(row) if token in stops)
        assert list(completion.token_ids) == row[:end] and completion.finish_reason == "stop"
        assert completion.outputs[0].stop_reason == row[end]
        assert len(completion.outputs[0].logprobs or ()) == end


def test_no_stop_token_comes_before_min_tokens(greedy: list[list[int]], model_dir: Path) -> None:
    stops = tuple({row[0] for row in greedy})
    params = SamplingParams(max_tokens=9, stop_token_ids=stops, min_tokens=5)
    for completion in run(model_dir, params, **POLICIES["sim: odd mix"]):
        assert len(completion.token_ids) >= 5
        assert not set(completion.token_ids) & set(stops)
        assert completion.finish_reason == ("stop" if len(completion.token_ids) < 9 else "length")


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, in which the end of the sequence is token 1."""
    directory = tmp_path_factory.mktemp("text")
    tiny.make_model(directory)
    return write_tiny_tokenizer(directory)


def test_the_end_of_the_sequence(with_text: Path) -> None:
    ends = SamplingParams(max_tokens=8, logit_bias={1: 100})
    chosen = POLICIES["cpu: odd mix"]
    for completion in run(with_text, ends, **chosen):
        assert completion.token_ids == () and completion.text == ""
        assert (completion.finish_reason, completion.outputs[0].stop_reason) == ("stop", None)
    for completion in run(with_text, replace(ends, ignore_eos=True), **chosen):
        assert completion.token_ids == (1,) * 8 and completion.finish_reason == "length"
    for completion in run(with_text, replace(ends, min_tokens=3), **chosen):
        assert len(completion.token_ids) == 3 and 1 not in completion.token_ids
        assert completion.finish_reason == "stop"
    both = replace(ends, ignore_eos=True, stop_token_ids=(1,))
    for completion in run(with_text, both, **chosen):
        assert completion.token_ids == () and completion.outputs[0].stop_reason == 1


def test_stop_strings(with_text: Path) -> None:
    """Any stretch of the text ends it, wherever tokens begin and end; not before min_tokens."""
    chosen = POLICIES["cpu: odd mix"]
    plain = run(with_text, SamplingParams(max_tokens=12, ignore_eos=True), **chosen)
    texts, tokenizer = [completion.text for completion in plain], Tokenizer(with_text)
    stop = tuple({text[4:7] for text in texts if len(text) > 7 and "\ufffd" not in text[4:7]})
    assert stop
    stopped = run(
        with_text, SamplingParams(max_tokens=12, ignore_eos=True, stop=stop, logprobs=1), **chosen
    )
    for completion, text in zip(stopped, texts, strict=True):
        places = [place for own in stop if (place := text.find(own)) >= 0]
        if places:
            assert completion.text == text[: min(places)]
            assert completion.outputs[0].stop_reason in stop
            assert completion.finish_reason == "stop"
        items = completion.outputs[0].logprobs or ()
        assert len(items) == len(completion.token_ids)
        assert [item.text for item in items] == [tokenizer.token_text(i.token_id) for i in items]
        assert [item.raw for item in items] == [tokenizer.token_bytes(i.token_id) for i in items]
    late = SamplingParams(max_tokens=12, ignore_eos=True, stop=stop, min_tokens=11)
    for completion in run(with_text, late, **chosen):
        assert len(completion.token_ids) == 12


def test_ids_beyond_the_vocabulary_are_refused(model: PreTrainedModel, model_dir: Path) -> None:
    for params in (SamplingParams(logit_bias={320: 1}), SamplingParams(stop_token_ids=(320,))):
        with (
            pytest.raises(InputError, match="names token id 320"),
            tiny.engine(model_dir, PROMPTS, 16, **POLICIES["cpu: odd mix"]) as engine,
        ):
            answer(engine, list(tiny.requests(PROMPTS, params)))
