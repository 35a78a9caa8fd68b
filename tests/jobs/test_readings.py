"""Rows of models that embed or label: what they may say, and what becomes of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.jobs.fakes import FakeEngine, Watcher

from freight.errors import InputError
from freight.jobs.formats import RowLimits
from freight.jobs.readings import (
    READING,
    Classification,
    Embedding,
    Form,
    Reading,
    read_completion,
    reading_record,
)
from freight.jobs.runner import JobSpec, run_job
from freight.model.readout import PROBLEMS, Readout
from freight.plan.workload import Workload
from freight.runtime.request import Completion, CompletionOutput, Request
from freight.runtime.tokenizer import Tokenizer

SIZE = 6
EMBED = Reading(readout=Readout(), size=SIZE, form=Form())
LABEL = Reading(readout=Readout(labels=("bad", "good"), problem=PROBLEMS[1]), size=2, form=Form())


def vector_of(prompt_ids: Any, size: int) -> np.ndarray:
    generator = np.random.default_rng([*prompt_ids])
    return generator.normal(size=size).astype(np.float32)


class Reader(FakeEngine):
    """An engine whose vectors follow from the tokens."""

    size = SIZE

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        assert workload.max_new_tokens == 1 and not workload.ends_early
        self.prompts: dict[int, list[int]] = {}

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        for request in requests:
            assert request.params.max_tokens == 1 and request.params.temperature == 0
            self.prompts[request.index] = [*request.prompt_ids]
            yield completion(request.index, request.prompt_ids, self.size)


class Labeller(Reader):
    size = 2


def completion(index: int, prompt_ids: Any, size: int) -> Completion:
    return Completion(
        index=index,
        num_prompt_tokens=len(prompt_ids),
        outputs=(CompletionOutput(text="", token_ids=(), finish_reason="stop"),),
        vector=vector_of(prompt_ids, size),
    )


def run(
    directory: Path,
    rows: list[dict[str, Any]],
    tokenizer: Tokenizer | None,
    reading: Reading = EMBED,
) -> tuple[list[dict[str, Any]], Watcher, Reader]:
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    watcher, engines = Watcher(), list[Reader]()

    def build(workload: Workload) -> Reader:
        engines.append((Labeller if reading.readout.labels else Reader)(workload))
        return engines[-1]

    run_job(
        JobSpec(source=directory / "in.jsonl", sink=directory / "out.jsonl", sampling=READING),
        tokenizer=tokenizer,
        limits=RowLimits(max_positions=12, vocab_size=320, reading=reading),
        identity={},
        build_engine=build,
        observer=watcher,
    )
    written = (directory / "out.jsonl").read_text().splitlines()
    return [json.loads(line) for line in written], watcher, engines[0]


def unit(vector: np.ndarray) -> np.ndarray:
    wide = vector.astype(np.float64)
    return wide / np.sqrt((wide * wide).sum())


def test_rows_become_embeddings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ids = [[3, 4, 5], [6] * 12, [7] * 13, [8, 9], [9, 9]]
    rows: list[dict[str, Any]] = [{"prompt": own} for own in ids]
    rows[0]["id"] = "first"
    rows[3]["dimensions"] = 3
    rows[4] |= {"encoding_format": "base64", "dimensions": 2, "max_tokens": 9, "color": "red"}
    made, watcher, _ = run(tmp_path, rows, tokenizer)
    assert [row["id"] for row in made] == ["first", 1, 2, 3, 4]
    assert made[0].keys() == {"id", "embedding", "prompt_tokens"} and made[1]["prompt_tokens"] == 12
    for number, count in ((0, SIZE), (1, SIZE), (3, 3)):
        expected = unit(vector_of(ids[number], SIZE)[:count])
        found = np.array(made[number]["embedding"])
        assert found.shape == (count,)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    decoded = np.frombuffer(base64.b64decode(made[4]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(decoded, unit(vector_of(ids[4], SIZE)[:2]), rtol=1e-6)
    # All positions may be the prompt's, and no more.
    assert "The text has 13 tokens" in made[2]["error"] and "12 positions." in made[2]["error"]
    told = " ".join(watcher.remarks)
    assert "max_tokens (no token is chosen where embeddings are made) in 1 of 5" in told
    assert "color" not in told


def test_numbers_are_those_of_float32() -> None:
    """As few digits as give back the same number."""
    answer = read_completion(completion(0, [1, 2], 500), Readout(is_unit=False), Form())
    assert isinstance(answer, Embedding)
    text = json.dumps(reading_record(answer, Form(), is_named=True))
    again = np.array(json.loads(text)["embedding"], dtype=np.float32)
    assert (again == vector_of([1, 2], 500)).all() and len(text) < 500 * 16


def test_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": [3, own]} for own in range(3, 9)]
    made, _, _ = run(tmp_path, rows, tokenizer, LABEL)
    for row, given in zip(made, rows, strict=True):
        logits = vector_of(given["prompt"], 2)
        assert row.keys() == {"id", "label", "probs", "logits", "prompt_tokens"}
        assert (np.array(row["logits"], dtype=np.float32) == logits).all()
        odds = np.exp(logits.astype(np.float64))
        assert [*row["probs"]] == ["bad", "good"]
        np.testing.assert_allclose([*row["probs"].values()], odds / odds.sum(), rtol=1e-5)
        assert row["label"] == ("bad", "good")[int(logits[1] > logits[0])]
    assert {row["label"] for row in made} == {"bad", "good"}


def test_labels_of_other_problems() -> None:
    made = completion(0, [5, 6], 2)
    assert made.vector is not None
    several = read_completion(made, Readout(labels=("a", "b"), problem=PROBLEMS[2]), Form())
    assert isinstance(several, Classification) and several.label is None
    np.testing.assert_allclose(several.probs, 1 / (1 + np.exp(-made.vector)), rtol=1e-5)
    far = replace(made, vector=np.array([-1e4, 1e4], dtype=np.float32))
    certain = read_completion(far, Readout(labels=("a", "b"), problem=PROBLEMS[2]), Form())
    assert isinstance(certain, Classification) and certain.probs is not None
    assert certain.probs.tolist() == [0, 1]
    reward = read_completion(made, Readout(labels=("a", "b")), Form())
    assert isinstance(reward, Classification) and reward.probs is None and reward.label is None
    assert (reward.logits == made.vector).all()
    assert several.labels == ("a", "b") and reward.score is None
    one = replace(made, vector=made.vector[:1])
    alone = read_completion(one, Readout(labels=("LABEL_0",)), Form())
    assert isinstance(alone, Classification)
    assert alone.score == pytest.approx(float(made.vector[0]), rel=1e-7)
    record = {"score": alone.score, "logits": [alone.score]}
    assert reading_record(alone, Form(), is_named=True) == record


def test_chats_end_where_an_answer_would_begin(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}]
    _, _, engine = run(tmp_path, [{"messages": messages}], tokenizer)
    text = tokenizer.render_chat(messages, {"add_generation_prompt": False})
    assert "answer" not in text
    assert engine.prompts[0] == tokenizer.encode_batch([text], add_special_tokens=False)[0]


def line(url: str, body: dict[str, Any], name: str = "x") -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}


def test_a_batch_file_of_embeddings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        line("/v1/embeddings", {"input": "the cat", "user": "u"}, "one"),
        line("/v1/embeddings", {"input": [[3, 4]], "encoding_format": "base64"}, "two"),
        line("/v1/embeddings", {"input": ["a", "b"]}),
        line("/v1/embeddings", {"input": "a", "temperature": 1}),
        line("/v1/embeddings", {"input": "a", "dimensions": 7}),
        line("/v1/embeddings", {}),
        line("/v1/completions", {"prompt": "a"}),
        line("/classify", {"input": "a"}),
    ]
    made, _, engine = run(tmp_path, rows, tokenizer)
    first = made[0]["response"]["body"]
    expected = unit(vector_of(engine.prompts[0], SIZE))
    np.testing.assert_allclose(first["data"][0].pop("embedding"), expected, rtol=1e-6)
    count = len(engine.prompts[0])
    assert made[0]["custom_id"] == "one" and made[0]["error"] is None
    assert first == {
        "object": "list",
        "data": [{"index": 0, "object": "embedding"}],
        "model": "m",
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    assert isinstance(made[1]["response"]["body"]["data"][0]["embedding"], str)
    told = [row["error"]["message"] for row in made[2:]]
    words = (
        'Its "input" is a list of 2 texts',
        'Its "temperature" is set',
        "have 6",
        'Such a body has "input"',
        "The model makes embeddings",
        "The model makes embeddings",
    )
    assert all(own in text for own, text in zip(words, told, strict=True))


def test_bodies_are_spoken_of_by_their_own_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        line("/v1/embeddings", {"input": own})
        for own in (5, [], [2] * 13, [900], "\ud800", [1, "a"])
    ]
    made, _, _ = run(tmp_path, [*rows, line("/v1/embeddings", {"input": [3]})], tokenizer)
    told = [row["error"]["message"] for row in made[:-1]]
    assert not any("prompt" in own.lower() for own in told)
    assert all(own in told[number] for number, own in ((0, '"input"'), (2, "13 tokens")))


def test_rows_may_call_texts_as_the_api_does(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows: list[dict[str, Any]] = [
        {"input": "the cat"},
        {"prompt": "the cat"},
        {"input": ["the cat"], "custom_id": "x"},
        {"input": [3, 4]},
        {"prompt": [3, 4], "input": "a column of the user's own"},
        {"text": "the cat"},  # as where answers are generated
        {"input": "a", "chat_template_kwargs": {"b": 1}},
        {"input": 5},
    ]
    made, _, engine = run(tmp_path, rows, tokenizer)
    assert engine.prompts[0] == engine.prompts[1] == engine.prompts[2]
    assert engine.prompts[3] == engine.prompts[4] == [3, 4] and made[2]["id"] == "x"
    assert 'none of "prompt", "input" and "messages"' in made[5]["error"]
    assert 'and an "input"' in made[6]["error"] and '"input"' in made[7]["error"]


def test_texts_are_read_behind_the_models_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As the library does by which the model was published; token ids and chats are taken as they
    are."""
    chat = {"messages": [{"role": "user", "content": "cat"}]}
    own = [{"prompt": "cat"}, {"input": "mat"}, {"prompt": [3, 4]}, chat]
    rows = [*own, line("/v1/embeddings", {"input": "cat"})]
    reading = replace(EMBED, readout=Readout(prompt="the "))
    _, watcher, found = run(tmp_path, rows, tokenizer, reading)
    changed = [{"prompt": "the cat"}, {"input": "the mat"}, {"prompt": [3, 4]}, chat]
    rows = [*changed, line("/v1/embeddings", {"input": "the cat"})]
    plain = tmp_path / "plain"
    plain.mkdir()
    _, silent, expected = run(plain, rows, tokenizer)
    assert found.prompts == expected.prompts
    (told,) = [own for own in watcher.remarks if "behind the prompt" in own]
    assert "3 of 5 rows" in told and '"the "' in told
    assert not any("behind the prompt" in own for own in silent.remarks)


def test_texts_that_the_models_makers_would_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    reading = replace(EMBED, readout=Readout(most_tokens=4))
    text = tokenizer.decode([3, 4, 5, 6, 7, 8])
    made, _, _ = run(
        tmp_path, [{"input": text}, {"prompt": [3] * 5}, {"input": "a"}], tokenizer, reading
    )
    assert "no more than 4 are read" in made[0]["error"]
    assert "embedding" in made[1] and "embedding" in made[2]


def test_a_batch_file_of_classes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [line("/classify", {"input": "the cat"}), line("/v1/embeddings", {"input": "a"})]
    made, _, _ = run(tmp_path, rows, tokenizer, LABEL)
    data = made[0]["response"]["body"]["data"]
    assert isinstance(data[0]["probs"], list)  # as vLLM has it
    assert data[0].keys() == {"index", "num_classes", "label", "probs", "logits"}
    assert "The model makes scores of labels" in made[1]["error"]["message"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [1], "dimensions": 0},
        {"prompt": [1], "dimensions": 7},
        {"prompt": [1], "dimensions": "3"},
        {"prompt": [1], "encoding_format": "hex"},
        {"prompt": [1], "encoding_format": ["float"]},
        {"prompt": []},
        {"prompt": [1], "continuation": [2]},
        {"text": "a"},
    ],
    ids=str,
)
def test_rows_that_cannot_be(row: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer) -> None:
    made, _, _ = run(tmp_path, [row, {"prompt": [1]}], tokenizer)
    assert "error" in made[0] and "embedding" in made[1]


def test_forms_of_a_models_files() -> None:
    """Dimensions that nobody asked for are those that they say, and no more than there are."""
    short, long = Readout(dimensions=4), Readout(dimensions=400)
    assert Form().stated(Readout(), 6) == Form()
    assert Form().stated(short, 6) == Form(dimensions=4)
    assert Form().stated(long, 6) == Form(dimensions=6)
    assert Form(dimensions=6).stated(short, 6) == Form(dimensions=6)
    assert "(" not in Form(dimensions=4).description


def test_forms() -> None:
    for wrong in (0, 4.0, "4", True):
        with pytest.raises(InputError, match="whole number"):
            Form(dimensions=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        Form(encoding_format="hex")
    Form(dimensions=6).check(6)
    with pytest.raises(InputError):
        Form(dimensions=7).check(6)
