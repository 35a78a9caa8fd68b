"""What Ray's actors do with batches; with Ray where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freight import LLM, SamplingParams
from freight.demo import EXAMPLES
from freight.entrypoints.ray_data import BatchAnswerer
from freight.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
ROWS = [json.loads(line) for line in EXAMPLES.read_text().splitlines()[:12]]
MACHINE: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


def column(values: list[Any]) -> np.ndarray:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def batch(rows: list[dict[str, Any]], *names: str) -> dict[str, np.ndarray]:
    return {name: column([row[name] for row in rows]) for name in ("id", "prompt", *names)}


def ask(own: BatchAnswerer, rows: list[dict[str, Any]], size: int, *names: str) -> list[str]:
    """Texts, the rows having come in batches of a size."""
    return [
        text
        for first in range(0, len(rows), size)
        for text in own(batch(rows[first : first + size], *names))["text"]
    ]


def test_embeddings_are_columns() -> None:
    own = BatchAnswerer("demo", task="embed", **MACHINE)
    given = batch([*ROWS[:3], {"id": "empty", "prompt": ""}])
    with LLM("demo", task="embed", **MACHINE) as llm:
        wanted = [*llm.embed([row["prompt"] for row in ROWS[:3]])]
    found = own(given)
    assert {*found} == {"id", "prompt", "embedding", "prompt_tokens", "error"}
    for row, answer in zip(found["embedding"], wanted, strict=False):
        np.testing.assert_allclose(row, answer.embedding, atol=1e-5)
    assert found["embedding"][3] is None and "empty" in found["error"][3]
    assert [*found["prompt_tokens"][:3]] == [answer.num_prompt_tokens for answer in wanted]
    chats = {"messages": column([[{"role": "user", "content": "3 km"}]])}
    assert found["embedding"][0].shape == own(chats)["embedding"][0].shape
    with pytest.raises(InputError, match="makes embeddings"):
        BatchAnswerer("demo", task="embed", params={"max_tokens": 3}, **MACHINE)


def test_answers_are_those_of_the_model() -> None:
    """A column of a parameter's name sets it; own columns stay."""
    own = BatchAnswerer("demo", **MACHINE)
    params = [SamplingParams(max_tokens=row["max_tokens"]) for row in ROWS]
    with LLM("demo", **MACHINE) as llm:
        wanted = [*llm.generate([row["prompt"] for row in ROWS], params)]
    given = batch(ROWS)
    given["max_tokens"] = np.array([row["max_tokens"] for row in ROWS], dtype=float)
    found = own(given)
    assert [*found["id"]] == [row["id"] for row in ROWS]
    assert [*found["text"]] == [answer.text for answer in wanted]
    assert [*found["prompt_tokens"]] == [answer.num_prompt_tokens for answer in wanted]
    assert [*found["completion_tokens"]] == [answer.num_new_tokens for answer in wanted]
    assert [*found["finish_reason"]] == [answer.finish_reason for answer in wanted]
    assert {*found["error"]} == {""} and "texts" not in found


def test_draws_do_not_depend_on_the_batch() -> None:
    rows = ROWS[:4]
    own = BatchAnswerer("demo", params={"max_tokens": 6, "temperature": 2.0, "seed": 4}, **MACHINE)
    other = BatchAnswerer("demo", params={"max_tokens": 6, "temperature": 2.0}, **MACHINE)
    wanted = ask(own, rows, 4)
    assert ask(own, rows, 2) == wanted == ask(own, rows[::-1], 3)[::-1]
    assert ask(other, rows, 4) != wanted
    same = [{**row, "prompt": ROWS[2]["prompt"], "seed": seed} for seed, row in enumerate(rows)]
    assert len({*ask(own, same, 4, "seed")}) > 1 == len({*ask(own, same, 4)})


def test_a_row_that_cannot_be_answered_says_why() -> None:
    """And no other row suffers; what is missing in a column is the default."""
    own = BatchAnswerer("demo", params={"max_tokens": 5}, **MACHINE)
    given = batch(ROWS[:4])
    given["max_tokens"] = np.array([5, np.nan, 0, 5])
    given["prompt"][3] = np.array([5, 10**6])
    found = own(given)
    assert [bool(error) for error in found["error"]] == [False, False, True, True]
    assert "max_tokens" in found["error"][2] and "1000000" in found["error"][3]
    assert [*found["text"][:2]] == ask(own, ROWS[:2], 2) and [*found["text"][2:]] == ["", ""]
    assert [*found["finish_reason"][2:]] == ["error", "error"]


def test_several_answers_to_one_prompt() -> None:
    own = BatchAnswerer("demo", params={"max_tokens": 4, "n": 3, "temperature": 1.5}, **MACHINE)
    found = own(batch(ROWS[:2]))
    assert [len(texts) for texts in found["texts"]] == [3, 3]
    assert [texts[0] for texts in found["texts"]] == [*found["text"]]


def test_what_has_no_column_is_refused() -> None:
    with pytest.raises(InputError, match="logprobs"):
        BatchAnswerer("demo", params={"logprobs": 2}, **MACHINE)
    with pytest.raises(InputError, match="question"):
        BatchAnswerer("demo", **MACHINE)({"question": column(["a"])})


def test_ray_shares_rows_out(tmp_path: Path) -> None:
    """The example, with two actors: each row once, as one model answers it."""
    pytest.importorskip("ray")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [str(ROOT / "examples" / "ray_dataset.py"), str(rows), str(tmp_path / "answers")]
    done = subprocess.run(
        [sys.executable, *command, "--cpus", "0.5", "--batch-size", "4"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [
        json.loads(line)
        for path in (tmp_path / "answers").iterdir()
        for line in path.read_text().splitlines()
    ]
    texts = ask(BatchAnswerer("demo", device="cpu"), ROWS, len(ROWS), "max_tokens")
    assert len(found) == len(ROWS)
    assert {row["id"]: row["text"] for row in found} == {
        row["id"]: text for row, text in zip(ROWS, texts, strict=True)
    }
