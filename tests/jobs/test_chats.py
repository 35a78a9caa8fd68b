"""Messages reach a chat template as text, whatever form of content they had."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freight.jobs.formats import Row, parse_row
from freight.runtime.request import SamplingParams


def parse(record: dict[str, Any]) -> Row:
    return parse_row(json.dumps(record).encode(), where="Line 1", defaults=SamplingParams())


def test_parts_of_text_become_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ada"},
        {"role": "assistant", "content": None},
    ]
    assert parse({"messages": messages}).messages == [
        messages[0],
        {"role": "user", "content": "one\ntwo", "name": "ada"},
        messages[2],
    ]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, 'Its "role" is null'),
        ({"role": 1, "content": "x"}, 'Its "role" is a number'),
        ({"role": "user", "content": 5}, 'Its "content" is a number'),
        ({"role": "user"}, 'Its "content" is null'),
        ({"role": "user", "content": {"text": "x"}}, 'Its "content" is an object'),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "A part has no text"),
        ({"role": "user", "content": [5]}, "of type None"),
    ],
)
def test_what_no_template_could_show(message: dict[str, Any], reason: str) -> None:
    error = parse({"messages": [message]}).error
    assert error is not None and reason in error


@pytest.mark.parametrize(
    ("values", "reason"),
    [([1], "must be an object"), ({"tools": [1]}, 'set "tools"'), ({"messages": 1}, "Leave mess")],
)
def test_what_a_row_may_not_set_of_a_template(values: Any, reason: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": values}
    error = parse(chat).error
    assert error is not None and reason in error


def test_openais_names_for_what_a_row_may_set() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert parse({**chat, "max_completion_tokens": 9}).overrides == {"max_tokens": 9}
    assert parse({**chat, "logprobs": True, "top_logprobs": 4}).overrides == {"logprobs": 4}
    assert parse({**chat, "logprobs": True}).overrides == {"logprobs": 0}
    assert parse({**chat, "logprobs": False}).overrides == {}
    differ = parse({**chat, "max_completion_tokens": 9, "max_tokens": 8}).error
    assert differ is not None and "they differ" in differ
    assert parse({**chat, "max_completion_tokens": 9, "max_tokens": 9}).error is None
