"""The bundled demo model loads elsewhere unchanged, keeps its limits, and solves its examples.

Does not cover how Freight itself runs the model, nor training.
"""

import hashlib
import importlib.util
import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from freight.demo import EXAMPLES, MODEL_DIR

transformers = pytest.importorskip("transformers")
TOOLS = Path(__file__).resolve().parents[2] / "tools"
Row = dict[str, Any]


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_tasks", TOOLS / "demo_tasks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Any]]:
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=torch.float32, output_loading_info=True
    )


def test_transformers_finds_every_weight_and_no_other(loaded: tuple[Any, dict[str, Any]]) -> None:
    model, info = loaded
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(info.values()), info


def test_the_model_keeps_its_limits(tokenizer: Any) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["head_dim"] == 64
    assert config["num_hidden_layers"] >= 4
    assert config["max_position_embeddings"] >= 256
    assert config["dtype"] == "bfloat16"
    assert config["vocab_size"] == len(tokenizer)
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 12e6
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text",
    [
        "Date: 9th of March, 2024\nISO:",
        "  two  spaces, a tab\tand lines\r\n\n",
        "Zoë O'Brien-Müller, 北京, Ελλάδα, e\u0301, 🚚 ½ ²",
        "\x00 \u200b \ufeff END 1,250.75ml's",
    ],
)
def test_the_tokenizer_gives_any_text_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_the_chat_template_is_the_bare_text(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Date: 3/9/2024\nISO:"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == chat[0]["content"]
    assert tokenizer.eos_token == "<|end|>"


def test_the_examples_are_well_formed(rows: list[Row], tokenizer: Any) -> None:
    assert len(rows) == 500
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 500
    by_task = Counter(row["id"].split("-")[0] for row in rows)
    assert by_task == dict.fromkeys(("date", "name", "unit", "address", "match"), 100)
    for row in rows:
        assert set(row) == {"id", "prompt", "expected", "max_tokens"}
        assert row["expected"] == row["expected"].strip() != ""
        answer = tokenizer(f" {row['expected']}").input_ids
        assert len(answer) + 1 <= row["max_tokens"]
        assert len(tokenizer(row["prompt"]).input_ids) <= 96


def test_the_examples_are_the_held_out_ones(tasks: ModuleType, rows: list[Row]) -> None:
    drawn = [(example.prompt, example.expected) for example in tasks.held_out()]
    assert drawn == [(row["prompt"], row["expected"]) for row in rows]


def test_training_never_sees_a_held_out_record(tasks: ModuleType, rows: list[Row]) -> None:
    trained = list(islice(tasks.training_stream(1), 20_000))
    assert not {e.prompt for e in trained} & {row["prompt"] for row in rows}
    assert not {e.record for e in trained} & {e.record for e in tasks.held_out()}


def test_a_seed_fixes_the_training_stream(tasks: ModuleType) -> None:
    first, again, other = (list(islice(tasks.training_stream(s), 500)) for s in (3, 3, 4))
    assert first == again
    assert first != other


def test_greedy_answers_are_right(loaded: tuple[Any, Any], tokenizer: Any, rows: list[Row]) -> None:
    model, right = loaded[0], 0
    chosen = sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).digest())[:60]
    for row in chosen:
        prompt = tokenizer(row["prompt"], return_tensors="pt")
        made = model.generate(
            input_ids=prompt.input_ids,
            attention_mask=prompt.attention_mask,
            max_new_tokens=row["max_tokens"],
        )
        answer = tokenizer.decode(made[0, prompt.input_ids.shape[1] :])
        right += answer == f" {row['expected']}<|end|>"
    assert right >= 57
