"""Guesses through the whole engine: the same answers in fewer sweeps, whatever is asked of rows and
wherever their keys are.

The bundled model in float32 on some of its examples, whose answers quote their prompts; every
operation is proven legal as it runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from freight.demo import EXAMPLES, MODEL_DIR
from freight.entrypoints.bench.closed_form import SweepLog, logged_bytes
from freight.errors import InputError
from freight.kernels.products import Product
from freight.model import products
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, Request, SamplingParams
from freight.runtime.tokenizer import Tokenizer

from . import tiny

MOST = 40
SCHEMA = {"type": "object", "properties": {"clean": {"type": "string"}}, "required": ["clean"]}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "top_p": 0.95},
    "scored": {"logprobs": 2, "temperature": 0.5},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    "stops": {"stop": ("St", ","), "min_tokens": 4},
    "samples": {"n": 3, "temperature": 0.9},
    "of a form": {"temperature": 0.8, "structured_outputs": {"json": SCHEMA}},
}
PLANNED = SamplingParams(max_tokens=MOST, logprobs=2, structured_outputs={"json": SCHEMA})
POLICIES: dict[str, dict[str, Any]] = {
    "in memory": {"device": "cpu", "micro_batch_size": 8, "num_micro_batches": 1},
    "disk": {**tiny.ON_CPU, "micro_batch_size": 5},
    "device": tiny.ON_SIM,
    "refill on disk": {**tiny.ON_CPU, "admission": "refill", "micro_batch_size": 6},
    "refill in chunks": {**tiny.ON_SIM, "admission": "refill", "batch_tokens": 9},
    "diagonal": {**tiny.ON_CPU, "admission": "diagonal"},
    "keys cross": {**tiny.ON_SIM, "cpu_attention_percent": 0.0, "admission": "refill"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    completions: list[Completion]
    num_sweeps: int
    num_tried: int
    num_true: int
    bytes_moved: dict[str, int]
    bytes_told: dict[str, int]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Examples with each thing to be asked in turn."""
    tokenizer = Tokenizer(MODEL_DIR)
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()[:28]
    return [
        Request(
            index=index,
            prompt_ids=tokenizer.encode(json.loads(line)["prompt"]),
            params=SamplingParams(
                max_tokens=MOST, seed=index, **[*ASKED.values()][index % len(ASKED)]
            ),
        )
        for index, line in enumerate(lines)
    ]


def run(requests: list[Request], directory: Path, **options: Any) -> Run:
    defaults: dict[str, Any] = {"dtype": "float32", "verify": True, "disk_dir": directory}
    prompts = [request.prompt_ids for request in requests for _ in range(request.params.n)]
    engine = build_engine(
        MODEL_DIR,
        options=EngineOptions(**{**defaults, **options}),
        workload=tiny.workload(prompts, MOST, PLANNED),
    )
    try:
        log, before = SweepLog(engine), Counter(engine.traffic.moved)
        done = sorted(engine.run(iter(requests), log.on_batch), key=lambda own: own.index)
        moved = Counter(engine.traffic.moved)
        moved.subtract(before)
        return Run(
            completions=done,
            num_sweeps=len(log.sweeps),
            num_tried=engine.guesses.num_tried,
            num_true=engine.guesses.num_true,
            bytes_moved=dict(+moved),
            bytes_told=logged_bytes(engine, log),
        )
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone(requests: list[Request], tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    found = run(requests, tmp_path_factory.mktemp("alone"), device="cpu")
    assert not found.num_tried
    return found.completions


def check(found: list[Completion], wanted: list[Completion]) -> None:
    assert [own.index for own in found] == [own.index for own in wanted]
    for one, other in zip(found, wanted, strict=True):
        for output, expected in zip(one.outputs, other.outputs, strict=True):
            assert output.text == expected.text
            assert output.token_ids == expected.token_ids
            assert output.finish_reason == expected.finish_reason
            assert output.stop_reason == expected.stop_reason
            assert (output.logprobs is None) == (expected.logprobs is None)
            for own, told in zip(output.logprobs or (), expected.logprobs or (), strict=True):
                assert own.logprob == pytest.approx(told.logprob, abs=1e-4)
                assert [top.token_id for top in own.top] == [top.token_id for top in told.top]


@pytest.mark.parametrize("name", POLICIES)
def test_answers_stay_and_sweeps_are_spared(
    name: str, requests: list[Request], alone: list[Completion], tmp_path: Path
) -> None:
    half = len(requests) // 2  # each thing is asked twice
    plain = run(requests[:half], tmp_path, **POLICIES[name])
    check(plain.completions, alone[:half])
    for draft_tokens in (1, 6):
        found = run(requests[:half], tmp_path, **POLICIES[name], draft_tokens=draft_tokens)
        check(found.completions, alone[:half])
        assert 0 < found.num_true < found.num_tried
        # Rows that the CPU attends do not guess, and with one of them a block is as long as ever.
        most = plain.num_sweeps + ("device" in name or "chunks" in name)
        assert found.num_sweeps < most


@pytest.mark.parametrize("name", ["in memory", "disk", "refill on disk", "diagonal"])
def test_bytes_are_those_of_the_tokens_that_were_brought(
    name: str, requests: list[Request], tmp_path: Path
) -> None:
    """Pages that a wrong guess filled come back from the disk, not from the tails."""
    single = [own for own in requests if own.params.n == 1]
    found = run(single, tmp_path, **POLICIES[name], draft_tokens=6)
    assert found.num_true < found.num_tried
    assert found.bytes_moved == found.bytes_told


def exactly(x: torch.Tensor, products: Sequence[Product], scratch: object) -> None:
    """Products rounded once: the same however many tokens are multiplied together."""
    for own in products:
        assert isinstance(own.rows, torch.Tensor) and own.bias is None and not own.gates
        made = x.double() @ own.rows.double().t()
        own.out.copy_(made + own.out.double() if own.adds else made)


def test_compressed_keys_are_the_same_with_guesses(
    requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last bits of products are: they decide, seldom, to which code a key is rounded."""
    monkeypatch.setattr(products, "multiply", exactly)
    monkeypatch.setattr(products, "can_gate", lambda x, several: False)
    options = {**POLICIES["disk"], "kv_bits": 4}
    plain, found = (run(requests, tmp_path, **options, draft_tokens=most) for most in (0, 4))
    check(found.completions, plain.completions)
    assert found.num_true


@pytest.mark.parametrize("draft_tokens", [-1, 33])
def test_too_many_or_too_few_are_refused(draft_tokens: int) -> None:
    with pytest.raises(InputError, match=f"--draft-tokens {draft_tokens} was given"):
        EngineOptions(draft_tokens=draft_tokens)


def test_sparse_attention_would_not_give_the_same_answers() -> None:
    with pytest.raises(InputError, match="--draft-tokens 4 was given with --sparse-attention"):
        EngineOptions(draft_tokens=4, sparse_attention=0.1)
