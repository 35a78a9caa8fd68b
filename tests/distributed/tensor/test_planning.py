"""Ranks of a run that a model is cut over: the rows of one machine, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freight.demo import MODEL_DIR
from freight.distributed.ranks import Ranks
from freight.distributed.tensor.planning import build_cut_engine
from freight.errors import BudgetError, FreightError, InputError, RankError
from freight.plan.workload import Workload
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.params import SamplingParams
from freight.runtime.request import Completion, Request
from freight.runtime.tokenizer import Tokenizer

from ...runtime import tiny
from ..pipeline.stages import on_ranks

OPTIONS = EngineOptions(device="cpu", dtype="float32")
TEXTS = ["The cat", "2 + 2 =", "abc abc abc", "Count: one two three four five", "x", "y z"]
PARAMS = [
    SamplingParams(max_tokens=6),
    SamplingParams(max_tokens=4, n=3, temperature=0.9, top_k=30, top_p=0.9, seed=5, logprobs=2),
    SamplingParams(max_tokens=7, temperature=0.7, min_p=0.05, seed=1, presence_penalty=0.5),
    SamplingParams(max_tokens=7, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True),
    SamplingParams(max_tokens=7, logit_bias={5: 8.0, 6: -100.0}, min_tokens=3, stop=(" ", "e")),
    SamplingParams(max_tokens=5, stop_token_ids=tuple(range(0, 1024, 5)), logprobs=0),
]


def mixed() -> tuple[list[Request], Workload]:
    """Rows that each ask for something else."""
    tokenizer = Tokenizer(MODEL_DIR)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    requests = [
        Request(index=index, prompt_ids=ids, params=params)
        for index, (ids, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]
    work = tiny.workload(prompts, max(own.max_tokens for own in PARAMS), PARAMS[1])
    return requests, replace(work, num_rows=8, total_new_tokens=44, min_samples=1, ends_early=True)


def told(found: list[Completion]) -> list[Any]:
    return [
        [
            (out.text, out.token_ids, out.finish_reason, out.stop_reason, out.logprobs is None)
            for out in own.outputs
        ]
        for own in sorted(found, key=lambda own: own.index)
    ]


@pytest.fixture(scope="module")
def wanted() -> list[Completion]:
    """What one machine makes of the rows."""
    requests, work = mixed()
    one = build_engine(MODEL_DIR, options=OPTIONS, workload=work)
    found = [*one.run(iter(requests))]
    one.close()
    return found


@pytest.mark.parametrize("rule", ["refill", "zigzag"])
def test_rows_are_those_of_one_machine_whatever_is_asked(
    rule: str, wanted: list[Completion]
) -> None:
    """More rows than are computed together, prompts in chunks."""
    requests, work = mixed()
    options = replace(OPTIONS, micro_batch_size=3, batch_tokens=6, admission=rule)

    def answers(ranks: Ranks) -> list[Completion]:
        engine = build_cut_engine(MODEL_DIR, options=options, workload=work, ranks=ranks)
        found = [*engine.run(iter(requests if not ranks.rank else ()))]
        engine.summary()
        return found

    first, second = on_ranks(2, answers)
    assert told(first) == told(wanted)
    assert second == []
    mine = {own.index: own for own in first}
    for own in wanted:
        for made, other in zip(mine[own.index].outputs, own.outputs, strict=True):
            assert (made.cumulative_logprob is None) == (other.cumulative_logprob is None)
            if other.cumulative_logprob is not None:
                assert made.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def attempt(directory: Path, work: Workload, options: EngineOptions, ranks: Ranks) -> object:
    """An engine, or why there is none: ranks part as after a run."""
    try:
        return build_cut_engine(directory, options=options, workload=work, ranks=ranks)
    except FreightError as error:
        return error


def refused(
    directory: Path,
    work: Workload,
    options: EngineOptions,
    kind: type[FreightError],
    size: int = 2,
) -> FreightError:
    """What all ranks refuse alike."""
    found = on_ranks(size, lambda ranks: attempt(directory, work, options, ranks))
    assert all(type(error) is kind for error in found), found
    assert len({error.limit for error in found}) == 1
    return found[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weights_percent": (0.0, 50.0, 50.0)}, "--weights"),
        ({"kv_percent": (0.0, 100.0, 0.0), "overlap": False}, "--kv, --no-overlap"),
        ({"weight_bits": 4, "group_dim": "output"}, "--group-dim output"),
        ({"kv_bits": 8}, "--kv-bits"),
        ({"sparse_attention": 0.5}, "--sparse-attention"),
        ({"compute": "int8"}, "--compute int8"),
        ({"lossless": True}, "--lossless"),
        ({"num_micro_batches": 2}, "--num-micro-batches"),
    ],
)
def test_what_is_not_there_is_refused(changes: dict[str, Any], named: str) -> None:
    _, work = mixed()
    error = refused(MODEL_DIR, work, replace(OPTIONS, **changes), InputError)
    assert error.asked == f"{named} was given with --split tensor."
    assert "--split layers" in error.advice


def test_a_width_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    tiny.make_model(tmp_path, hidden_size=66, num_attention_heads=3, num_key_value_heads=3)
    work = tiny.workload([[1, 2, 3]], 2)
    assert "66 does not divide by 4" in refused(tmp_path, work, OPTIONS, InputError, 4).limit


def test_too_little_memory_is_refused() -> None:
    _, work = mixed()
    error = refused(MODEL_DIR, work, replace(OPTIONS, cpu_memory_bytes=1 << 20), BudgetError)
    assert "Raise --cpu-memory" in error.advice


def test_types_that_differ_are_refused() -> None:
    _, work = mixed()

    def build(ranks: Ranks) -> object:
        own = replace(OPTIONS, dtype=("float32", "bfloat16")[ranks.rank])
        return attempt(MODEL_DIR, work, own, ranks)

    for error in on_ranks(2, build):
        assert isinstance(error, RankError) and "float32, bfloat16" in error.limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_are_those_of_one_machine(dtype: str, tmp_path: Path) -> None:
    """Out of config.json alone; in bfloat16 sums are rounded elsewhere."""
    tiny.make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    prompts, params = tiny.prompts(3, 5), SamplingParams(max_tokens=3)
    work, options = tiny.workload(prompts, 3), replace(OPTIONS, dtype=dtype, dummy_seed=3)
    one = build_engine(tmp_path, options=options, workload=work)
    wanted = told([*one.run(tiny.requests(prompts, params))])
    one.close()

    def answers(ranks: Ranks) -> list[Completion]:
        engine = build_cut_engine(tmp_path, options=options, workload=work, ranks=ranks)
        return [*engine.run(tiny.requests(prompts, params))]

    found = told(on_ranks(2, answers)[0])
    assert len(found) == len(wanted)
    if dtype == "float32":
        assert found == wanted
