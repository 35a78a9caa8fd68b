"""What an input row may say, and that whatever it says it becomes one row."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import InputError
from freight.jobs.formats import (
    RowLimits,
    completion_row,
    error_row,
    fit_max_tokens,
    parse_row,
)
from freight.runtime.request import Completion, CompletionOutput, Logprob, SamplingParams

DEFAULTS = SamplingParams(max_tokens=9)


def parse(record: object) -> Any:
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_row(line, where="Line 3 of rows.jsonl", defaults=DEFAULTS)


def test_usable_rows() -> None:
    row = parse({"prompt": "hi", "id": "a", "label": {"mine": 1}, "max_tokens": None})
    assert (row.row_id, row.text, row.error, row.overrides) == ("a", "hi", None, {})
    assert parse({"prompt": [1, 2], "id": 7}).token_ids == (1, 2)
    messages = [{"role": "user", "content": "x"}]
    assert parse({"messages": messages, "prompt": None}).messages == messages
    row = parse({"prompt": "", "stop": "a", "temperature": 1, "top_p": 0.5, "seed": 3, "top_k": 2})
    assert row.overrides == {
        "stop": ("a",),
        "temperature": 1.0,
        "top_p": 0.5,
        "seed": 3,
        "top_k": 2,
    }
    row = parse({"prompt": "", "max_tokens": 5.0, "seed": 3e0, "n": 1.0, "top_k": -1.0})
    assert row.overrides == {"max_tokens": 5, "seed": 3, "n": 1, "top_k": -1}
    assert all(type(value) is int for value in row.overrides.values())
    assert parse({"prompt": "x", "stop": ["a", "b"]}).overrides == {"stop": ("a", "b")}


def test_rows_with_continuations() -> None:
    """How tokens are chosen does not matter to them; what asks for none may be there."""
    row = parse({"prompt": "a", "continuation": " b", "id": 3, "max_tokens": 0, "top_p": 0.5})
    assert (row.text, row.continuation, row.row_id, row.overrides) == ("a", " b", 3, {})
    row = parse({"prompt": [], "continuation": [4], "n": 1, "logprobs": None})
    assert (row.token_ids, row.continuation, row.error) == ((), [4], None)
    assert parse({"prompt": "a", "continuation": None}).continuation is None


def test_every_setting_has_its_key() -> None:
    settings = {
        "max_tokens": 7,
        "n": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"5": -100, "2": 1},
        "seed": 8,
        "stop": "a",
        "stop_token_ids": [1, 2],
        "min_tokens": 2,
        "ignore_eos": True,
        "logprobs": 5,
        "prompt_logprobs": 0,
        "structured_outputs": {"regex": "[0-9]+"},
    }
    assert settings.keys() == asdict(DEFAULTS).keys()
    row = parse({"prompt": "x", **settings})
    assert row.error is None
    expected = settings | {
        "logit_bias": {5: -100, 2: 1},
        "stop": ("a",),
        "stop_token_ids": (1, 2),
    }
    assert row.overrides == expected


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{", "not: "),
        (b'{"prompt": "\xff"}', "Byte 13 of the line is not"),
        (b"[" * 100_000, "read as JSON"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "read as JSON"),
        ([1], "holds a list"),
        ("x", "holds a string"),
        ({"id": 1}, 'neither of "prompt" and "messages"'),
        ({"prompt": "x", "messages": [{}]}, "both of"),
        ({"prompt": 4}, '"prompt" is a number'),
        ({"prompt": ["a", "b"]}, 'Its "prompt[0]" is a string. It must be a whole number'),
        ({"prompt": [6, 5.0]}, 'Its "prompt[1]" is the number 5.0. It must be a whole number'),
        ({"prompt": [1, True]}, 'Its "prompt[1]" is true or false. It must be a whole number'),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"messages": []}, '"messages" is an empty list. It must be a list of at least one object'),
        ({"messages": "x"}, '"messages" is a string. It must be a list of at least one object'),
        ({"messages": [{"role": "user"}, "x"]}, '"messages[1]" is a string. It must be an object'),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "no template is filled in"),
        ({"prompt": "x", "continuation": "y", "chat_template_kwargs": {"a": 1}}, "no template"),
        ({"prompt": "x", "id": 1.5}, '"id" is the number 1.5'),
        ({"prompt": "x", "id": True}, '"id" is true or false'),
        ({"prompt": "x", "id": "\udc00"}, "surrogate"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "x", "max_tokens": 2.5}, '"max_tokens" is the number 2.5. It must be a whole'),
        ({"prompt": "x", "max_tokens": float("inf")}, '"max_tokens" is the number inf'),
        ({"prompt": "x", "temperature": float("nan")}, "temperature must be"),
        ({"prompt": "x", "temperature": 10**400}, "temperature must be"),
        ({"prompt": "x", "temperature": "hot"}, '"temperature" is a string'),
        ({"prompt": "x", "top_p": 0}, "top_p must be"),
        ({"prompt": "x", "top_k": -2}, "top_k must be"),
        ({"prompt": "x", "seed": 2**63}, "seed must be"),
        ({"prompt": "x", "stop": [""]}, "texts that are not empty"),
        ({"prompt": "x", "stop": [1]}, '"stop[0]" is a number. It must be a string'),
        ({"prompt": "x", "n": 0}, "n must be a whole number from 1"),
        ({"prompt": "x", "n": 2}, "n=2 was given with temperature=0"),
        ({"prompt": "x", "n": 2.5}, '"n" is the number 2.5. It must be a whole number'),
        ({"prompt": "x", "min_p": 2}, "min_p must be"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty must be"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty must be"),
        ({"prompt": "x", "frequency_penalty": "a"}, '"frequency_penalty" is a string'),
        ({"prompt": "x", "logit_bias": [1]}, '"logit_bias" is a list'),
        ({"prompt": "x", "logit_bias": {"a": 1}}, 'Its "logit_bias" has the key "a". Keys are'),
        ({"prompt": "x", "logit_bias": {"1": "a"}}, 'Its "logit_bias[1]" is a string. It must be'),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias must be"),
        ({"prompt": "x", "stop_token_ids": [3, "a"]}, '"stop_token_ids[1]" is a string'),
        ({"prompt": "x", "stop_token_ids": 3}, '"stop_token_ids" is a number'),
        ({"prompt": "x", "stop_token_ids": [-3]}, "stop_token_ids must be"),
        ({"prompt": "x", "min_tokens": 10}, "min_tokens must be at most max_tokens, 9"),
        ({"prompt": "x", "structured_outputs": {"json": False}}, "structured_outputs={'json': F"),
        ({"prompt": "x", "ignore_eos": 1}, '"ignore_eos" is a number. It must be true or false'),
        ({"prompt": "x", "logprobs": 21}, "logprobs must be"),
        ({"prompt": "x", "logprobs": True}, '"logprobs" is true or false'),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs must be"),
        ({"continuation": "x"}, 'neither of "prompt" and "messages"'),
        ({"continuation": "x", "messages": [{}]}, 'both "continuation" and "messages". A cont'),
        ({"prompt": "x", "continuation": ""}, "The continuation is empty. There is nothing"),
        ({"prompt": [1], "continuation": []}, "The continuation is empty"),
        ({"prompt": "x", "continuation": [1]}, '"continuation" is a list. It must be a string'),
        ({"prompt": [1], "continuation": "x"}, '"continuation" is a string. It must be a list'),
        ({"prompt": [1], "continuation": [True]}, '"continuation[0]" is true or false. It must'),
        ({"prompt": "x", "continuation": 1}, '"continuation" is a number'),
        ({"prompt": "x", "continuation": "\ud800"}, "surrogate"),
        ({"prompt": "x", "continuation": "y", "max_tokens": 3}, '"max_tokens" is 3. A contin'),
        ({"prompt": "x", "continuation": "y", "max_tokens": "a"}, '"max_tokens" is a string'),
        ({"prompt": "x", "continuation": "y", "n": 2}, "Leave n or the continuation out"),
        ({"prompt": "x", "continuation": "y", "logprobs": 0}, '"logprobs" is 0'),
        ({"prompt": "x", "continuation": "y", "prompt_logprobs": 0}, '"prompt_logprobs" is 0'),
    ],
)
def test_unusable_rows(record: object, reason: str) -> None:
    row = parse(record)
    assert row.error is not None and row.error.startswith("Line 3 of rows.jsonl: ")
    assert reason in row.error
    json.loads(error_row(row.row_id or 0, row.error))


def test_an_error_keeps_the_rows_id() -> None:
    assert parse({"id": "mine", "prompt": 5}).row_id == "mine"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["id", "prompt", "messages", *asdict(DEFAULTS)]


@given(st.dictionaries(st.sampled_from(KEYS), JSON) | JSON)
def test_anything_becomes_one_row(record: object) -> None:
    row = parse(record)
    given = [row.text, row.token_ids, row.messages, row.error]
    assert sum(value is not None for value in given) == 1


@given(st.binary())
def test_any_bytes_become_one_row(line: bytes) -> None:
    row = parse(line)
    assert row.error is not None or row.text is not None


def test_positions() -> None:
    limits = RowLimits(max_positions=10, vocab_size=5)
    assert fit_max_tokens(3, 5, limits) == 5
    assert fit_max_tokens(3, 7, limits) == 7
    assert fit_max_tokens(3, 8, limits) == 7
    assert fit_max_tokens(9, 8, limits) == 1
    with pytest.raises(InputError, match=r"10 tokens.*10 positions"):
        fit_max_tokens(10, 1, limits)
    assert fit_max_tokens(10, 0, limits) == fit_max_tokens(3, 0, limits) == 0
    with pytest.raises(InputError, match=r"11 tokens.*10 positions"):
        fit_max_tokens(11, 0, limits)
    with pytest.raises(InputError, match="empty"):
        fit_max_tokens(0, 1, limits)


@given(st.text(), st.text() | st.integers())
def test_output_rows_are_one_line_of_json(text: str, row_id: str | int) -> None:
    output = CompletionOutput(token_ids=(1, 2), text=text, finish_reason="stop")
    completion = Completion(index=0, num_prompt_tokens=3, outputs=(output,))
    raw = completion_row(row_id, completion)
    assert len(raw.decode().splitlines()) == 1
    assert json.loads(raw) == {
        "id": row_id,
        "text": text,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "finish_reason": "stop",
    }


def test_several_answers_and_log_probabilities() -> None:
    other = Logprob(token_id=4, text="b", logprob=-0.25, rank=1)
    chosen = Logprob(token_id=3, text="a", logprob=-1.23456789, rank=2, top=(other,))
    plain = CompletionOutput(token_ids=(3,), text="a", finish_reason="length")
    scored = CompletionOutput(
        token_ids=(3,),
        text="a",
        finish_reason="stop",
        stop_reason=9,
        logprobs=(chosen,),
        cumulative_logprob=-1.23456789,
    )
    item = {
        "token": "a",
        "token_id": 3,
        "logprob": -1.234568,
        "top_logprobs": [{"token": "b", "token_id": 4, "logprob": -0.25}],
    }
    two = Completion(index=0, num_prompt_tokens=2, outputs=(plain, scored))
    output = {"text": "a", "completion_tokens": 1}
    listed = {"cumulative_logprob": -1.234568, "logprobs": {"content": [item]}}
    assert json.loads(completion_row("x", two)) == {
        "id": "x",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "outputs": [
            {**output, "finish_reason": "length"},
            {**output, "finish_reason": "stop", **listed},
        ],
    }
    one = Completion(
        index=0, num_prompt_tokens=2, outputs=(scored,), prompt_logprobs=(None, chosen)
    )
    assert json.loads(completion_row(1, one)) == {
        "id": 1,
        "prompt_tokens": 2,
        **output,
        "finish_reason": "stop",
        **listed,
        "prompt_logprobs": [None, item],
    }
