"""Any legal policy yields the same tokens and the same text.

Held against transformers, row by row: a tiny random model under policies that put weights, KV cache
and activations anywhere, and the bundled demo model on its examples. Every stream of operations
is proven legal as it runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from freight.demo import EXAMPLES, MODEL_DIR
from freight.memory.kv_cache import KVCache
from freight.memory.process import give_back, process_bytes
from freight.plan.default import Planner
from freight.plan.policy import Policy
from freight.quantities import MIB
from freight.runtime.engine import Engine
from freight.runtime.request import Completion, Request, SamplingParams
from freight.runtime.tokenizer import Tokenizer

from . import tiny

CPU, DISK, ODD = (0.0, 100.0, 0.0), (0.0, 0.0, 100.0), (0.0, 37.0, 63.0)
GPU, THREE = (100.0, 0.0, 0.0), (37.0, 21.0, 42.0)
Options = dict[str, Any]


def options(
    device: str, weights: Any, kv: Any, activations: Any, size: int, count: int, **more: Any
) -> Options:
    return {
        "device": device,
        "weights_percent": weights,
        "kv_percent": kv,
        "activations_percent": activations,
        "micro_batch_size": size,
        "num_micro_batches": count,
        **more,
    }


# What lives where, rows per micro-batch, micro-batches per block.
POLICIES: dict[str, Options] = {
    "cpu: all in memory": options("cpu", CPU, CPU, CPU, 12, 1),
    "cpu: row by row": options("cpu", CPU, CPU, CPU, 1, 1),
    "cpu: weights on disk": options("cpu", DISK, CPU, CPU, 4, 3),
    "cpu: weights on both": options("cpu", ODD, CPU, CPU, 4, 3),
    "cpu: KV on disk": options("cpu", CPU, DISK, CPU, 4, 3),
    "cpu: activations on disk": options("cpu", CPU, CPU, DISK, 4, 3),
    "cpu: all on disk": options("cpu", DISK, DISK, DISK, 2, 6),
    "cpu: all on disk, one block": options("cpu", DISK, DISK, DISK, 12, 1),
    "cpu: all on disk, K=8": options("cpu", DISK, DISK, DISK, 1, 8),
    "cpu: odd mix": options("cpu", ODD, ODD, ODD, 3, 2),
    "cpu: odd mix, K=5": options("cpu", ODD, ODD, ODD, 2, 5),
    "cpu: no overlap": options("cpu", ODD, ODD, ODD, 3, 4, overlap=False),
    "sim: all on the device": options("sim", GPU, GPU, GPU, 4, 3),
    "sim: weights on cpu": options("sim", CPU, GPU, GPU, 4, 3),
    "sim: weights on disk": options("sim", DISK, GPU, GPU, 4, 3),
    "sim: KV on cpu": options("sim", GPU, CPU, GPU, 4, 3),
    "sim: KV on disk": options("sim", GPU, DISK, GPU, 4, 3),
    "sim: activations on cpu": options("sim", GPU, GPU, CPU, 4, 3),
    "sim: activations on disk": options("sim", GPU, GPU, DISK, 4, 3),
    "sim: all on cpu": options("sim", CPU, CPU, CPU, 3, 4),
    "sim: all on disk": options("sim", DISK, DISK, DISK, 3, 4),
    "sim: all on disk, K=1": options("sim", DISK, DISK, DISK, 5, 1),
    "sim: odd mix": options("sim", THREE, THREE, THREE, 3, 2),
    "sim: odd mix, K=8": options("sim", THREE, THREE, THREE, 1, 8),
    "sim: odd mix, K=7": options("sim", THREE, ODD, THREE, 2, 7),
    "sim: attention on the CPU": options("sim", GPU, CPU, GPU, 4, 3, cpu_attention_percent=100.0),
    "sim: attention on the CPU, KV on disk": options(
        "sim", CPU, DISK, GPU, 3, 4, cpu_attention_percent=100.0
    ),
    "sim: attention on both": options("sim", THREE, ODD, THREE, 5, 2, cpu_attention_percent=50.0),
    "sim: attention on both, K=7": options("sim", DISK, ODD, GPU, 2, 7, cpu_attention_percent=50.0),
    "sim: attention on the CPU, no overlap": options(
        "sim", THREE, ODD, THREE, 3, 4, cpu_attention_percent=70.0, overlap=False
    ),
    "sim: no overlap": options("sim", THREE, THREE, THREE, 3, 4, overlap=False),
    "sim: slow link": options("sim", THREE, THREE, THREE, 3, 4, sim_bytes_per_s=200_000_000),
    "cpu: diagonal": options("cpu", CPU, CPU, CPU, 8, 1, admission="diagonal"),
    "cpu: diagonal, odd mix": options("cpu", ODD, ODD, ODD, 3, 2, admission="diagonal"),
    "cpu: refill": options("cpu", CPU, CPU, CPU, 4, 1, admission="refill", batch_tokens=9),
    "cpu: refill, all on disk": options("cpu", DISK, DISK, DISK, 3, 2, admission="refill"),
    "cpu: refill, odd mix": options(
        "cpu", ODD, ODD, ODD, 2, 3, admission="refill", batch_tokens=16
    ),
    "cpu: zigzag in chunks": options("cpu", ODD, ODD, ODD, 3, 2, batch_tokens=20),
    "cpu: row by row, by name": options("cpu", DISK, CPU, CPU, 4, None, admission="row"),
    "sim: diagonal, odd mix": options("sim", THREE, THREE, THREE, 4, 2, admission="diagonal"),
    "sim: refill": options("sim", CPU, GPU, GPU, 4, 2, admission="refill"),
    "sim: refill, odd mix": options(
        "sim", THREE, THREE, THREE, 3, 2, admission="refill", batch_tokens=11
    ),
    "sim: refill, KV on disk": options("sim", DISK, DISK, GPU, 4, 2, admission="refill"),
    "sim: refill, attention on both": options(
        "sim", THREE, ODD, THREE, 5, 2, admission="refill", cpu_attention_percent=50.0
    ),
    "sim: refill, attention on the CPU": options(
        "sim", CPU, ODD, DISK, 4, 2, admission="refill", cpu_attention_percent=100.0, batch_tokens=9
    ),
}


def answer(engine: Engine, requests: Sequence[Request]) -> dict[int, Completion]:
    done = {completion.index: completion for completion in engine.run(iter(requests))}
    assert sorted(done) == [request.index for request in requests]
    return done


# -- a tiny random model: rows of many lengths, which end one after the other ----------------------

NUM_ROWS = 13
MOST_TOKENS = 14
PROMPTS = tiny.prompts(NUM_ROWS, 70)
MAX_TOKENS = [1 + 5 * row % MOST_TOKENS for row in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def tiny_tokens(tiny_dir: Path) -> list[list[int]]:
    answers = tiny.reference(tiny.make_model(tiny_dir), PROMPTS, MOST_TOKENS)
    return [ids[:most] for ids, most in zip(tiny.tokens(answers), MAX_TOKENS, strict=True)]


def run_tiny(directory: Path, chosen: Options) -> list[list[int]]:
    requests = [
        Request(index=row, prompt_ids=prompt, params=SamplingParams(max_tokens=MAX_TOKENS[row]))
        for row, prompt in enumerate(PROMPTS)
    ]
    with tiny.engine(directory, PROMPTS, MOST_TOKENS, **chosen) as engine:
        done = answer(engine, requests)
    return [list(done[row].token_ids) for row in range(NUM_ROWS)]


@pytest.mark.parametrize("name", POLICIES)
def test_tiny_model(name: str, tiny_dir: Path, tiny_tokens: list[list[int]]) -> None:
    assert run_tiny(tiny_dir, POLICIES[name]) == tiny_tokens


def test_rows_of_the_table_are_read_to_the_residual_stream(tiny_dir: Path) -> None:
    """Where it is in RAM: nothing is taken for them apart."""
    for name, is_apart in (("cpu: weights on both", False), ("cpu: odd mix", True)):
        with tiny.engine(tiny_dir, PROMPTS, MOST_TOKENS, **POLICIES[name]) as engine:
            (table,) = engine.plan.layout.tables
            assert any(part.tier == "disk" for part in table.parts)
            assert bool(engine.plan.geometry.usage["cpu"]["embedding rows"]) == is_apart


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_engine_can_be_used_again(device: str, tiny_dir: Path) -> None:
    chosen = POLICIES[f"{device}: odd mix"]
    with tiny.engine(tiny_dir, PROMPTS, MOST_TOKENS, **chosen) as engine:
        first = tiny.run(engine, PROMPTS, 5)
        assert tiny.run(engine, PROMPTS[::-1], 5) == first[::-1]


@pytest.mark.parametrize("name", ["cpu: odd mix", "cpu: weights on both", "sim: odd mix"])
@pytest.mark.parametrize(
    "grain",
    [
        {"piece_bytes": 4096},
        {"piece_bytes": 4096, "staging_pieces": 7},
        {"page_tokens": 16},
        {"chunk_tokens": 8},
        {"max_batch_tokens": 70},
        {"piece_bytes": 8192, "page_tokens": 64, "chunk_tokens": 1, "max_batch_tokens": 90},
    ],
    ids=str,
)
def test_small_grains(
    name: str,
    grain: dict[str, int],
    tiny_dir: Path,
    tiny_tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates = Planner._candidates

    def changed(self: Planner) -> Iterator[Policy]:
        return (replace(policy, **grain) for policy in candidates(self))

    monkeypatch.setattr(Planner, "_candidates", changed)
    assert run_tiny(tiny_dir, POLICIES[name]) == tiny_tokens


@pytest.mark.parametrize("gpu_memory", [66 * MIB, 72 * MIB, 90 * MIB])
def test_budget_of_the_device(
    gpu_memory: int, tiny_dir: Path, tiny_tokens: list[list[int]]
) -> None:
    chosen = {"device": "sim", "gpu_memory_bytes": gpu_memory, "micro_batch_size": 2}
    with tiny.engine(tiny_dir, PROMPTS, MOST_TOKENS, **chosen) as engine:
        assert sum(engine.placement.near.usage.values()) <= gpu_memory
    assert run_tiny(tiny_dir, chosen) == tiny_tokens


@pytest.mark.parametrize("spare", [150 * MIB, 180 * MIB])
def test_budget_of_the_process(spare: int, tiny_dir: Path, tiny_tokens: list[list[int]]) -> None:
    give_back()
    chosen = {"device": "cpu", "cpu_memory_bytes": process_bytes() + spare}
    assert run_tiny(tiny_dir, chosen) == tiny_tokens


# -- the demo model ----------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def demo_requests(rows: Rows) -> list[Request]:
    tokenizer = Tokenizer(MODEL_DIR)
    return [
        Request(
            index=index,
            prompt_ids=tokenizer.encode(row["prompt"]),
            params=SamplingParams(max_tokens=row["max_tokens"]),
        )
        for index, row in enumerate(rows)
    ]


def demo_rows() -> Rows:
    return [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]


def oracle(requests: Sequence[Request]) -> list[list[int]]:
    """Greedy tokens of transformers, up to the end of the sequence."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    end = model.generation_config.eos_token_id
    answers = []
    for request in requests:
        ids = torch.tensor([list(request.prompt_ids)])
        most = request.params.max_tokens
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False
            )
        new = out[0, ids.shape[1] :].tolist()
        answers.append(new[: new.index(end)] if end in new else new)
    return answers


def run_demo(requests: Sequence[Request], disk_dir: Path, chosen: Options) -> list[Completion]:
    prompts = [request.prompt_ids for request in requests]
    most = max(request.params.max_tokens for request in requests)
    with tiny.engine(MODEL_DIR, prompts, most, disk_dir=disk_dir, **chosen) as engine:
        done = answer(engine, requests)
    return [done[request.index] for request in requests]


@pytest.fixture(scope="module")
def few() -> tuple[list[Request], list[list[int]]]:
    """A few of the examples, of each length, and their answers."""
    requests = demo_requests(demo_rows()[::50])
    return requests, oracle(requests)


@pytest.fixture(scope="module")
def whole() -> tuple[list[Request], list[list[int]]]:
    """All of the examples, and their answers."""
    requests = demo_requests(demo_rows())
    return requests, oracle(requests)


def check_demo(
    case: tuple[list[Request], list[list[int]]], disk_dir: Path, chosen: Options
) -> None:
    requests, expected = case
    tokenizer = Tokenizer(MODEL_DIR)
    completions = run_demo(requests, disk_dir, chosen)
    for request, row, completion in zip(requests, expected, completions, strict=True):
        assert list(completion.token_ids) == row
        assert completion.text == tokenizer.decode(row)
        is_full = len(row) == request.params.max_tokens
        assert completion.finish_reason == ("length" if is_full else "stop")


needs_demo = pytest.mark.skipif(
    not (MODEL_DIR / "model.safetensors").exists(), reason="the demo model is not there"
)


@needs_demo
@pytest.mark.parametrize("name", ["cpu: all in memory", "cpu: odd mix", "sim: odd mix, K=7"])
def test_some_of_the_demo(
    name: str, few: tuple[list[Request], list[list[int]]], tmp_path: Path
) -> None:
    check_demo(few, tmp_path, POLICIES[name])


@needs_demo
@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_all_of_the_demo(
    name: str, whole: tuple[list[Request], list[list[int]]], tmp_path: Path
) -> None:
    larger = {**POLICIES[name]}
    larger["micro_batch_size"] *= 10
    check_demo(whole, tmp_path, larger)


# -- slow links: what is stored lags behind what is computed ---------------------------------------


@pytest.mark.parametrize("lane", ["write_disk", "read_disk", "pairs_out"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_stores_and_loads_that_lag_behind(
    device: str, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, and rows that end at once: sweeps are short, their stores outlast them."""
    prompts = tiny.prompts(9, 20)
    expected = tiny.tokens(
        tiny.reference(tiny.make_model(tmp_path, num_hidden_layers=1), prompts, 1)
    )
    promptly = getattr(KVCache, lane)

    def late(self: KVCache, *arguments: Any) -> Any:
        time.sleep(0.05)
        return promptly(self, *arguments)

    monkeypatch.setattr(KVCache, lane, late)
    chosen = options(device, CPU, (0.0, 50.0, 50.0), GPU if device == "sim" else CPU, 2, 1)
    with tiny.engine(tmp_path, prompts, 1, **chosen) as engine:
        assert tiny.run(engine, prompts, 1) == expected
