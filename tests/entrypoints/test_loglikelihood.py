"""Log-likelihoods of continuations, by the Python API and by the command, against transformers.

The bundled demo model and a tiny random one in float32, and how pairs are cut into tokens.
"""

from __future__ import annotations

import copy
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import freight.runtime.engine as engine_module
from freight import LLM, Completion
from freight.demo import EXAMPLES, MODEL_DIR
from freight.entrypoints.cli import main
from freight.errors import InputError
from freight.plan.operation import Kind, Operation
from freight.runtime.engine import Engine

from ..jobs.tiny_model import write_tiny_tokenizer
from ..runtime.tiny import make_model, prompts

Pair = tuple[Sequence[int], Sequence[int]]


@pytest.fixture(scope="module")
def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """Every example with its own answer, and with that of another."""
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    others = [row["expected"] for row in rows]
    random.Random(5).shuffle(others)
    right = [(row["prompt"], f" {row['expected']}") for row in rows]
    return right + [(row["prompt"], f" {other}") for row, other in zip(rows, others, strict=True)]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return write_tiny_tokenizer(directory)


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


def cut(tokenizer: Any, context: str, continuation: str) -> Pair:
    """As lm-evaluation-harness cuts them, for contexts that are not empty."""
    whole = tokenizer(context + continuation, add_special_tokens=False).input_ids
    own = tokenizer(context.rstrip(), add_special_tokens=False).input_ids
    return whole[: len(own)], whole[len(own) :]


@torch.inference_mode()
def oracle(model: Any, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Rows of one length together, so that none is padded; in float64."""
    model = copy.deepcopy(model).double()
    alike: dict[int, list[int]] = defaultdict(list)
    for place, (context, continuation) in enumerate(pairs):
        alike[len(context) + len(continuation)].append(place)
    found: dict[int, tuple[float, bool]] = {}
    for places in alike.values():
        rows = torch.tensor([[*pairs[place][0], *pairs[place][1]] for place in places])
        logprobs = model(rows[:, :-1]).logits.log_softmax(-1)
        for row, own, place in zip(rows, logprobs, places, strict=True):
            count = len(pairs[place][1])
            targets, scores = row[-count:], own[-count:]
            total = float(scores.gather(1, targets[:, None]).sum())
            found[place] = total, bool((scores.argmax(-1) == targets).all())
    return [found[place] for place in range(len(pairs))]


def check(found: Sequence[tuple[float, bool]], expected: Sequence[tuple[float, bool]]) -> None:
    # Of a sum of hundreds float32 has no more than six digits.
    wanted = pytest.approx([total for total, _ in expected], abs=1e-4, rel=1e-6)
    assert [total for total, _ in found] == wanted
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Engine], list[Operation]]:
    """The engines that are built, and what they do."""
    built: list[Engine] = []
    done: list[Operation] = []
    build = engine_module.build_engine

    def keep(*arguments: Any, **options: Any) -> Engine:
        engine = build(*arguments, **options)
        engine._record = lambda operation, *_: done.append(operation)  # type: ignore[method-assign]
        built.append(engine)
        return engine

    monkeypatch.setattr(engine_module, "build_engine", keep)
    return built, done


# -- the API -------------------------------------------------------------------------------------


def test_a_thousand_continuations_with_the_weights_read_once(
    demo: Any, texts: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, done = watch(monkeypatch)
    with LLM(MODEL_DIR, device="cpu", dtype="float32", weights=(0, 100)) as llm:
        found = llm.loglikelihood(texts)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert len(found) == 1000
    check(found, oracle(demo, [cut(tokenizer, *pair) for pair in texts]))
    assert 0.4 < sum(is_greedy for _, is_greedy in found) / 1000 < 0.6

    (engine,) = built
    assert engine.plan.policy.num_micro_batches > 1
    reads = [own for own in done if own.kind is Kind.READ_WEIGHTS]
    places = {(own.unit, own.piece) for own in reads}
    on_disk = sum(p.tier == "disk" for unit in engine.plan.layout.units for p in unit.pieces)
    assert len(reads) == len(places) == on_disk > 0
    assert sum(own.num_bytes for own in reads) == engine.plan.layout.streamed_bytes("disk")[1]


@pytest.mark.parametrize(
    "policy",
    [
        {"weights": (30, 70), "micro_batch_size": 3, "num_micro_batches": 2},
        {"device": "sim", "weights": (37, 21, 42), "activations": (37, 21, 42)},
        {"kv": (40, 60), "micro_batch_size": 3, "batch_tokens": 17},
        {"admission": "refill", "micro_batch_size": 4, "batch_tokens": 9},
    ],
    ids=["weights on disk", "device", "KV on disk, in chunks", "refill, in chunks"],
)
def test_any_policy_scores_alike(
    policy: dict[str, Any], tiny: PreTrainedModel, tiny_dir: Path, tmp_path: Path
) -> None:
    rows = [row for row in prompts(30, 40) if len(row) > 1]
    cuts = [1 + place * 7 % (len(row) - 1) for place, row in enumerate(rows)]
    pairs = [(row[:cut], row[cut:]) for row, cut in zip(rows, cuts, strict=True)]
    options = {"device": "cpu", "dtype": "float32", "disk_dir": tmp_path} | policy
    with LLM(tiny_dir, **options) as llm:
        check(llm.loglikelihood(pairs), oracle(tiny, pairs))


def test_how_pairs_are_cut(tiny: PreTrainedModel, tiny_dir: Path) -> None:
    """Spaces move to the continuation, nothing is added to a context, and something has to stand
    in for an empty one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    bos = tokenizer.bos_token_id

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    cases: list[tuple[tuple[Any, Any], Pair]] = [
        (("the cat", " sat on"), cut(tokenizer, "the cat", " sat on")),
        (("the cat ", "sat on"), cut(tokenizer, "the cat", " sat on")),
        (("the cat\n ", "sat"), cut(tokenizer, "the cat", "\n sat")),
        (("the c", "at sat on the mat"), cut(tokenizer, "the c", "at sat on the mat")),
        (("", "the cat"), ([bos], ids("the cat"))),
        ((" ", "the cat"), ([bos], ids(" the cat"))),
        (("", "<s>the cat"), ([bos], ids("the cat"))),
        (([], [5, 6]), ([bos], [5, 6])),
        (([4, 5], (6, 7)), ([4, 5], [6, 7])),
        ((torch.tensor([4, 5]), torch.tensor([6, 7])), ([4, 5], [6, 7])),
    ]
    with LLM(tiny_dir, device="cpu", dtype="float32") as llm:
        found = llm.loglikelihood([given for given, _ in cases])
        assert llm.loglikelihood([]) == []
    check(found, oracle(tiny, [pair for _, pair in cases]))
    assert found[0] == found[1]


def test_pairs_too_long_for_the_model_lose_their_beginning(
    tiny: PreTrainedModel, tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """256 positions: what the last token is followed by is not asked, so there may be 257."""
    (row,) = prompts(1, 400, seed=3)
    pairs = [(row[:390], row[390:]), (row[:257], row[257:258]), (row[:100], row[100:356])]
    kept = [
        (row[400 - 257 : 390], row[390:]),
        (row[1:257], row[257:258]),
        (row[99:100], row[100:356]),
    ]
    with LLM(tiny_dir, device="cpu", dtype="float32") as llm:
        check(llm.loglikelihood(pairs), oracle(tiny, kept))
        (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
        assert warning.startswith("3 of 3 rows are longer than the model's 256 positions")


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (("the", ""), "The continuation is empty. There is nothing to score. Put"),
        (([1], []), "The continuation is empty"),
        (("the", [1]), 'Its "continuation" is a list. It must be a string, as its prompt is'),
        (([1], "the"), 'Its "continuation" is a string. It must be a list of whole numbers'),
        (([1], ["a"]), 'Its "continuation[0]" is a string. It must be'),
        (([1, 320], [1]), "token id 320"),
        (([1], [-1]), "token id -1"),
        (([1], [2] * 257), "The continuation has 257 tokens. The model has 256 positions"),
        (("th", "e"), "no tokens of its own"),
        (("", "<s>"), "no tokens of its own"),
        (("x" * 20_000, "y"), "have 20001 characters. The model has 256 positions"),
        (("the", "\ud83d"), "half a surrogate"),
        (("the",), "A tuple was given as a pair"),
        ("the", "A str was given as a pair"),
        (("the", None), "A tuple was given as a pair"),
        (("the", 3), "A tuple was given as a pair"),
    ],
)
def test_pairs_that_cannot_be_scored(
    pair: Any, reason: str, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _ = watch(monkeypatch)
    with LLM(tiny_dir, device="cpu") as llm, pytest.raises(InputError) as caught:
        llm.loglikelihood([([1], [2]), pair])
    assert reason in str(caught.value)
    assert not built


def test_without_a_tokenizer(tiny_dir: Path, tmp_path: Path) -> None:
    """Random weights need no more than a configuration."""
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    with LLM(tmp_path, device="cpu", dummy_weights=True) as llm:
        ((total, _),) = llm.loglikelihood([([3], [4, 5])])
        assert total < 0
        cases: list[tuple[Any, str]] = [
            (("a", "b"), "has no tokenizer"),
            (([], [4]), "The prompt before the continuation is empty"),
        ]
        for pair, reason in cases:
            with pytest.raises(InputError, match=reason):
                llm.loglikelihood([pair])


# -- the command ---------------------------------------------------------------------------------


def run(source: Path, sink: Path) -> list[dict[str, Any]]:
    flags = ["--model", "demo", "--device", "cpu", "--dtype", "float32", "--weights", "0/100"]
    status = main(["run", *flags, str(source), "-o", str(sink), "--quiet"])
    assert status == 0
    return [json.loads(line) for line in sink.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def source(texts: list[tuple[str, str]], tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "continuation": continuation, "id": f"row {place}"}
        for place, (prompt, continuation) in enumerate(texts[495:505])
    ]
    rows += [
        {"prompt": [5, 6], "continuation": [7], "max_tokens": 0, "temperature": 0.5},
        {"prompt": "Date: 3/9/2024\nISO:", "max_tokens": 4},
        {"prompt": "x", "continuation": "y", "max_tokens": 4},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_with_continuations(
    source: Path, tmp_path: Path, demo: Any, texts: list[tuple[str, str]]
) -> None:
    """Beside rows that are answered, and rows that cannot be used."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    *scored, plain, bad = run(source, tmp_path / "out.jsonl")
    pairs = [*(cut(tokenizer, *pair) for pair in texts[495:505]), ([5, 6], [7])]
    assert all(row.keys() == {"id", "logprob", "is_greedy", "num_tokens"} for row in scored)
    assert [row["id"] for row in scored] == [*(f"row {place}" for place in range(10)), 10]
    check([(row["logprob"], row["is_greedy"]) for row in scored], oracle(demo, pairs))
    assert [row["num_tokens"] for row in scored] == [len(own) for _, own in pairs]
    assert plain["completion_tokens"] == 4
    assert '"max_tokens" is 4. A continuation is scored, and nothing' in bad["error"]


def test_a_scoring_job_goes_on_where_it_was_stopped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(source, tmp_path / "whole.jsonl")
    answer = Engine.run
    asked: list[int] = []

    def break_off(self: Engine, requests: Any) -> Iterator[Completion]:
        for number, completion in enumerate(answer(self, requests)):
            if number == 5:
                raise RuntimeError("broken off")
            yield completion

    def note(self: Engine, requests: Any) -> Iterator[Completion]:
        rows = [*requests]
        asked.extend(request.index for request in rows)
        return answer(self, iter(rows))

    sink = tmp_path / "parts.jsonl"
    monkeypatch.setattr(Engine, "run", break_off)
    with pytest.raises(RuntimeError, match="broken off"):
        run(source, sink)
    monkeypatch.setattr(Engine, "run", note)
    assert run(source, sink) == whole
    assert len(asked) == 12 - 5


def test_a_question_is_computed_once_for_all_its_choices(
    tiny_dir: Path, tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of several pairs each: fewer tokens are computed, and planned; the same scores."""
    contexts = prompts(6, 60, vocab=300, seed=9)
    endings = prompts(24, 7, vocab=300, seed=10)
    pairs: list[Pair] = [(contexts[place % 6] + [5] * 20, own) for place, own in enumerate(endings)]
    built, done = watch(monkeypatch)
    found, brought = {}, []
    for shares in (True, False):
        with LLM(tiny_dir, dtype="float32", share_prefixes=shares, micro_batch_size=24) as llm:
            found[shares] = llm.loglikelihood(pairs)
        embedded = [own for own in done if own.kind is Kind.COMPUTE and own.unit == 0]
        brought.append(sum(own.batch.num_tokens for own in embedded if own.batch))
        done.clear()
    whole = sum(len(context) + len(own) for context, own in pairs)
    assert brought[1] == whole - len(pairs)  # the last token of each is never computed
    assert brought[0] < 0.6 * whole
    planned = [engine.plan.workload.total_prompt_tokens for engine in built]
    assert planned[1] == whole
    assert planned[0] == pytest.approx(brought[0] + len(pairs), rel=0.02)
    for one, other, exact in zip(found[True], found[False], oracle(tiny, pairs), strict=True):
        assert one[0] == pytest.approx(exact[0], abs=1e-4)
        assert one[0] == pytest.approx(other[0], abs=1e-4)
        assert one[1] == other[1]
