"""Models that embed or label, by the command and from Python, held against transformers."""

from __future__ import annotations

import json
import shutil
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
from freight.entrypoints.ray_data import BatchAnswerer
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
        with pytest.raises(InputError, match="no odds of one"):
            llm.generate("a")
        with pytest.raises(InputError, match="no odds of one"):
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


def test_prompts_say_their_own_dimensions(embedder: tuple[Path, PreTrainedModel]) -> None:
    directory, model = embedder
    with LLM(directory, device="cpu", dtype="float32") as llm:
        ids = ids_of(llm, TEXTS[0])
        prompts = [{"prompt": TEXTS[0]}, {"prompt_token_ids": ids, "dimensions": 7}, TEXTS[0]]
        made = list(llm.embed([*prompts, {"prompt": ids, "dimensions": 64}], dimensions=5))
        for wrong in ({"dimensions": 65}, {"dimensions": "7"}, {"encoding_format": "base64"}):
            with pytest.raises(InputError, match=r"dimensions|encoding_format"):
                llm.embed([{"prompt": "a", **wrong}])
    expected = last(model, ids)
    for own, count in zip(made, (5, 7, 5, 64), strict=True):
        part = expected[:count]
        np.testing.assert_allclose(own.embedding, part / np.linalg.norm(part), atol=1e-5)


def test_chats_from_python(labeller: tuple[Path, PreTrainedModel]) -> None:
    """As ``LLM.chat`` takes them: one, or a list of them."""
    chats = [[{"role": "user", "content": text}] for text in TEXTS[:2]]
    with LLM(labeller[0], device="cpu", dtype="float32") as llm:
        expected = list(llm.classify([{"messages": own} for own in chats]))
        many, (one,) = list(llm.classify(chats)), llm.classify(chats[0])
    with LLM(labeller[0], device="cpu", dtype="float32", task="embed") as llm:
        (vector,) = llm.embed(chats[1])
        (same,) = llm.embed([{"messages": chats[1]}])
    np.testing.assert_allclose(vector.embedding, same.embedding, atol=1e-6)
    for own, other in zip([*many, one], [*expected, expected[0]], strict=True):
        np.testing.assert_allclose(own.logits, other.logits, atol=1e-6)


def test_a_model_that_was_published_to_embed(
    embedder: tuple[Path, PreTrainedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By files of sentence-transformers: its prompt is put before texts, and its dimensions are
    given where no others are asked for."""
    directory, model = tmp_path / "model", embedder[1]
    shutil.copytree(embedder[0], directory)
    (directory / "1_Pooling").mkdir()
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    said: dict[str, Any] = {
        "modules.json": [{"path": path, "type": f"models.{kind}"} for kind, path in kinds.items()],
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
        "sentence_bert_config.json": {"max_seq_length": 40},
        "config_sentence_transformers.json": {
            "prompts": {"query": "the mat "},
            "default_prompt_name": "query",
            "truncate_dim": 6,
        },
    }
    for name, content in said.items():
        (directory / name).write_text(json.dumps(content))
    given = [{"prompt": TEXTS[0]}, {"input": "cat " * 60}, {"prompt": [5, 6], "dimensions": 64}]
    rows, out = write(tmp_path / "in.jsonl", given), tmp_path / "out"
    flags = ["run", rows, "-m", str(directory), "-o", str(out), "--dtype", "float32"]
    assert main([*flags, "--device", "cpu"]) == 0
    assert 'prompt of the model\'s files, "the mat "' in capsys.readouterr().err
    with LLM(directory, device="cpu", dtype="float32") as llm:
        ids = ids_of(llm, "the mat " + TEXTS[0])
        (made,) = llm.embed(TEXTS[0])
        (whole,) = llm.embed(TEXTS[0], dimensions=64)
    assert "the mat " in caplog.text
    expected, written = last(model, ids), read(out)
    part = expected[:6] / np.linalg.norm(expected[:6])
    np.testing.assert_allclose(made.embedding, part, atol=1e-5)
    np.testing.assert_allclose(written[0]["embedding"], part, atol=1e-5)
    np.testing.assert_allclose(whole.embedding, expected / np.linalg.norm(expected), atol=1e-5)
    assert "no more than 40 are read" in written[1]["error"]
    expected = last(model, [5, 6])
    found = written[2]["embedding"]
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-5)
    # What was said of its texts is part of whose answers they are.
    stated = said["config_sentence_transformers.json"]
    name = "config_sentence_transformers.json"
    (directory / name).write_text(json.dumps({**stated, "default_prompt_name": None}))
    assert main([*flags, "--device", "cpu"]) == 1
    assert "what is made" in capsys.readouterr().err


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
    told = capsys.readouterr().err
    assert "its form was 3 dimensions, as float" in told and "Form(" not in told
    assert main([*flags, "--dimensions", "3"]) == 0
    assert "already complete" in capsys.readouterr().err


def test_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number is what people want of them: from Python, in a file, as a column of Ray's."""
    directory = tmp_path / "model"
    model = save(AutoModelForSequenceClassification, directory, num_labels=1)
    machine = {"device": "cpu", "dtype": "float32"}
    with LLM(directory, **machine) as llm:
        made = list(llm.classify(TEXTS))
        expected = [float(last(model, ids_of(llm, text))[0]) for text in TEXTS]
    rows, out = write(tmp_path / "in.jsonl", [{"prompt": own} for own in TEXTS]), tmp_path / "out"
    flags = ["--dtype", "float32", "--device", "cpu"]
    assert main(["run", rows, "-m", str(directory), "-o", str(out), *flags]) == 0
    columns = BatchAnswerer(directory, **machine)({"prompt": np.array(TEXTS, dtype=object)})
    assert [row.keys() for row in read(out)] == [{"id", "score", "logits", "prompt_tokens"}] * 4
    for found in (
        [own.score for own in made],
        [row["score"] for row in read(out)],
        [*columns["score"]],
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert all(own.probs is None and own.label is None for own in made)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "0.5"], "--temperature was given"),
        (["--stop-token-id", "5"], "--stop-token-id was given"),
        (["--regex", "a+"], "--regex was given"),
        (["--logit-bias", '{"5": 1}'], "the task generate"),
        (["--max-tokens", "3"], "there is no next token"),
        (["--dimensions", "65"], "embeddings have 64"),
        (["--encoding-format", "hex"], "float, base64"),
        (["--task", "classify"], "this one has none"),
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
    assert "--dimensions 3 was given" in capsys.readouterr().err
    lines = write(
        tmp_path / "lines.jsonl",
        [{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}],
    )
    assert main(["run", lines, "-m", "demo", "-o", str(out)]) == 3
    assert "run it with the task embed" in read(out)[0]["error"]["message"]


def test_plans(embedder: tuple[Path, PreTrainedModel], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--machine", "l4", "-m"]
    assert main([*flags, "llama-3-8b", "--task", "embed"]) == 0
    told = capsys.readouterr().out
    assert "for embeddings" in told and "1000 rows of 512 tokens" in told and "row/s" in told
    assert main([*flags, str(embedder[0])]) == 0
    assert "for embeddings" in capsys.readouterr().out
    assert main([*flags, "llama-3-8b", "--task", "embed", "--workload", "512:32"]) == 2
    assert "Write it like 512:1" in capsys.readouterr().err


def test_plans_count_rows(
    embedder: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of rows that are read: they have no new tokens, and all positions may be theirs."""
    flags = ["plan", "-m", str(embedder[0]), "--workload"]
    positions = SIZES["max_position_embeddings"]
    assert main([*flags, f"{positions}:1", "--machine", "l4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["rows_per_s"] > 0 and "new_tokens_per_s" not in record
    assert "dollars_per_million_rows" in record
    assert record["new_tokens"] == record["expected_new_tokens"] == 0
    assert record["total_tokens_per_s"] == pytest.approx(positions * record["rows_per_s"])
    assert main([*flags, f"{positions + 1}:1", "--machine", "l4"]) == 2
    assert f"takes {positions}" in capsys.readouterr().err
    for more in (["--machine", "l4", "--explain"], ["--compare", "l4", "t4"]):
        assert main([*flags, "16:1", *more]) == 0
        told = capsys.readouterr().out
        assert "row/s" in told and "new token" not in told and "Mtoken" not in told
    rows = write(tmp_path / "rows.jsonl", [{"input": [5, 6]}])
    for more in (["16:1", "--samples", "4"], [rows, "--max-tokens", "4"]):
        assert main([*flags, *more, "--machine", "l4"]) == 2
        told = capsys.readouterr().err
        assert f"{more[1]} was given" in told and "makes embeddings" in told


def test_what_needs_odds_refuses(
    labeller: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write(tmp_path / "text.jsonl", [{"prompt": "a", "answer": "b"}])
    assert main(["eval", "-m", str(labeller[0]), "--exact-match", text]) == 2
    assert "makes scores of labels" in capsys.readouterr().err
    bench = ["bench", "offload", "--model", str(labeller[0]), "--shape", "8:4", "--rows", "2"]
    assert main(bench) == 2
    assert "makes scores of labels" in capsys.readouterr().err
