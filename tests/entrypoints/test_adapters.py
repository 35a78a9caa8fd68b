"""Adapters by the command and from Python, held against PEFT with the model in the package, whose
weights have 16 bits: sums are rounded to these.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from freight import LLM, SamplingParams
from freight.demo import MODEL_DIR
from freight.entrypoints.cli import main
from freight.entrypoints.harness_model import HarnessModel

TEXTS = ["the cat sat", "one two three", "a"]
WORDS = {"max_tokens": 6, "ignore_eos": True}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def train(directory: Path, kind: Any, task: str, **more: Any) -> PreTrainedModel:
    """A random adapter of the demo model, saved in ``directory``; both together, as PEFT merges
    them."""
    model = kind.from_pretrained(MODEL_DIR, dtype=torch.float32, **more)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=task)
    if task != "CAUSAL_LM":
        config.target_modules = ["q_proj", "v_proj", "down_proj"]
    peft = get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    peft.save_pretrained(directory)
    merged: PreTrainedModel = peft.merge_and_unload()
    with torch.no_grad():
        for name, weights in merged.named_parameters():
            if "score" not in name:
                weights.copy_(weights.bfloat16().float())
    return merged.eval()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("adapter")
    return directory, train(directory, AutoModelForCausalLM, "CAUSAL_LM")


def ids_of(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)


def greedy(model: Any, ids: list[int]) -> list[int]:
    own = list(ids)
    with torch.inference_mode():
        for _ in range(WORDS["max_tokens"]):
            own.append(int(model(torch.tensor([own])).logits[0, -1].argmax()))
    return own[len(ids) :]


def test_answers_from_python(adapter: tuple[Path, PreTrainedModel]) -> None:
    directory, merged = adapter
    for given in ({"model": "demo", "lora": directory}, {"model": directory}):
        with LLM(**given, dtype="float32") as llm:  # type: ignore[arg-type]
            answers = list(llm.generate(TEXTS, SamplingParams(**WORDS)))  # type: ignore[arg-type]
            expected = [greedy(merged, ids_of(llm, text)) for text in TEXTS]
        assert [list(answer.token_ids) for answer in answers] == expected
    with LLM("demo", dtype="float32") as plain:
        others = list(plain.generate(TEXTS, SamplingParams(**WORDS)))  # type: ignore[arg-type]
    assert [list(other.token_ids) for other in others] != expected


def test_the_harness_calls_it_peft(adapter: tuple[Path, PreTrainedModel]) -> None:
    directory, _ = adapter
    pairs = [("the cat", " sat"), ("one", " two")]
    with LLM("demo", lora=directory) as llm:
        expected = llm.loglikelihood(pairs)
    model = HarnessModel("demo", peft=str(directory))
    assert model.llm.loglikelihood(pairs) == expected


def test_a_job(
    adapter: tuple[Path, PreTrainedModel], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, merged = adapter
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    flags = ["run", str(source), "-o", str(sink), "-m", "demo", "--dtype", "float32"]
    flags += ["--max-tokens", str(WORDS["max_tokens"]), "--ignore-eos"]
    assert main([*flags, "--lora", str(directory)]) == 0
    with LLM("demo") as llm:
        assert llm.tokenizer is not None
        expected = [llm.tokenizer.decode_answer(greedy(merged, ids_of(llm, t))) for t in TEXTS]
    rows = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [row["text"] for row in rows] == expected
    capfd.readouterr()
    # Answers of another adapter, or of none, are other answers.
    assert main(flags) == 1
    assert "the weights" in capfd.readouterr().err
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in directory.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    said = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps({**said, "lora_alpha": 9}))
    assert main([*flags, "--lora", str(changed)]) == 1
    assert "the model's configuration" in capfd.readouterr().err


def test_what_is_kept_is_made_ahead(
    adapter: tuple[Path, PreTrainedModel], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, _ = adapter
    flags = ["compress", "-m", "demo", "--lora", str(directory), "--compressed-dir", str(tmp_path)]
    assert main(flags) == 0
    assert "adding the adapter to the weights, once, into" in capfd.readouterr().err
    assert main([*flags, "--weight-bits", "4"]) == 0
    assert "compressing the weights (4 bits" in capfd.readouterr().err
    assert main(flags) == 0
    assert capfd.readouterr().err == ""
    assert len(list(tmp_path.glob("*/weights.bin"))) == 2


@pytest.mark.parametrize("count", [1, 3])
def test_labels_that_it_was_trained_for(count: int, tmp_path: Path) -> None:
    """The model that it was trained on has none: only its own score says how many there are."""
    kind = AutoModelForSequenceClassification
    merged = train(tmp_path, kind, "SEQ_CLS", num_labels=count)
    with LLM("demo", lora=tmp_path, dtype="float32") as llm:
        assert llm.makes == "scores of labels"
        answers = list(llm.classify(TEXTS))
        ids = [ids_of(llm, text) for text in TEXTS]
    for answer, own in zip(answers, ids, strict=True):
        with torch.inference_mode():
            hidden = merged.model(torch.tensor([own])).last_hidden_state[0, -1]
            expected = merged.score(hidden)
        np.testing.assert_allclose(answer.logits, expected.numpy(), atol=1e-3, rtol=1e-3)
        assert len(answer.logits) == count and (answer.label is None) == (count == 1)


def test_embeddings_that_it_was_trained_for(tmp_path: Path) -> None:
    merged = train(tmp_path, AutoModel, "FEATURE_EXTRACTION")
    with LLM("demo", lora=tmp_path, dtype="float32") as llm:
        answers = list(llm.embed(TEXTS))
        ids = [ids_of(llm, text) for text in TEXTS]
    for answer, own in zip(answers, ids, strict=True):
        with torch.inference_mode():
            hidden = merged(torch.tensor([own])).last_hidden_state[0, -1]
        expected = (hidden / hidden.norm()).numpy()
        np.testing.assert_allclose(answer.embedding, expected, atol=2e-4)


def test_a_plan_counts_what_is_kept(
    adapter: tuple[Path, PreTrainedModel], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, _ = adapter
    own, base = str(directory), str(MODEL_DIR)
    for model, is_kept in (([own], True), ([base], False), ([base, "--lora", own], True)):
        assert main(["plan", "-m", *model, "--machine", "t4", "--rows", "10"]) == 0
        assert ("compressed copy" in capfd.readouterr().out) == is_kept
