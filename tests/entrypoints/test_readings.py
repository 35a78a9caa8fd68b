"""Models that embed or label, by the command and from Python, held against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from freight import LLM
from freight.entrypoints.cli import main
from freight.errors import InputError

from ..jobs.tiny_model import write_tiny_tokenizer
from ..runtime.tiny import SIZES

TEXTS = ["the cat sat", "freight trains move the most per dollar", "日本", "mat"]


def save(kind: Any, directory: Path, **changes: Any) -> PreTrainedModel:
    config: PretrainedConfig = Qwen3Config(**SIZES, head_dim=16, pad_token_id=0, **changes)
    torch.manual_seed(3)
    model: PreTrainedModel = kind.from_config(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4.0 if weights.dim() > 1 else 1.0)
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return model


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("embedder")
    return directory, save(AutoModel, directory)


@pytest.fixture(scope="module")
def labeller(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("labeller")
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    return directory, save(AutoModelForSequenceClassification, directory, id2label=labels)


def ids_of(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)


def last(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        made = model(torch.tensor([ids]))
    own = made.logits[0] if hasattr(made, "logits") else made.last_hidden_state[0, -1]
    return np.asarray(own.numpy())


def test_embeddings_from_python(embedder: tuple[Path, PreTrainedModel]) -> None:
    directory, model = embedder
    with LLM(directory, device="cpu", dtype="float32") as llm:
        ids = [ids_of(llm, text) for text in TEXTS]
        made = list(llm.embed([*TEXTS, {"prompt_token_ids": [5, 6]}]))
        cut = list(llm.embed(ids[0], dimensions=5))
        with pytest.raises(InputError, match="no odds of a next token"):
            llm.generate("a")
        with pytest.raises(InputError, match="no odds of a next token"):
            llm.loglikelihood([("a", "b")])
        with pytest.raises(InputError, match="Scores of labels were asked for"):
            llm.classify("a")
        with pytest.raises(InputError, match="embeddings have 64"):
            llm.embed("a", dimensions=65)
    assert [own.index for own in made] == [0, 1, 2, 3, 4]
    assert [own.num_prompt_tokens for own in made] == [*map(len, ids), 2]
    for own, row in zip(made, [*ids, [5, 6]], strict=True):
        expected = last(model, row)
        np.testing.assert_allclose(own.embedding, expected / np.linalg.norm(expected), atol=1e-5)
    expected = last(model, ids[0])[:5]
    np.testing.assert_allclose(cut[0].embedding, expected / np.linalg.norm(expected), atol=1e-5)


def test_labels_from_python(labeller: tuple[Path, PreTrainedModel]) -> None:
    directory, model = labeller
    messages = [{"role": "user", "content": "the cat"}]
    with LLM(directory, device="cpu", dtype="float32") as llm:
        assert llm.tokenizer is not None
        chat = llm.tokenizer.render_chat(messages, {"add_generation_prompt": False})
        rows = [*(ids_of(llm, text) for text in TEXTS)]
        rows.append(llm.tokenizer.encode_batch([chat], add_special_tokens=False)[0])
        made = list(llm.classify([*TEXTS, {"messages": messages}]))
        with pytest.raises(InputError, match="Embeddings were asked for"):
            llm.embed("a")
    for own, row in zip(made, rows, strict=True):
        expected = last(model, row)
        np.testing.assert_allclose(own.logits, expected, atol=1e-5)
        np.testing.assert_allclose(own.probs, torch.tensor(expected).softmax(0).numpy(), atol=1e-5)
        assert own.label == ("no", "perhaps", "yes")[int(expected.argmax())]
    with LLM(directory, device="cpu", dtype="float32", task="embed") as llm:
        (own,) = llm.embed(rows[0])
    inner = model.model(torch.tensor([rows[0]])).last_hidden_state[0, -1].detach().numpy()
    np.testing.assert_allclose(own.embedding, inner / np.linalg.norm(inner), atol=1e-5)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command(
    embedder: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = embedder
    rows, out = write(tmp_path / "in.jsonl", [{"prompt": own} for own in TEXTS]), tmp_path / "out"
    flags = ["run", rows, "-m", str(directory), "-o", str(out), "--dtype", "float32"]
    flags += ["--device", "cpu"]
    assert main([*flags, "--dimensions", "3"]) == 0
    told = capsys.readouterr().err
    assert "4 answered" in told and "prompt token/s" in told and "generated" not in told
    with LLM(directory, device="cpu", dtype="float32") as llm:
        made = list(llm.embed(TEXTS, dimensions=3))
    for row, own in zip(read(out), made, strict=True):
        np.testing.assert_allclose(row["embedding"], own.embedding, atol=1e-6)
    # Rows of other dimensions would be another job's.
    assert main(flags) == 1
    assert "its form was" in capsys.readouterr().err
    assert main([*flags, "--dimensions", "3"]) == 0
    assert "already complete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "0.5"], "temperature=0.5 was given"),
        (["--max-tokens", "3"], "no token is chosen"),
        (["--dimensions", "65"], "embeddings have 64"),
        (["--encoding-format", "hex"], "float, base64"),
        (["--task", "classify"], "has none, by its config.json"),
        (["--task", "rerank"], "auto, generate, embed"),
    ],
    ids=" ".join,
)
def test_what_is_refused(
    flags: list[str],
    words: str,
    embedder: tuple[Path, PreTrainedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out"
    assert main(["run", rows, "-m", str(embedder[0]), "-o", str(out), *flags]) == 2
    assert words in capsys.readouterr().err and not out.exists()


def test_models_that_generate_take_no_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out"
    assert main(["run", rows, "-m", "demo", "-o", str(out), "--dimensions", "3"]) == 2
    assert "dimensions=3 was given" in capsys.readouterr().err
    lines = write(
        tmp_path / "lines.jsonl",
        [{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}],
    )
    assert main(["run", lines, "-m", "demo", "-o", str(out)]) == 3
    assert "pass --task embed" in read(out)[0]["error"]["message"]


def test_plans(embedder: tuple[Path, PreTrainedModel], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--machine", "l4", "-m"]
    assert main([*flags, "llama-3-8b", "--task", "embed"]) == 0
    told = capsys.readouterr().out
    assert "for embeddings" in told and "1000 rows of 512 tokens" in told and "row/s" in told
    assert main([*flags, str(embedder[0])]) == 0
    assert "for embeddings" in capsys.readouterr().out
    assert main([*flags, "llama-3-8b", "--task", "embed", "--workload", "512:32"]) == 2
    assert "Write it like 512:1" in capsys.readouterr().err


def test_what_needs_odds_refuses(
    labeller: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write(tmp_path / "text.jsonl", [{"prompt": "a", "answer": "b"}])
    assert main(["eval", "-m", str(labeller[0]), "--exact-match", text]) == 2
    assert "makes scores of labels" in capsys.readouterr().err
    bench = ["bench", "offload", "--model", str(labeller[0]), "--shape", "8:4", "--rows", "2"]
    assert main(bench) == 2
    assert "makes scores of labels" in capsys.readouterr().err
