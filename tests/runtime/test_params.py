"""Which sampling parameters are taken, and how each that is not is refused by its name."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from freight.errors import InputError
from freight.runtime.params import SamplingParams, check_vocabulary


def test_the_defaults_are_greedy_and_plain() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.min_p, params.repetition_penalty) == (1, 0, 0, 1)
    assert params.logprobs is None and params.prompt_logprobs is None
    assert hash(params) == hash(SamplingParams()) and params == replace(params)


def test_forms_that_are_made_alike() -> None:
    stop: Any = "x"
    lists: Any = {"stop": ["a", "b"], "stop_token_ids": [3, 4]}
    assert SamplingParams(stop=stop).stop == ("x",)
    params = SamplingParams(**lists, logit_bias={7: 1, 2: -1.5})
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 4))
    assert list(params.logit_bias.items()) == [(2, -1.5), (7, 1)]
    assert SamplingParams(**asdict(params)) == params


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"max_tokens": -1},
            "max_tokens=-1 was given. max_tokens must be a whole number, at least 1. Give how",
        ),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number, at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, or 0 where prompt_logprobs is set"),
        ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2, "temperature": 1}, "n must be 1 where"),
        ({"n": 0}, "n=0 was given. n must be a whole number from 1 to 16384"),
        ({"n": 20_000, "temperature": 1}, "n must be a whole number from 1 to 16384"),
        ({"n": True, "temperature": 1}, "n must be"),
        ({"n": 3}, "n=3 was given with temperature=0. Greedy answers to one prompt"),
        ({"temperature": -0.1}, "temperature must be a finite number, 0 or more"),
        ({"temperature": math.inf}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"temperature": True}, "temperature must be"),
        ({"min_p": False}, "min_p must be"),
        ({"logit_bias": {5: True}}, "logit_bias must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"min_p": -0.1}, "min_p must be a number in [0, 1]"),
        ({"min_p": 1.1}, "min_p must be a number in [0, 1]"),
        ({"min_p": math.nan}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number in [-2, 2]"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be a number in [-2, 2]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be"),
        ({"logit_bias": {5: 101}}, "logit_bias must be token ids with numbers from -100 to 100"),
        ({"logit_bias": {-1: 1}}, "logit_bias must be"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be"),
        ({"logit_bias": [1]}, "logit_bias must be"),
        ({"seed": -(2**63) - 1}, "seed must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"stop": ("a", "")}, "stop=['a', ''] was given. stop must be texts that are not empty"),
        ({"stop": ""}, "stop must be texts that are not empty"),
        ({"stop": (1,)}, "stop must be"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": 3}, "stop_token_ids must be token ids"),
        ({"min_tokens": -1}, "min_tokens must be a whole number, 0 or more"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens, 16. Lower it, or raise"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"logprobs": -1}, "logprobs must be"),
        ({"logprobs": True}, "logprobs must be"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be a whole number from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be"),
    ],
    ids=str,
)
def test_each_value_out_of_range_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**values)
    assert words in str(caught.value)
    error = caught.value
    assert error.asked.endswith(".") and error.limit.endswith(".") and error.advice.endswith(".")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logit_bias": {3: 1, 50: 1}}, "logit_bias names token id 50"),
        ({"stop_token_ids": (49, 77)}, "stop_token_ids names token id 77"),
    ],
)
def test_tokens_beyond_the_vocabulary(values: dict[str, Any], words: str) -> None:
    params = SamplingParams(**values)
    check_vocabulary(params, 100)
    with pytest.raises(InputError, match=words) as caught:
        check_vocabulary(params, 50)
    assert "the ids 0 to 49" in caught.value.limit


def test_more_alternatives_than_tokens() -> None:
    check_vocabulary(SamplingParams(logprobs=5, prompt_logprobs=5), 5)
    for name in ("logprobs", "prompt_logprobs"):
        values: dict[str, Any] = {name: 6}
        with pytest.raises(InputError, match=f"{name} must be at most 5"):
            check_vocabulary(SamplingParams(**values), 5)


def test_scoring_alone() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_what_other_apis_write_for_the_defaults() -> None:
    given = SamplingParams(
        max_tokens=None,  # type: ignore[arg-type]
        top_k=-1,
        seed=None,  # type: ignore[arg-type]
        stop=None,  # type: ignore[arg-type]
        logit_bias=None,  # type: ignore[arg-type]
    )
    assert given == SamplingParams()
