"""``freight eval`` from end to end: scores against transformers, its table, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from freight.demo import EXAMPLES, MODEL_DIR
from freight.entrypoints.cli import main
from freight.entrypoints.eval.settings import DEFAULT_SETTINGS

from ...jobs.tiny_model import write_tiny_tokenizer
from ...runtime import tiny
from ...runtime.test_engine_parity import falcon, qwen3_moe

pytestmark = pytest.mark.usefixtures("forked_children")

TEXT = "the cat sat on the mat. Freight trains move the most per dollar, naïvely 日本 😀!\n" * 12


@pytest.fixture(autouse=True)
def single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On models this small a team of threads only waits for its members."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def evaluate(directory: Path, model: Path | str, *flags: str) -> dict[str, Any]:
    """What the command writes, in float32."""
    sink = directory / "found.json"
    command = ["eval", "--model", str(model), "--json", str(sink), "--dtype", "float32", "--quiet"]
    assert main([*command, *flags]) == 0
    found: dict[str, Any] = json.loads(sink.read_text())
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- perplexity ------------------------------------------------------------------------------------


@torch.inference_mode()
def published_perplexity(model: Any, ids: list[int], length: int, stride: int) -> float:
    """As in the documentation of transformers, each loss weighted by its number of tokens."""
    total, num_tokens, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        own = torch.tensor([ids[begin:end]])
        labels = own.clone()
        labels[:, : -(end - before)] = -100
        count = int((labels[:, 1:] != -100).sum())
        total += float(model(own, labels=labels).loss) * count
        num_tokens, before = num_tokens + count, end
        if end == len(ids):
            break
    assert num_tokens == len(ids) - 1
    return math.exp(total / num_tokens)


@torch.inference_mode()
def perplexity_after_bos(model: Any, ids: list[int], length: int, stride: int) -> float:
    """The same where each window begins with BOS, id 0, by log-probabilities one by one."""
    logprobs: list[float] = []
    for begin in range(0, len(ids), stride):
        own = [0, *ids[begin : begin + length - 1]]
        rows = model(torch.tensor([own])).logits[0].log_softmax(-1)
        each = [float(rows[place, token]) for place, token in enumerate(own[1:])]
        logprobs += each[len(logprobs) - begin :]
        if len(logprobs) == len(ids):
            break
    return math.exp(-sum(logprobs) / len(ids))


@pytest.mark.parametrize("flags", [(), ("--context", "32"), ("--context", "40", "--stride", "7")])
@pytest.mark.parametrize("with_bos", [False, True])
def test_perplexity_is_that_of_transformers(
    flags: tuple[str, ...], with_bos: bool, tmp_path: Path
) -> None:
    model = tiny.make_model(tmp_path / "model", max_position_embeddings=128)
    write_tiny_tokenizer(tmp_path / "model", with_bos=with_bos)
    (tmp_path / "text.txt").write_text(TEXT)
    found = evaluate(
        tmp_path,
        tmp_path / "model",
        *("--perplexity", str(tmp_path / "text.txt"), "--setting", "exact", *flags),
        *("--weights", "30/70", "--micro-batch-size", "3"),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    length = int(flags[1]) if flags else 128
    stride = int(flags[3]) if len(flags) > 2 else length - 1 - with_bos
    assert len(ids) > 200
    assert found["data"]["perplexity"]["context"] == length
    assert found["data"]["perplexity"]["stride"] == stride
    scores = found["settings"][0]["perplexity"]["scores"]
    expect = perplexity_after_bos if with_bos else published_perplexity
    assert scores["perplexity"] == pytest.approx(expect(model, ids, length, stride), rel=1e-4)
    assert scores["tokens"] == len(ids) - (not with_bos)
    assert scores["nll"] == pytest.approx(math.log(scores["perplexity"]))


# -- last words and exact match, on the bundled model ---------------------------------------------


@pytest.fixture(scope="module")
def examples() -> list[dict[str, Any]]:
    """Rows of which every third one expects another row's answer."""
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()][:30]
    answers = [row["expected"] for row in rows]
    for place in range(0, len(rows), 3):
        rows[place]["expected"] = answers[place - 1]
    return rows


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def continue_greedily(oracle: tuple[Any, Any], ids: list[int], count: int) -> list[int]:
    model, _ = oracle
    prompt = torch.tensor([ids])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count)
    return list(made[0, len(ids) :].tolist())


@pytest.mark.usefixtures("begun_anew")
def test_last_words_are_those_that_transformers_would_say(
    examples: list[dict[str, Any]], oracle: tuple[Any, Any], tmp_path: Path
) -> None:
    texts = [f"{row['prompt']} {row['expected']}" for row in examples]
    rows = [{"text": text + "\n" * (place % 2)} for place, text in enumerate(texts)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    found = evaluate(
        tmp_path, "demo", "--last-word", str(source), "--setting", "exact", "--weights", "20/80"
    )
    model, tokenizer = oracle
    right, total = 0, 0.0
    for text in texts:
        ids = tokenizer(text).input_ids
        before = tokenizer(text.rsplit(maxsplit=1)[0]).input_ids
        word = ids[len(before) :]
        right += continue_greedily(oracle, before, len(word)) == word
        with torch.inference_mode():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(before) - 1, len(ids) - 1)
        total += sum(float(scores[p, token]) for p, token in zip(places, word, strict=True))
    assert 12 < right < 24
    scores = found["settings"][0]["last_word"]["scores"]
    assert scores["right"] == right and scores["rows"] == len(texts)
    assert scores["accuracy"] == pytest.approx(right / len(texts))
    assert scores["perplexity"] == pytest.approx(math.exp(-total / len(texts)), rel=1e-4)


def test_exact_match_is_that_of_transformers(
    examples: list[dict[str, Any]], oracle: tuple[Any, Any], tmp_path: Path
) -> None:
    """Prompts as text, token ids and messages; what a row says of sampling is not heard."""
    tokenizer, right, rows = oracle[1], 0, []
    for place, row in enumerate(examples):
        ids = tokenizer(row["prompt"]).input_ids
        made = continue_greedily(oracle, ids, row["max_tokens"])
        answer = tokenizer.decode(made, skip_special_tokens=True)
        right += answer.strip() == row["expected"]
        prompts: list[dict[str, Any]] = [
            {"prompt": row["prompt"], "temperature": 2.0, "n": 3},
            {"prompt": ids},
            {"messages": [{"role": "user", "content": row["prompt"]}]},
        ]
        known = {"answer": f" {row['expected']}\n", "max_tokens": row["max_tokens"]}
        rows.append({**known, **prompts[place % 3]})
    assert 12 < right < 24
    source = write_rows(tmp_path / "rows.jsonl", rows)
    found = evaluate(tmp_path, "demo", "--exact-match", str(source), "--setting", "exact")
    scores = found["settings"][0]["exact_match"]["scores"]
    assert scores == {"accuracy": right / len(rows), "right": right, "rows": len(rows)}


def test_max_tokens_and_stop_hold_for_rows_without_their_own(tmp_path: Path) -> None:
    prompt, row = "Quantity: 3 km\nIn m:", {"answer": "3000 m"}
    rows = [{"prompt": prompt, **row}, {"prompt": prompt, "max_tokens": 2, **row}]
    source = str(write_rows(tmp_path / "rows.jsonl", rows))
    for flags, right in (([], 1), (["--max-tokens", "3"], 0), (["--stop", "m"], 0)):
        found = evaluate(
            tmp_path, "demo", "--exact-match", source, "--setting", "exact", *map(str, flags)
        )
        assert found["settings"][0]["exact_match"]["scores"]["right"] == right


# -- the table, the file -----------------------------------------------------------------------


def stored_bytes(bits: int | None) -> int:
    """Of the bundled model under float32, by the names and shapes in its file: two bytes for each
    number of a matrix, as the file has them; a byte or half of one where it is compressed, and
    four more for each group of 64; four for the rest."""
    total = 0.0
    with safe_open(MODEL_DIR / "model.safetensors", "np") as file:
        for name in file.keys():
            shape = file.get_slice(name).get_shape()
            if len(shape) == 1:
                per_weight = 4.0
            elif bits is None or "embed" in name:
                per_weight = 2.0
            else:
                per_weight = {8: 1.0, 4: 0.5, 3: 0.5}[bits] + 4 / 64
            total += math.prod(shape) * per_weight
    return int(total)


def test_the_table_and_the_file(
    examples: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_rows(tmp_path / "rows.jsonl", examples[:9]))
    flags = ["--exact-match", source, "--answer-key", "expected", "--cpu-memory", "2GiB"]
    found = evaluate(tmp_path, "demo", *flags)
    out, err = capsys.readouterr()
    assert err == ""
    data, blank, names, *rows, note = out.splitlines()
    assert data == f"exact match: {source}, 9 rows" and blank == ""
    assert (
        names.split() == "setting exact match weights saved KV/token saved token/s seconds".split()
    )
    assert tuple(row.split()[0] for row in rows) == DEFAULT_SETTINGS
    assert len({len(line) for line in (names, *rows)}) == 1, "columns are aligned"
    assert "negative control" in note and "save nothing more" in note
    assert found["model"] == "demo" and found["dtype"] == "float32"
    assert found["data"]["exact_match"]["rows"] == 9
    exact, exact_kv = stored_bytes(None), 2 * 6 * 2 * 64 * 4
    for setting, row in zip(found["settings"], rows, strict=True):
        bits = next((n for n in (8, 4, 3) if f"weights={n}" in row), None)
        assert setting["weight_bytes"] == stored_bytes(bits)
        assert setting["weights_saved"] == pytest.approx(1 - stored_bytes(bits) / exact)
        kv = setting["kv_bytes_per_token"]
        if "kv=4" in row:  # codes and what a group has, in pages of whole blocks
            assert 2 * 6 * 2 * (64 // 2 + 4) <= kv < exact_kv / 3
        else:
            assert kv == exact_kv
        assert setting["kv_saved"] == pytest.approx(1 - kv / exact_kv)
        run = setting["exact_match"]
        assert setting["tokens_per_s"] == pytest.approx(run["tokens"] / setting["seconds"])
        share = f"{100 * run['scores']['accuracy']:.2f} %"
        assert share in row and f"{100 * setting['weights_saved']:.1f} %" in row
    assert 0.5 < found["settings"][0]["exact_match"]["scores"]["accuracy"] < 1


def test_a_perplexity_is_held_against_the_exact_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.make_model(tmp_path / "model")
    write_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--perplexity", str(tmp_path / "text.txt"), "--compressed-dir", str(tmp_path / "kept")]
    for names in (["weights=4,group=32", "exact"], ["weights=4,group=32"]):
        settings = [part for name in names for part in ("--setting", name)]
        found = evaluate(tmp_path, tmp_path / "model", *flags, *settings)["settings"]
        scores = [setting["perplexity"]["scores"] for setting in found]
        lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
        assert lines[0][:3] == ["setting", "perplexity", "ratio"]
        if len(names) == 1:
            assert "ratio" not in scores[0] and lines[1][2] == "-"
            continue
        ratio = scores[0]["perplexity"] / scores[1]["perplexity"]
        assert scores[0]["ratio"] == pytest.approx(ratio) and scores[0]["ratio"] != 1
        assert [line[2] for line in lines[1:]] == [f"{ratio:.4f}", "1.0000"]


def test_integer_products_that_were_not_made_are_no_integer_products(
    examples: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_rows(tmp_path / "rows.jsonl", examples[:4]))
    flags = ["--exact-match", source, "--answer-key", "expected", "--cpu-memory", "2GiB"]
    flags += ["--setting", "compute=int8", "--compressed-dir", str(tmp_path / "kept")]
    (setting,) = evaluate(tmp_path, "demo", *flags)["settings"]
    is_said = "not faster with 8-bit integers" in capsys.readouterr().out
    assert setting["exact_match"]["compute"] == ("plain" if is_said else "int8")
    assert (setting["weights_saved"] == 0) == is_said


@pytest.mark.parametrize("config", [falcon(), qwen3_moe()], ids=["a shared norm", "experts"])
def test_an_exact_run_saves_nothing(config: Any, tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "model", config=config)
    write_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--perplexity", str(tmp_path / "text.txt"), "--setting", "exact"]
    (setting,) = evaluate(tmp_path, tmp_path / "model", *flags)["settings"]
    assert setting["weights_saved"] == setting["kv_saved"] == 0


def test_what_fails_is_a_row_and_loses_no_other(
    examples: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compressed weights have nowhere to be kept: a file is in the way."""
    source = str(write_rows(tmp_path / "rows.jsonl", examples[:4]))
    (tmp_path / "kept").write_text("")
    command = f"eval --model demo --exact-match {source} --answer-key expected --json"
    flags = [str(tmp_path / "found.json"), "--compressed-dir", str(tmp_path / "kept")]
    settings = ["--setting", "weights=4", "--setting", "exact"]
    assert main([*command.split(), *flags, *settings]) == 1
    out, err = capfd.readouterr()
    _, _, _, failed, fine, reason = out.splitlines()
    assert failed.split() == ["weights=4", "failed", *"------"]
    assert fine.startswith("exact ") and "failed" not in fine
    assert reason.startswith("weights=4, exact match: Compressed weights were to be written")
    assert "exact, exact match: 4 rows" in err and "Traceback" not in err
    assert "compressing the weights (4 bits, groups of 64)" in err, "a run's own messages are heard"
    found = json.loads((tmp_path / "found.json").read_text())["settings"]
    assert "Compressed weights" in found[0]["failures"]["exact_match"]
    assert "exact_match" in found[1] and "failures" not in found[1]


# -- refusals ------------------------------------------------------------------------------------

GOOD = '{"prompt": "a", "answer": "b"}\n'
LONG = json.dumps({"prompt": [5] * 600, "answer": "b"})


@pytest.mark.parametrize(
    ("flags", "content", "message"),
    [
        ([], "", "nothing to evaluate"),
        (["--exact-match", "nowhere.jsonl"], "", "There is no such file"),
        (["--last-word", "."], "", "It is a directory"),
        (["--exact-match", "IN"], "", "It has no rows"),
        (["--exact-match", "IN"], GOOD + '{"prompt": "a"}', 'Line 2 of in: It has no "answer"'),
        (["--exact-match", "IN", "--answer-key", "gold"], GOOD, 'It has no "gold"'),
        (["--exact-match", "IN"], '{"prompt": "a", "answer": 5}', 'Its "answer" is a number'),
        (["--exact-match", "IN"], '{"answer": "b"}', 'neither of "prompt" and "messages"'),
        (["--exact-match", "IN"], GOOD + "{", "Line 2 of in: It was read as JSON"),
        (["--exact-match", "IN"], GOOD + LONG, "1 cannot be used. Line 2 of in"),
        (["--exact-match", "IN", "--max-tokens", "0"], GOOD, "max_tokens"),
        (["--last-word", "IN"], '{"prompt": "a b"}', 'Its "text" is null'),
        (["--last-word", "IN"], '{"text": " one "}', "Give at least two words"),
        (["--last-word", "IN"], '{"text": "a \\ud800"}', "half a surrogate pair"),
        (["--perplexity", "IN"], "", "fewer than two tokens: 0"),
        (["--perplexity", "IN"], "a", "fewer than two tokens: 1"),
        (["--perplexity", "IN"], b"caf\xe9 au lait", "Byte 4 is not"),
        (["--perplexity", "IN", "--context", "1"], "some text", "from 2 tokens to the 512"),
        (["--perplexity", "IN", "--context", "513"], "some text", "from 2 tokens to the 512"),
        (["--perplexity", "IN", "--context", "8", "--stride", "8"], "a b c", "from 1 to 7"),
        (["--perplexity", "IN", "--stride", "0"], "some text", "from 1 to 511"),
        (["--perplexity", "IN", "--setting", "bits=4"], "some text", "'bits=4' is not known"),
        (["--perplexity", "IN", "--setting", "weights=2"], "some text", "There are 4 and 8 bits"),
        (["--perplexity", "IN", "--json", "no/where"], "some text", "There is no directory no"),
        (["--perplexity", "IN", "--json", "IN"], "some text", "as the input and as the output"),
        (["--perplexity", "IN", "--weights", "1/2"], "some text", "add up to 100"),
        (["--perplexity", "IN", "--model", "nowhere"], "some text", "no such directory"),
    ],
)
def test_what_is_refused(
    flags: list[str],
    content: str | bytes,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "in"
    source.write_bytes(content.encode() if isinstance(content, str) else content)
    named = [str(source) if flag == "IN" else flag for flag in flags]
    assert main(["eval", "--model", "demo", *named]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    first, limit, advice = err.splitlines()
    assert first.startswith("freight: error: ")
    assert limit.startswith("  ") and advice.startswith("  ")


def test_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("some text")
    assert main(["eval", "--perplexity", str(tmp_path / "text")]) == 2
    assert "No model was given" in capsys.readouterr().err


def test_a_long_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "text").open("wb") as file:
        file.truncate((16 << 20) + 1)
    assert main(["eval", "--model", "demo", "--perplexity", str(tmp_path / "text")]) == 2
    assert "more than 16 MiB" in capsys.readouterr().err


# -- processes -----------------------------------------------------------------------------------


def test_the_command_itself_holds_neither_model_nor_tokenizer() -> None:
    code = (
        "import sys\nimport freight.entrypoints.eval.evaluate\n"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_told_to_end_it_leaves_nothing(tmp_path: Path) -> None:
    """Neither a process nor a directory."""
    rows = [{"prompt": "Quantity: 3 km\nIn m:", "answer": "3000 m"}] * 3000
    source = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "freight", "eval", "--model", "demo", "--quiet"]
    with subprocess.Popen(
        [*command, "--exact-match", str(source), "--micro-batch-size", "1"],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    ) as process:
        child = wait_for_run(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert not child.exists() and not list((tmp_path / "temporary").iterdir())


def wait_for_run(parent: int) -> Path:
    """The process, below /proc, that has its rows open."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in (Path("/proc", pid) for pid in children.read_text().split()):
            try:
                opened = [os.readlink(link) for link in (child / "fd").iterdir()]
            except OSError:  # it ended meanwhile
                continue
            if any(Path(path).name == "tokens.bin" for path in opened):
                return child
        time.sleep(0.01)
    raise AssertionError("no process has begun")
