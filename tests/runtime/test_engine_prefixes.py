"""Prompts that begin alike: computed once, and the answers are those of each row by itself, whether
their keys are attended together or row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BloomConfig,
    DeepseekV2Config,
    Gemma2Config,
    MistralConfig,
    PretrainedConfig,
)

from freight.model import layers
from freight.model.batch import MicroBatch
from freight.plan import default
from freight.runtime import batches
from freight.runtime.engine import Engine, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Prefix, Request, SamplingParams

from . import tiny
from .test_engine_parity import deepseek, gpt_oss
from .test_engine_recurrence import CONFIGS

STEPS = 6
OWN = tiny.prompts(12, 20)
LONG, SHORT = list(range(5, 53)), list(range(100, 132))
# Some rows begin with one, some with the other, some alone; a prompt may be the beginning and one
# token.
BEGINNINGS = [LONG] * 5 + [SHORT] * 4 + [[]] * 3
PROMPTS = [[*first, *own] for first, own in zip(BEGINNINGS, OWN, strict=True)]
PROMPTS[1] = [*LONG, 7]
KEYS = [0] * 5 + [1] * 4 + [None] * 3

POLICIES: dict[str, dict[str, Any]] = {
    "zigzag": {"micro_batch_size": 12, "num_micro_batches": 1},
    "zigzag, K=4": {"micro_batch_size": 2, "num_micro_batches": 4},
    "zigzag in chunks": {"micro_batch_size": 4, "num_micro_batches": 2, "batch_tokens": 20},
    "row by row": {"micro_batch_size": 1, "num_micro_batches": 1},
    "refill": {"micro_batch_size": 3, "num_micro_batches": 2, "admission": "refill"},
    "refill in chunks": {
        "micro_batch_size": 3,
        "num_micro_batches": 2,
        "admission": "refill",
        "batch_tokens": 9,
    },
    "diagonal": {"micro_batch_size": 4, "num_micro_batches": 1, "admission": "diagonal"},
    "KV on disk too": {
        "micro_batch_size": 4,
        "num_micro_batches": 2,
        "kv_percent": (0.0, 50.0, 50.0),
    },
    "refill, KV on disk too": {
        "micro_batch_size": 4,
        "num_micro_batches": 2,
        "kv_percent": (0.0, 50.0, 50.0),
        "admission": "refill",
    },
    "sim": {"device": "sim", "micro_batch_size": 4, "num_micro_batches": 2, "admission": "refill"},
    "sim, odd mix": {**tiny.ON_SIM, "admission": "refill"},
}


def requests(params: SamplingParams) -> Iterator[Request]:
    for index, (prompt, key, first) in enumerate(zip(PROMPTS, KEYS, BEGINNINGS, strict=True)):
        prefix = None if key is None else Prefix(key=key, num_tokens=len(first))
        yield Request(index=index, prompt_ids=prompt, params=params, prefix=prefix)


def run(directory: Path, params: SamplingParams, **options: Any) -> tuple[Any, Counter[int]]:
    """Completions by row, and how many tokens each row has brought; of beginnings below 0."""
    brought: Counter[int] = Counter()

    def on_batch(sweep: int, batch: MicroBatch) -> None:
        brought.update({span.row.request: 0 for span in batch.rows})
        for span in batch.rows:
            brought[span.row.request] += span.num_new

    chosen = {"device": "cpu", **options}
    with tiny.engine(directory, PROMPTS, STEPS, params, **chosen) as engine:
        done = {own.index: own for own in engine.run(requests(params), on_batch)}
        assert (
            not engine.placement.kv_cache.rows
            or min(
                key.request
                for key in engine.placement.kv_cache.rows  # type: ignore[attr-defined]
            )
            < 0
        )
    assert sorted(done) == list(range(len(PROMPTS)))
    return done, brought


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Beginnings of two rows or more are attended together; counts how often, by kind of row."""
    counts: Counter[str] = Counter()
    attend_stems = layers.attend_stems

    def counted(step: Any, q: Any, pool: Any, view: Any, *others: Any) -> None:
        for stem in view.stems:
            counts["prompts" if len(stem.tokens) > stem.num_rows else "single tokens"] += 1
        attend_stems(step, q, pool, view, *others)

    monkeypatch.setattr(batches, "LEAST_SHARERS", {"cpu": 2, "gpu": 2})
    monkeypatch.setattr(layers, "attend_stems", counted)
    return counts


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny.make_model(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    return tiny.tokens(tiny.reference(tiny.make_model(model_dir), PROMPTS, STEPS))


@pytest.mark.parametrize("name", POLICIES)
def test_same_tokens_and_beginnings_computed_once(
    name: str, model_dir: Path, expected: list[list[int]], together: Counter[str]
) -> None:
    done, brought = run(model_dir, SamplingParams(max_tokens=STEPS), **POLICIES[name])
    assert [list(done[row].token_ids) for row in range(len(PROMPTS))] == expected
    assert (name == "row by row") == (not together["single tokens"])
    if "disk" in name or "mix" in name:
        assert any(row < 0 for row in brought), "nothing was shared: the case is too easy"
        return
    once = {-1: len(LONG), -2: len(SHORT)}
    if name != "row by row":
        assert {row: count for row, count in brought.items() if row < 0} == once
    for row, (prompt, first) in enumerate(zip(PROMPTS, BEGINNINGS, strict=True)):
        assert brought[row] == len(prompt) - len(first) + STEPS - 1


@pytest.mark.parametrize("name", ["zigzag", "refill in chunks", "sim", "diagonal"])
def test_attended_together_or_not(
    name: str, model_dir: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens from keys attended together, row by row, and not shared at all."""
    params = SamplingParams(max_tokens=STEPS)
    for least in (2, 99):
        monkeypatch.setattr(batches, "LEAST_SHARERS", {"cpu": least, "gpu": least})
        for shares in (True, False):
            done, _ = run(model_dir, params, **POLICIES[name], share_prefixes=shares)
            assert [list(done[row].token_ids) for row in range(len(PROMPTS))] == expected


# All rows begin with one or the other, which is planned: they share it wherever their own keys are.
ALIKE = [row for row, key in enumerate(KEYS) if key is not None]
ELSEWHERE: dict[str, dict[str, Any]] = {
    "KV on disk": {"kv_percent": (0.0, 0.0, 100.0), "micro_batch_size": 9},
    "a row by itself": {"kv_percent": (0.0, 0.0, 100.0), "micro_batch_size": 1},
    "half on disk, K=2": {
        "kv_percent": (0.0, 50.0, 50.0),
        "micro_batch_size": 4,
        "num_micro_batches": 2,
    },
    "refill in chunks, half on disk": {
        "kv_percent": (0.0, 50.0, 50.0),
        "micro_batch_size": 3,
        "num_micro_batches": 2,
        "batch_tokens": 9,
        "admission": "refill",
    },
    "refill, all on disk": {
        "kv_percent": (0.0, 0.0, 100.0),
        "micro_batch_size": 3,
        "num_micro_batches": 2,
        "admission": "refill",
    },
    "sim, all in RAM": {
        "device": "sim",
        "kv_percent": (0.0, 100.0, 0.0),
        "cpu_attention_percent": 0.0,
        "micro_batch_size": 4,
        "admission": "diagonal",
    },
    "sim, three tiers": {
        "device": "sim",
        "kv_percent": (40.0, 30.0, 30.0),
        "cpu_attention_percent": 0.0,
        "micro_batch_size": 5,
        "num_micro_batches": 2,
    },
}


def run_alike(
    directory: Path, params: SamplingParams, *, shares: bool, **options: Any
) -> tuple[dict[int, list[list[int]]], Counter[int], Engine]:
    """Tokens of each output, tokens that each row brought, and the closed engine."""
    told = tiny.workload([PROMPTS[row] for row in ALIKE], STEPS, params)
    if shares:
        told = tiny.begin_alike(
            told,
            keys=[KEYS[row] for row in ALIKE],
            tokens=[len(BEGINNINGS[row]) for row in ALIKE],
            prompts=[len(PROMPTS[row]) for row in ALIKE],
            new=[STEPS] * len(ALIKE),
            samples=[params.n] * len(ALIKE),
        )
    chosen = EngineOptions(
        **{
            "device": "cpu",
            "dtype": "float32",
            "verify": True,
            "disk_dir": directory,
            "num_micro_batches": 1,
            "weights_percent": (100.0, 0.0, 0.0) if "device" in options else (0.0, 100.0, 0.0),
            "share_prefixes": shares,
            **options,
        }
    )
    brought: Counter[int] = Counter()

    def on_batch(_: int, batch: MicroBatch) -> None:
        for span in batch.rows:
            brought[span.row.request] += span.num_new

    own = [request for request in requests(params) if request.index in ALIKE]
    engine = build_engine(directory, options=chosen, workload=told)
    try:
        done = {
            one.index: [list(output.token_ids) for output in one.outputs]
            for one in engine.run(iter(own), on_batch)
        }
    finally:
        engine.close()
    return done, brought, engine


@pytest.mark.parametrize("name", ELSEWHERE)
def test_rows_elsewhere_share_what_lies_near(
    name: str, model_dir: Path, expected: list[list[int]]
) -> None:
    """Computed once, kept once, and never moved: each row's own keys are all that crosses."""
    found = {
        shares: run_alike(
            model_dir, SamplingParams(max_tokens=STEPS), shares=shares, **ELSEWHERE[name]
        )
        for shares in (True, False)
    }
    for done, _, _ in found.values():
        assert done == {row: [expected[row]] for row in ALIKE}
    _, brought, engine = found[True]
    assert {row: n for row, n in brought.items() if row < 0} == {-1: len(LONG), -2: len(SHORT)}
    for row in ALIKE:
        assert brought[row] == len(PROMPTS[row]) - len(BEGINNINGS[row]) + STEPS - 1
    _, _, whole = found[False]
    assert engine.plan.policy.kv == whole.plan.policy.kv
    pages = engine.plan.geometry.kv_pages, whole.plan.geometry.kv_pages
    policy = whole.plan.policy
    far = [t for t in ("cpu", "disk") if t != policy.compute_tier and policy.kv.share(t)]
    assert far and all(pages[0][tier] < pages[1][tier] for tier in far)
    links = {"disk": ["disk read", "disk write"], "cpu": ["host to device", "device to host"]}
    for tier in far:
        for link in links[tier]:
            assert 0 < moved(engine, link) < moved(whole, link)


def moved(engine: Engine, link: str) -> int:
    """Bytes over a link since everything was loaded."""
    return engine.traffic.moved[link] - engine.load_traffic.get(link, 0)


def test_bytes_of_rows_elsewhere_are_those_of_their_own_keys(model_dir: Path) -> None:
    """Pages go to disk once, when they are full, and come back in every later sweep."""
    params = SamplingParams(max_tokens=STEPS)
    _, _, engine = run_alike(model_dir, params, shares=True, **ELSEWHERE["KV on disk"])
    page, layers = engine.plan.policy.page_tokens, engine.config.num_layers
    owns = [len(PROMPTS[row]) - len(BEGINNINGS[row]) for row in ALIKE]
    written = sum((own + STEPS - 1) // page for own in owns)
    read = sum((own + step) // page for own in owns for step in range(STEPS - 1))
    size = layers * engine.plan.geometry.page_bytes
    assert read and written
    assert moved(engine, "disk write") == written * size
    assert moved(engine, "disk read") == read * size


@pytest.mark.parametrize("name", ["half on disk, K=2", "refill in chunks, half on disk"])
def test_samples_share_a_beginning_from_any_tier(name: str, model_dir: Path) -> None:
    params = SamplingParams(max_tokens=STEPS, n=3, temperature=1.0, seed=5)
    options = {**ELSEWHERE[name], "micro_batch_size": 6}
    shared, brought, _ = run_alike(model_dir, params, shares=True, **options)
    alone, _, _ = run_alike(model_dir, params, shares=False, **options)
    assert shared == alone
    assert brought[-1] == len(LONG)


@pytest.mark.parametrize("name", ["KV on disk", "sim, three tiers"])
@pytest.mark.parametrize("kind", ["windows", "capped scores", "8-bit keys", "the highest scores"])
def test_of_all_kinds_of_attention_from_any_tier(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention needs all scores of a row at once nothing is shared from elsewhere."""
    monkeypatch.setattr(default, "fitting_page_tokens", lambda *_: 16)
    sizes = {**tiny.SIZES, "head_dim": 32}
    configs: dict[str, PretrainedConfig | None] = {
        "windows": MistralConfig(**sizes, sliding_window=24),
        "capped scores": Gemma2Config(
            **{**sizes, "sliding_window": 24, "attn_logit_softcapping": 2.0}
        ),
    }
    approximations: dict[str, dict[str, Any]] = {
        "8-bit keys": {"kv_bits": 8, "group_size": 32},
        "the highest scores": {"sparse_attention": 0.3},
    }
    tiny.make_model(tmp_path, config=configs.get(kind), **({} if kind in configs else sizes))
    options = {**ELSEWHERE[name], **approximations.get(kind, {})}
    params = SamplingParams(max_tokens=STEPS)
    shared, brought, _ = run_alike(tmp_path, params, shares=True, **options)
    alone, _, _ = run_alike(tmp_path, params, shares=False, **options)
    assert shared == alone
    assert (min(brought) < 0) == (kind != "the highest scores")


MODELS: dict[str, dict[str, Any]] = {
    "windows shorter than the beginnings": {"sliding_window": 24},
    "a window that some rows' beginnings outgrow": {"sliding_window": 44},
    "capped scores": {"architecture": "gemma2"},
    "sinks": {"architecture": "gpt-oss"},
    "slopes": {"architecture": "bloom"},
    "latents": {"architecture": "deepseek"},
    "latents in 8 bits": {"architecture": "deepseek", "kv_bits": 8, "group_size": 32},
    "8-bit keys": {"kv_bits": 8, "group_size": 32},
    "the highest scores": {"sparse_attention": 0.3},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["zigzag", "refill in chunks", "sim"])
def test_of_all_kinds_of_attention(
    name: str,
    policy: str,
    tmp_path: Path,
    together: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows, caps and compressed keys are attended together exactly; sparse attention is not.
    Layers whose windows roll have nothing in common. Pages are no longer than beginnings, also of
    latents, of which more tokens would fit."""
    monkeypatch.setattr(default, "fitting_page_tokens", lambda *_: 16)
    options = {"roll_windows": False, **MODELS[name]}
    window, architecture = options.pop("sliding_window", None), options.pop("architecture", None)
    sizes = {**tiny.SIZES, "head_dim": 32}
    config = MistralConfig(**sizes, sliding_window=window) if window else None
    if architecture == "gemma2":
        config = Gemma2Config(**{**sizes, "sliding_window": 24, "attn_logit_softcapping": 2.0})
    if architecture == "gpt-oss":
        config = gpt_oss(sliding_window=24)
    if architecture == "bloom":
        config = BloomConfig(**tiny.SIZES)
    if architecture == "deepseek":
        config = deepseek(DeepseekV2Config, q_lora_rank=None)
    model = tiny.make_model(tmp_path, config=config)
    params, chosen = SamplingParams(max_tokens=STEPS), POLICIES[policy]
    found = {
        shares: run(tmp_path, params, **chosen, **options, share_prefixes=shares)[0]
        for shares in (True, False)
    }
    tokens = {k: [list(own[row].token_ids) for row in range(12)] for k, own in found.items()}
    assert tokens[True] == tokens[False]
    if options.keys() <= {"roll_windows"}:
        assert tokens[True] == tiny.tokens(tiny.reference(model, PROMPTS, STEPS))
    assert bool(together) == ("sparse_attention" not in options)


@pytest.mark.parametrize("name", ["zigzag, K=4", "refill in chunks"])
def test_samples_share_a_beginning_too(name: str, model_dir: Path, together: Counter[str]) -> None:
    params = SamplingParams(max_tokens=STEPS, n=3, temperature=1.0, seed=5)
    shared, brought = run(model_dir, params, **POLICIES[name])
    alone, _ = run(model_dir, params, **POLICIES[name], share_prefixes=False)
    for row in range(len(PROMPTS)):
        tokens = [output.token_ids for output in shared[row].outputs]
        assert tokens == [output.token_ids for output in alone[row].outputs]
    assert brought[-1] == len(LONG)


def test_prompts_that_are_scored_come_whole(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    done, brought = run(model_dir, params, **POLICIES["zigzag, K=4"])
    assert min(brought) == 0
    assert all(len(own.prompt_logprobs) == own.num_prompt_tokens for own in done.values())


@pytest.mark.parametrize("name", ["zigzag, K=4", "refill in chunks"])
def test_scores_behind_a_beginning(name: str, model_dir: Path) -> None:
    """What is scored lies behind it: the same scores, and the beginning computed once."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    rows = [(ids, 0) for ids, key in zip(PROMPTS, KEYS, strict=True) if key == 0 and len(ids) > 51]
    assert len(rows) > 2
    found: dict[bool, list[list[float]]] = {}
    for shares in (True, False):
        requests = [
            Request(
                index=i,
                prompt_ids=prompt,
                params=params,
                prefix=Prefix(key=key, num_tokens=48),
                score_from=49 + i % 2,
            )
            for i, (prompt, key) in enumerate(rows)
        ]
        brought: Counter[int] = Counter()

        def note(sweep: int, batch: MicroBatch, brought: Counter[int] = brought) -> None:
            brought.update({s.row.request: s.num_new for s in batch.rows})

        work = tiny.workload([prompt for prompt, _ in rows], 0, params)
        options = EngineOptions(
            device="cpu", dtype="float32", verify=True, share_prefixes=shares, **POLICIES[name]
        )
        told = work.with_beginning(48)
        engine = build_engine(model_dir, options=options, workload=told)
        done = {own.index: own for own in engine.run(iter(requests), note)}
        engine.close()
        found[shares] = [
            [own.logprob for own in done[i].prompt_logprobs or () if own is not None]
            for i in range(len(rows))
        ]
        assert (brought[-1] == 48) == shares
    for one, other in zip(found[True], found[False], strict=True):
        assert len(one) > 0 and one == pytest.approx(other, abs=1e-4)


WITHOUT_KEYS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"micro_batch_size": 12, "num_micro_batches": 1},
    "beginnings over borders": {"micro_batch_size": 5, "num_micro_batches": 3},
    "several blocks": {"micro_batch_size": 3, "num_micro_batches": 1},
    "few tokens at once": {"micro_batch_size": 12, "num_micro_batches": 2, "batch_tokens": 70},
    "sim": {"device": "sim", "micro_batch_size": 6, "num_micro_batches": 2},
}


@pytest.mark.parametrize("kind", ["scores", "one new token"])
@pytest.mark.parametrize("name", WITHOUT_KEYS)
def test_many_beginnings_where_no_keys_are_kept(
    name: str, kind: str, model_dir: Path, expected: list[list[int]]
) -> None:
    """Each is computed once in a micro-batch, with the rows that have it, and forgotten."""
    check_many_beginnings(name, kind, model_dir, expected)


@pytest.mark.parametrize("kind", ["scores", "one new token"])
@pytest.mark.parametrize("name", WITHOUT_KEYS)
def test_many_beginnings_where_no_states_are_kept(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "fitting_page_tokens", lambda *_: 16)
    model = tiny.make_model(tmp_path, config=CONFIGS["qwen3.5"])
    expected = tiny.tokens(tiny.reference(model, PROMPTS, 1))
    check_many_beginnings(name, kind, tmp_path, expected)


def check_many_beginnings(name: str, kind: str, model_dir: Path, expected: list[list[int]]) -> None:
    own = {"micro_batch_size", "num_micro_batches", "batch_tokens"} & WITHOUT_KEYS[name].keys()
    policy = {key: WITHOUT_KEYS[name][key] for key in own}
    device = WITHOUT_KEYS[name].get("device", "cpu")
    is_scored = kind == "scores"
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    params = params if is_scored else SamplingParams(max_tokens=1)
    found: dict[bool, list[Any]] = {}
    for shares in (True, False):
        rows = [
            Request(
                index=index,
                prompt_ids=prompt,
                params=params,
                prefix=None if key is None else Prefix(key=key, num_tokens=len(first)),
                score_from=max(1, len(prompt) - 1) if is_scored else 0,
            )
            for index, (prompt, key, first) in enumerate(
                zip(PROMPTS, KEYS, BEGINNINGS, strict=True)
            )
            if len(prompt) > 1
        ]
        computed: list[dict[int, int]] = []

        def note(sweep: int, batch: MicroBatch, computed: list[dict[int, int]] = computed) -> None:
            computed.append({span.row.request: span.num_new for span in batch.rows})
            assert batch.num_tokens <= policy.get("batch_tokens", 10_000)

        options = EngineOptions(
            device=device, dtype="float32", verify=True, share_prefixes=shares, **policy
        )
        work = tiny.workload([row.prompt_ids for row in rows], params.max_tokens, params)
        work = replace(work, is_brought=True)
        engine = build_engine(model_dir, options=options, workload=work)
        assert not engine.placement.kv_cache.is_kept
        done = {own.index: own for own in engine.run(iter(rows), note)}
        found[shares] = [
            done[row.index].log_likelihood if is_scored else done[row.index].token_ids
            for row in rows
        ]
        for batch in computed:
            held = set()
            for row in (row for row in batch if row >= 0):
                size, first = len(PROMPTS[row]) - is_scored, len(BEGINNINGS[row])
                has_one = shares and 0 < first < size
                assert batch[row] == size - first * has_one
                held |= {KEYS[row]} if has_one else set()
            beginnings = {-1 - row: batch[row] for row in batch if row < 0}
            assert beginnings == {key: (48, 32)[key] for key in held}
        engine.close()
    if is_scored:
        assert found[True] == pytest.approx(found[False], abs=1e-4)
    else:
        assert found[True] == found[False]
        assert all(token_ids[0] == expected[row][0] for row, token_ids in enumerate(found[True]))


def test_off_when_not_wanted(model_dir: Path, expected: list[list[int]]) -> None:
    done, brought = run(
        model_dir, SamplingParams(max_tokens=STEPS), **POLICIES["refill"], share_prefixes=False
    )
    assert [list(done[row].token_ids) for row in range(len(PROMPTS))] == expected
    assert min(brought) == 0 and brought[0] == len(PROMPTS[0]) + STEPS - 1


@pytest.mark.parametrize("admission", ["zigzag", "refill"])
def test_a_plan_counts_pages_once(
    admission: str, model_dir: Path, expected: list[list[int]]
) -> None:
    """All rows begin alike: their own pages, and those of the beginning once."""
    own = [prompt for prompt, key in zip(PROMPTS, KEYS, strict=True) if key == 0]
    plain = tiny.workload(own, STEPS)
    shared = plain.with_beginning(48)
    pages = {}
    for name, work in (("plain", plain), ("shared", shared)):
        options = EngineOptions(
            device="cpu",
            dtype="float32",
            verify=True,
            admission=admission,
            micro_batch_size=5,
            num_micro_batches=1,
        )
        engine = build_engine(model_dir, options=options, workload=work)
        pages[name] = engine.plan.geometry.kv_pages["cpu"]
        params = SamplingParams(max_tokens=STEPS)
        prefix = Prefix(key=0, num_tokens=48)
        rows = [
            Request(index=i, prompt_ids=ids, params=params, prefix=prefix)
            for i, ids in enumerate(own)
        ]
        done = {one.index: list(one.token_ids) for one in engine.run(iter(rows))}
        assert [done[row] for row in range(5)] == expected[:5]
        engine.close()
    assert pages["shared"] <= pages["plain"] - 5 * 3 + 3 or admission == "refill"
    assert pages["shared"] < pages["plain"]
