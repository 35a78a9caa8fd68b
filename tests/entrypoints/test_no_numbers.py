"""Models that compute no numbers for some rows, or for any: from the command, from Python, scored,
embedded, and what is left of a job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freight import LLM, SamplingParams
from freight.demo import MODEL_DIR
from freight.entrypoints.cli import main
from freight.entrypoints.harness_model import HarnessModel
from freight.entrypoints.ray_data import BatchAnswerer
from freight.errors import ModelError
from freight.jobs.journal import Journal

BAD = 65
"""A token that the model has no numbers for."""
GOOD_IDS, BAD_IDS = [3, 5, 8], [3, BAD, 8, 9]

Damage = Callable[[Any], None]


def damaged(directory: Path, damage: Damage) -> Path:
    """The model in the package with weights that are no numbers."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    head = model.get_output_embeddings().weight.detach().clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head)
    with torch.no_grad():
        damage(model)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(directory)
    return directory


def one_token(model: Any) -> None:
    model.model.embed_tokens.weight[BAD] = math.nan


def one_key(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight[3, 7] = math.nan


def overflowing(model: Any) -> None:
    model.lm_head.weight.mul_(1e38)


@pytest.fixture(scope="module")
def some_fail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged(tmp_path_factory.mktemp("some"), one_token)


def run(directory: Path, model: Path, rows: list[dict[str, Any]], *flags: str) -> int:
    source = directory / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(source), "--model", str(model), "--output", str(directory / "out.jsonl")]
    own = ["--max-tokens", "4", "--ignore-eos", "--dtype", "float32", *flags]
    return main(["run", *files, *own])


def answers(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--temperature", "1", "--n", "3"),
        ("--micro-batch-size", "2", "--admission", "zigzag"),
        ("--weights", "0/100"),
        ("--device", "sim", "--weights", "50/50/0", "--kv", "0/100/0"),
        ("--draft-tokens", "3"),
        ("--logprobs", "2"),
    ],
)
def test_such_rows_become_errors_and_no_others(
    flags: tuple[str, ...], some_fail: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": BAD_IDS if place % 3 == 1 else [*GOOD_IDS, place]} for place in range(12)]
    good = [row for row in rows if row["prompt"] != BAD_IDS]
    (tmp_path / "good").mkdir()
    assert run(tmp_path, some_fail, rows, *flags) == 0
    assert run(tmp_path / "good", some_fail, good, *flags) == 0
    found = answers(tmp_path)
    wrong = [row for row in found if "error" in row]
    assert [row["id"] for row in wrong] == [1, 4, 7, 10]
    assert all("is infinite, or no number" in row["error"] for row in wrong)
    if "--temperature" not in flags:  # a row's own seed is by its place
        alone = [row["text"] for row in answers(tmp_path / "good")]
        assert [row["text"] for row in found if "error" not in row] == alone
    assert run(tmp_path, some_fail, rows, *flags, "--fail-on-error") == 3


@pytest.mark.parametrize("damage", [one_key, overflowing])
@pytest.mark.parametrize("flags", [(), ("--device", "sim"), ("--admission", "zigzag")])
def test_a_model_that_computes_none_ends_the_run(
    damage: Damage,
    flags: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With nothing kept: the job begins anew once the weights are mended."""
    model = damaged(tmp_path / "model", damage)
    rows = [{"prompt": [*GOOD_IDS, place]} for place in range(40)]
    assert run(tmp_path, model, rows, *flags) == 1
    said = capsys.readouterr().err
    assert "all of them is infinite, or no number" in said and "Traceback" not in said
    assert not answers(tmp_path)


def test_a_job_that_has_answers_ends_with_a_row_that_fails(
    some_fail: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a run that goes on has none but such rows left."""
    rows = [{"prompt": GOOD_IDS}, {"prompt": BAD_IDS}]
    kept = Journal.append

    def until_failed(self: Journal, index: int, row: bytes, *, failed: bool = False) -> None:
        if failed:
            raise KeyboardInterrupt
        kept(self, index, row, failed=failed)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", until_failed)
        assert run(tmp_path, some_fail, rows) == 130
    assert run(tmp_path, some_fail, rows) == 0
    assert ["error" in row for row in answers(tmp_path)] == [False, True]


def test_batch_lines(some_fail: Path, tmp_path: Path) -> None:
    rows = [
        {
            "custom_id": f"own-{place}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": prompt, "max_tokens": 3},
        }
        for place, prompt in enumerate([GOOD_IDS, BAD_IDS])
    ]
    assert run(tmp_path, some_fail, rows) == 0
    good, bad = answers(tmp_path)
    assert good["error"] is None and good["response"]["status_code"] == 200
    assert bad["custom_id"] == "own-1" and bad["response"] is None
    assert bad["error"]["code"] == "server_error"


def test_from_python(some_fail: Path) -> None:
    prompts = [GOOD_IDS, BAD_IDS, GOOD_IDS]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM(some_fail, dtype="float32") as llm:
        found = list(llm.generate(prompts, params))
        assert [answer.finish_reason for answer in found] == ["length", "error", "length"]
        assert not found[1].text and found[0].token_ids == found[2].token_ids
        with pytest.raises(ModelError, match="for all of them is infinite"):
            list(llm.generate([BAD_IDS] * 2, params))
        scored = list(llm.score([([3], [5, 8]), ([3, BAD], [5, 8])]))
        assert [answer.has_failed for answer in scored] == [False, True]
        assert math.isfinite(scored[0].log_likelihood)


def test_what_needs_an_answer_to_each_row_ends(some_fail: Path) -> None:
    """A measure that left some out would be another one."""
    model = HarnessModel(pretrained=str(some_fail), dtype="float32")
    requests: list[Any] = [(None, [3], [5, 8]), (None, [3, BAD], [5, 8])]
    with pytest.raises(ModelError, match="Request 1 was to be answered"):
        model._loglikelihood_tokens(requests)
    with LLM(some_fail, dtype="float32", task="embed") as llm:
        (good,) = llm.embed([GOOD_IDS])
        assert np.isfinite(good.embedding).all()
        with pytest.raises(ModelError, match="Prompt 1 was to be answered"):
            list(llm.embed([GOOD_IDS, BAD_IDS]))


def test_embeddings_of_a_job(some_fail: Path, tmp_path: Path) -> None:
    rows = [{"prompt": GOOD_IDS}, {"prompt": BAD_IDS}]
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["run", str(source), "--model", str(some_fail), "--output", str(out)]
    assert main([*own, "--task", "embed", "--dtype", "float32"]) == 0
    assert ["error" in row for row in answers(tmp_path)] == [False, True]


def test_columns_of_a_batch(some_fail: Path) -> None:
    answerer = BatchAnswerer(
        some_fail, dtype="float32", params={"max_tokens": 3, "ignore_eos": True}
    )
    prompts = np.empty(2, dtype=object)
    prompts[:] = [GOOD_IDS, BAD_IDS]
    found = answerer({"prompt": prompts})
    assert [*found["finish_reason"]] == ["length", "error"]
    assert not found["error"][0] and "no number" in found["error"][1]
