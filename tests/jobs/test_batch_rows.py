"""Lines of OpenAI's batch files are answered by lines of OpenAI's batch outputs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freight.jobs.batch_rows import batch_row
from freight.jobs.formats import Row, RowLimits, parse_row
from freight.jobs.runner import JobReport, JobSpec, run_job
from freight.runtime.request import Completion, CompletionOutput, Logprob, SamplingParams
from freight.runtime.tokenizer import Tokenizer

from .fakes import FakeEngine, Watcher

CHAT: dict[str, Any] = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "some-model",
        "messages": [{"role": "user", "content": "the cat"}],
        "max_completion_tokens": 3,
        "response_format": {"type": "text"},
    },
}
TEXT: dict[str, Any] = {
    "custom_id": "two",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": [5, 6, 7], "max_tokens": 2.0, "temperature": 1, "n": 2},
}


def parse(record: dict[str, Any]) -> Row:
    return parse_row(json.dumps(record).encode(), where="Line 1", defaults=SamplingParams())


def run(directory: Path, rows: list[dict[str, Any]], tokenizer: Tokenizer | None) -> JobReport:
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_file(directory, tokenizer)


def run_file(directory: Path, tokenizer: Tokenizer | None) -> JobReport:
    return run_job(
        JobSpec(
            source=directory / "in.jsonl",
            sink=directory / "out.jsonl",
            sampling=SamplingParams(max_tokens=5),
        ),
        tokenizer=tokenizer,
        limits=RowLimits(max_positions=64, vocab_size=320),
        identity={},
        build_engine=FakeEngine,
        observer=Watcher(),
    )


def test_a_batch_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    broken = {**TEXT, "custom_id": "three", "body": {"prompt": 5}}
    report = run(tmp_path, [CHAT, TEXT, broken, {"prompt": [1], "id": "plain"}], tokenizer)
    assert (report.num_rows, report.num_failed) == (4, 1)
    first, second, third, plain = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    num_prompt = first["response"]["body"]["usage"]["prompt_tokens"]
    assert num_prompt > 3
    content = first["response"]["body"]["choices"][0]["message"]["content"]
    assert first == {
        "id": "batch_req_0",
        "custom_id": "one",
        "response": {
            "status_code": 200,
            "request_id": "0",
            "body": {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": 0,
                "model": "some-model",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": content},
                        "logprobs": None,
                        "finish_reason": "length",
                    }
                ],
                "usage": {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": 3,
                    "total_tokens": num_prompt + 3,
                },
            },
        },
        "error": None,
    }
    body = second["response"]["body"]
    assert (body["object"], body["usage"]["total_tokens"]) == ("text_completion", 7)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["text"].startswith("7 6 seed")
    assert (third["custom_id"], third["response"]) == ("three", None)
    assert 'Its "prompt" is a number' in third["error"]["message"]
    assert plain["id"] == "plain" and plain["text"]


def test_log_probabilities_have_the_shape_of_their_endpoint() -> None:
    other = Logprob(token_id=4, text="b", raw=b"b", logprob=-2.0, rank=2)
    token = Logprob(token_id=3, text="a", raw=b"a", logprob=-0.5, rank=1, top=(other,))
    output = CompletionOutput(
        text="a", token_ids=(3,), finish_reason="stop", logprobs=(token,), cumulative_logprob=-0.5
    )
    answer = Completion(index=6, num_prompt_tokens=2, outputs=(output,))

    def choice(kind: str) -> dict[str, Any]:
        row = json.loads(batch_row("x", {"kind": kind, "model": ""}, answer))
        found: dict[str, Any] = row["response"]["body"]["choices"][0]["logprobs"]
        return found

    assert choice("text") == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"b": -2.0, "a": -0.5}],
        "text_offset": [0],
    }
    (content,) = choice("chat")["content"]
    assert (content["token"], content["bytes"], content["logprob"]) == ("a", [97], -0.5)
    best = {"token": "b", "token_id": 4, "logprob": -2.0, "bytes": [98]}
    assert content["top_logprobs"] == [best]


def test_completions_say_where_a_token_begins_and_always_how_likely_it_is() -> None:
    half = Logprob(token_id=7, text="\ufffd", raw=b"\xc3", logprob=-1.0, rank=1)
    other = replace(half, token_id=8, raw=b"\xc4", logprob=-3.0, rank=2)
    first = replace(half, top=(half, other))
    second = Logprob(token_id=3, text="abc", raw=b"abc", logprob=-9.0, rank=40)
    output = CompletionOutput(
        text="abc", token_ids=(7, 3, 3), finish_reason="stop", logprobs=(first, second, second)
    )
    answer = Completion(index=6, num_prompt_tokens=2, outputs=(output,))
    row = json.loads(batch_row("x", {"kind": "text", "model": ""}, answer))
    found = row["response"]["body"]["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"\ufffd": -1.0}, {"abc": -9.0}, {"abc": -9.0}]
    assert found["text_offset"] == [0, 1, 4]


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt": "x", "logit_bias": {"\ud800": 1}, "id": "bad"},
        {**TEXT, "url": "\ud800"},
        {**TEXT, "body": {**TEXT["body"], "\ud800foo": 1}},
    ],
)
def test_a_row_that_cannot_be_encoded_stops_no_other(
    broken: dict[str, Any], tmp_path: Path
) -> None:
    report = run(tmp_path, [{"prompt": [1], "id": "good"}, broken], None)
    assert (report.num_rows, report.num_failed) == (2, 1)
    good, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert good["id"] == "good" and "text" in good
    assert "\ud800" in json.dumps(bad["error"], ensure_ascii=False)


def test_a_model_s_name_that_cannot_be_encoded_stops_no_row(tmp_path: Path) -> None:
    named = {**TEXT, "body": {**TEXT["body"], "model": "\ud800"}}
    assert run(tmp_path, [named], None).num_failed == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200


def test_nesting_that_is_too_deep_is_a_row_s_error() -> None:
    found, limit = set(), sys.getrecursionlimit()  # which libraries raise
    for depth in range(limit - 100, limit + 10):
        form = "[" * depth + "]" * depth
        line = f'{{"prompt": "x", "structured_outputs": {{"json": {{"enum": {form}}}}}}}'
        row = parse_row(line.encode(), where="Line 1", defaults=SamplingParams())
        found.add(row.error and ("deeply" in row.error or "read as JSON" in row.error))
    assert True in found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"url": "/v1/embeddings"}, 'Its "url" is /v1/embeddings'),
        ({"url": None}, 'Its "url" is null'),
        ({"body": [1]}, 'Its "body" is a list'),
        ({"url": "/v1/completions"}, 'Such a body has "prompt"'),
        ({"body": {**CHAT["body"], "tools": [{}]}}, 'Its "tools" is set'),
        ({"body": {**CHAT["body"], "best_of": 3}}, 'Its "best_of" is set'),
        ({"body": {**CHAT["body"], "bad_words": ["a"]}}, 'Its "bad_words" is set'),
        ({"body": {**CHAT["body"], "reasoning_effort": "low"}}, 'Its "reasoning_effort" is set'),
        ({"body": {**CHAT["body"], "no_repeat_ngram_size": 2}}, "no_repeat_ngram_size out."),
        ({"body": {**CHAT["body"], "temprature": 0}}, "or call it temperature."),
        ({"body": {**CHAT["body"], "do_sample": True}}, "or call it temperature."),
        ({"body": {**CHAT["body"], "continuation": "x"}}, 'Its "continuation" is set'),
        ({"body": {**CHAT["body"], "add_special_tokens": True}}, "add_special_tokens"),
        ({"body": {**CHAT["body"], "top_logprobs": 2}}, 'and not "logprobs": true'),
        ({"body": {**CHAT["body"], "top_logprobs": 2, "logprobs": False}}, '"logprobs": true'),
        ({**TEXT, "custom_id": "one", "body": {"prompt": ["a", "b"]}}, "a list of 2 prompts"),
    ],
)
def test_requests_that_freight_cannot_answer(change: dict[str, Any], reason: str) -> None:
    row = parse({**CHAT, **change})
    assert row.row_id == "one" and row.batch == {}
    assert row.error is not None and reason in row.error


def test_values_that_change_nothing_are_no_requests() -> None:
    plain = {
        "best_of": 1,
        "bad_words": [],
        "skip_special_tokens": True,
        "stream": False,
        "tools": None,
        "chat_template_kwargs": {"tools": None},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {"run": "7"},
        "service_tier": "flex",
        "modalities": ["text"],
        "add_special_tokens": False,
        "anything": None,
    }
    row = parse({**CHAT, "body": {**CHAT["body"], **plain}})
    assert row.error is None and not row.template_values and not row.unread


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [(["a"], "a", None), ([[5, 6]], None, [5, 6]), ([5, 6], None, [5, 6]), ("a", "a", None)],
)
def test_completions_take_a_list_of_one_prompt(prompt: object, text: object, ids: object) -> None:
    row = parse({**TEXT, "body": {"model": "m", "prompt": prompt, "add_special_tokens": True}})
    assert (row.error, row.text) == (None, text)
    assert (row.token_ids and [*row.token_ids]) == ids


def test_scores_of_a_prompt_are_in_the_answer() -> None:
    output = CompletionOutput(text="a", token_ids=(3,), finish_reason="stop")
    scores = (None, Logprob(token_id=4, text="b", logprob=-2.0, rank=2))
    answer = Completion(index=6, num_prompt_tokens=2, outputs=(output,), prompt_logprobs=scores)
    row = json.loads(batch_row("x", {"kind": "chat", "model": ""}, answer))
    first, second = row["response"]["body"]["prompt_logprobs"]
    assert first is None and (second["token"], second["logprob"]) == ("b", -2.0)


def test_a_template_is_given_what_a_row_sets_for_it(tmp_path: Path, model_dir: Path) -> None:
    """As in vLLM, in rows and in bodies; the values may be any JSON."""
    path = tmp_path / "model"
    shutil.copytree(model_dir, path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }} {{ mood | default('') }}")
    tokenizer = Tokenizer(path)
    sad = {"chat_template_kwargs": {"mood": "sad", "unknown": {"a": [1]}}}
    body = {**CHAT["body"], **sad}
    rows = [CHAT, {**CHAT, "body": body}, {"messages": body["messages"], **sad}]
    run(tmp_path, rows, tokenizer)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = ["the cat ", "the cat sad"]
    plain, filled = map(len, tokenizer.encode_batch(texts, add_special_tokens=False))
    assert plain < filled
    assert answers[0]["response"]["body"]["usage"]["prompt_tokens"] == plain
    assert answers[1]["response"]["body"]["usage"]["prompt_tokens"] == filled
    assert answers[2]["prompt_tokens"] == filled


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "integer"}},
                }
            },
            {"json": {"type": "integer"}},
        ),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "text"}}, {}),
    ],
)
def test_answers_may_have_to_look_like_something(
    given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """By OpenAI's name, vLLM's and its older ones; a row may also do without what all have."""
    body = {**CHAT["body"], "response_format": None, **given}
    row = parse({**CHAT, "body": body})
    assert row.error is None and row.overrides["structured_outputs"] == wanted
    assert not row.unread
    defaults = SamplingParams(structured_outputs={"regex": "b"})
    own = replace(defaults, **row.overrides).structured_outputs
    assert own == SamplingParams(structured_outputs=wanted).structured_outputs


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"response_format": {"type": "xml"}}, '"json_object"'),
        ({"response_format": None, "guided_json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"guided_regex": "a"}, "they differ"),
        ({"response_format": None, "structured_outputs": "a"}, "It must be an object"),
    ],
)
def test_forms_of_answers_that_cannot_be_used(given: dict[str, Any], reason: str) -> None:
    row = parse({**CHAT, "body": {**CHAT["body"], **given}})
    assert row.error is not None and reason in row.error


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({**CHAT, "custom_id": 5}, 'It has "url", .* "custom_id" is a number. .* a string there'),
        ({**CHAT, "custom_id": None}, 'It has "url", .* and no "custom_id"'),
        ({"body": CHAT["body"]}, 'It has "body", .* and no "custom_id"'),
        ({"url": "/v1/completions", "method": "POST"}, 'It has "url", .* and no "custom_id"'),
        ({"url": "https://example.org", "text": "a page"}, 'neither of "prompt" and "messages"'),
        ({"body": "of a letter", "text": "a page"}, 'neither of "prompt" and "messages"'),
        ({"custom_id": 5, "text": "the cat"}, 'neither of "prompt" and "messages"'),
        ({"text": "the cat"}, 'neither of "prompt" and "messages"'),
    ],
)
def test_lines_without_a_usable_custom_id(record: dict[str, Any], reason: str) -> None:
    row = parse({**record, "id": "mine"})
    assert row.error is not None and re.search(reason, row.error)
    assert row.batch is None and row.row_id == "mine"
    assert row.is_foreign == ("text" not in record)


def test_a_row_may_have_a_custom_id_of_its_own() -> None:
    row = parse({"custom_id": 5, "prompt": "the cat", "url": "https://example.org"})
    assert (row.batch, row.text, row.row_id, row.error) == (None, "the cat", 5, None)
    row = parse({"custom_id": "x", "prompt": "the cat"})
    assert (row.batch, row.text, row.row_id, row.unread) == (None, "the cat", "x", ["custom_id"])
    row = parse({"custom_id": "x", "prompt": "the cat", "id": "y"})
    assert row.row_id == "y"
    row = parse({"custom_id": True, "prompt": "the cat"})
    assert (row.row_id, row.error) == (None, None)


def test_lines_that_cannot_be_read_are_answered_as_those_beside_them(tmp_path: Path) -> None:
    """In a batch file they are lines of a batch output, also before the first that can be read."""
    nameless = {key: value for key, value in TEXT.items() if key != "custom_id"}
    lines = [
        "{",
        json.dumps(TEXT),
        "[]",
        json.dumps(nameless),
        json.dumps({**TEXT, "custom_id": 7}),
    ]
    broken = [*lines, json.dumps({"prompt": 5, "id": "plain"}), "\xff"]
    first = ["{"] * 600  # more than are read at once
    (tmp_path / "in.jsonl").write_bytes("\n".join([*first, *broken]).encode("latin-1"))
    report = run_file(tmp_path, None)
    assert (report.num_rows, report.num_failed) == (607, 606)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert all(row["custom_id"] is None and row["error"]["message"] for row in rows[:600])
    rows = rows[600:]
    answered, plain = rows.pop(1), rows.pop(5 - 1)
    assert answered["custom_id"] == "two" and answered["error"] is None
    assert set(plain) == {"id", "error"}
    assert [row["custom_id"] for row in rows] == [None, None, None, 7, None]
    assert [row["id"] for row in rows] == [f"batch_req_{600 + index}" for index in (0, 2, 3, 4, 6)]
    for row in rows:
        assert row["response"] is None and row["error"]["message"].startswith("Line ")


def test_lines_that_cannot_be_read_beside_plain_rows_are_plain(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": [1]}\n{\n')
    run_file(tmp_path, None)
    _, row = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert set(row) == {"id", "error"} and row["id"] == 1
