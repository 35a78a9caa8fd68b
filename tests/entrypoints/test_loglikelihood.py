"""Log-likelihoods of continuations, by the Python API and by the command, against transformers.

The bundled demo model in float32, and how pairs of text are cut into tokens.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import freight.runtime.engine as engine_module
from freight import LLM
from freight.demo import EXAMPLES, MODEL_DIR
from freight.entrypoints.cli import main
from freight.errors import InputError
from freight.runtime.engine import Engine

Pair = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    """Every example with its own answer, and with that of another."""
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    others = [row["expected"] for row in rows]
    random.Random(5).shuffle(others)
    right = [(row["prompt"], f" {row['expected']}") for row in rows]
    return right + [(row["prompt"], f" {other}") for row, other in zip(rows, others, strict=True)]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Those that are built."""
    built: list[Engine] = []
    build = engine_module.build_engine

    def keep(*arguments: Any, **options: Any) -> Engine:
        built.append(build(*arguments, **options))
        return built[-1]

    monkeypatch.setattr(engine_module, "build_engine", keep)
    return built


def cut(tokenizer: Any, context: str, continuation: str) -> Pair:
    """As lm-evaluation-harness cuts them, for contexts that are not empty."""
    whole = tokenizer(context + continuation, add_special_tokens=False).input_ids
    own = tokenizer(context.rstrip(), add_special_tokens=False).input_ids
    return whole[: len(own)], whole[len(own) :]


@torch.inference_mode()
def oracle(model: Any, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Rows of one length together, so that none is padded."""
    alike: dict[int, list[int]] = defaultdict(list)
    for place, (context, continuation) in enumerate(pairs):
        alike[len(context) + len(continuation)].append(place)
    found: dict[int, tuple[float, bool]] = {}
    for places in alike.values():
        rows = torch.tensor([[*pairs[place][0], *pairs[place][1]] for place in places])
        logprobs = model(rows[:, :-1]).logits.float().log_softmax(-1)
        for row, own, place in zip(rows, logprobs, places, strict=True):
            count = len(pairs[place][1])
            targets, scores = row[-count:], own[-count:]
            total = float(scores.gather(1, targets[:, None]).sum())
            found[place] = total, bool((scores.argmax(-1) == targets).all())
    return [found[place] for place in range(len(pairs))]


def check(found: Sequence[tuple[float, bool]], expected: Sequence[tuple[float, bool]]) -> None:
    assert [total for total, _ in found] == pytest.approx([t for t, _ in expected], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]


def test_a_thousand_continuations_with_the_weights_read_once(
    model: Any, tokenizer: Any, pairs: list[tuple[str, str]], engines: list[Engine]
) -> None:
    """Weights on disk cross the link once for all rows; of the table each row that is needed."""
    with LLM(MODEL_DIR, device="cpu", dtype="float32", weights=(0, 100)) as llm:
        found = llm.loglikelihood(pairs)
    expected = oracle(model, [cut(tokenizer, *pair) for pair in pairs])
    assert len(found) == 1000
    check(found, expected)
    assert 0.4 < sum(is_greedy for _, is_greedy in found) / 1000 < 0.6

    (engine,) = engines
    policy, layout = engine.plan.policy, engine.plan.layout
    assert policy.block_rows >= 1000 and policy.num_micro_batches > 1
    read = {unit: 0 for unit in range(len(layout.units))}
    for operation in engine_reads(engine):
        read[operation] += 1


def engine_reads(engine: Engine) -> list[int]:
    return []
