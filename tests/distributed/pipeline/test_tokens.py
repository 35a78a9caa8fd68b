"""Stages give the answers of one process: every rule, every tier, families, ends and scores.

All stages are in this process, each in a thread; every operation is proven legal before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config

from freight.demo import MODEL_DIR
from freight.distributed.pipeline import planning
from freight.model.batch import MicroBatch
from freight.plan.balance import Capacity
from freight.plan.workload import Workload
from freight.quantities import GIB
from freight.runtime.engine import OpenedModel, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, Prefix, Request, SamplingParams

from ...runtime import tiny
from ...runtime.test_engine_parity import (
    GEMMA4_EXPERTS,
    afmoe,
    cohere2_moe,
    deepseek,
    four_layers,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    laguna,
    mimo,
)
from ...runtime.test_engine_recurrence import CONFIGS, UNCOUNTED, falcon_h1
from .stages import answers, on_ranks

STEPS = 8
PROMPTS = tiny.prompts(11, 20)
RULES = ("zigzag", "diagonal", "refill")
HOMES: list[dict[str, Any]] = [
    {},
    {"device": "sim"},
    {"kv_percent": (0.0, 0.0, 100.0)},
    {"kv_percent": (0.0, 50.0, 50.0)},
    {"device": "sim", "kv_percent": (30.0, 40.0, 30.0), "cpu_attention_percent": 0.0},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    directory = tmp_path_factory.mktemp("llama")
    model = tiny.make_model(directory, num_hidden_layers=4)
    return directory, tiny.tokens(tiny.reference(model, PROMPTS, STEPS))


def ids(done: Sequence[Completion]) -> list[list[int]]:
    return [list(one.token_ids) for one in done]


def requests(**params: Any) -> list[Request]:
    return list(tiny.requests(PROMPTS, SamplingParams(max_tokens=STEPS, **params)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [2, 4])
def test_every_rule(llama: tuple[Path, list[list[int]]], size: int, rule: str) -> None:
    directory, wanted = llama
    told = answers(
        directory,
        size,
        requests(),
        tiny.workload(PROMPTS, STEPS),
        admission=rule,
        micro_batch_size=2,
        num_micro_batches=2,
    )
    assert [ids(own) for own in told] == [wanted] * size


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [tiny.ON_CPU, tiny.ON_SIM], ids=["disk", "device"])
def test_every_tier(
    llama: tuple[Path, list[list[int]]], options: dict[str, Any], rule: str
) -> None:
    """Weights, keys and activations on all tiers, some rows attended by the CPU."""
    directory, wanted = llama
    work = tiny.workload(PROMPTS, STEPS)
    told = answers(directory, 3, requests(), work, admission=rule, **options)
    assert [ids(own) for own in told] == [wanted] * 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("options", "times"), [(tiny.ON_CPU, 2), (tiny.ON_SIM, 4)], ids=["disk", "device"]
)
def test_guesses_come_true_on_all_stages(
    llama: tuple[Path, list[list[int]]], options: dict[str, Any], times: int, rule: str
) -> None:
    """Prompts come again, so that later rows guess what earlier ones said: as often as it takes for
    some to have ended when others begin."""
    directory, wanted = llama
    prompts = PROMPTS * times
    asked = list(tiny.requests(prompts, SamplingParams(max_tokens=STEPS)))
    guesses: list[tuple[int, int]] = []
    told = answers(
        directory,
        3,
        asked,
        tiny.workload(prompts, STEPS),
        look=lambda own: guesses.append((own.guesses.num_tried, own.guesses.num_true)),
        admission=rule,
        draft_tokens=3,
        **options,
    )
    assert [ids(own) for own in told] == [wanted * times] * 3
    assert len({*guesses}) == 1
    assert 0 < guesses[0][1] < guesses[0][0]


def test_each_stage_has_weights_places_of_its_own(llama: tuple[Path, list[list[int]]]) -> None:
    directory, wanted = llama
    weights = [(0.0, 100.0, 0.0), (0.0, 20.0, 80.0)]
    work = tiny.workload(PROMPTS, STEPS)
    told = answers(
        directory, 2, requests(), work, own=lambda rank: {"weights_percent": weights[rank]}
    )
    assert [ids(own) for own in told] == [wanted] * 2


def test_machines_that_differ_get_stages_that_differ(
    llama: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one multiplies a third as fast, by what it says of itself."""
    directory, wanted = llama
    budgets = [5 * GIB, 4 * GIB]  # more than the process of all tests takes

    def measure(model: OpenedModel) -> Capacity:
        is_first = model.options.cpu_memory_bytes == budgets[0]
        return Capacity(
            flops_per_s=3e12 if is_first else 1e12, memory_bytes=GIB, read_bytes_per_s=1e9
        )

    layers = []
    monkeypatch.setattr(planning, "_measure", measure)
    monkeypatch.setattr(planning, "_alike", lambda capacities, processors: capacities)
    told = answers(
        directory,
        2,
        requests(),
        tiny.workload(PROMPTS, STEPS),
        own=lambda rank: {"cpu_memory_bytes": budgets[rank]},
        look=lambda engine: layers.append((engine.stage.layers, engine.all_layers)),
    )
    assert [ids(own) for own in told] == [wanted] * 2
    own = [range(3), range(3, 4)]
    assert sorted(layers, key=lambda of: of[0].start) == [(own[0], own), (own[1], own)]


FAMILIES: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(
        **{**tiny.SIZES, "num_hidden_layers": 3}, num_local_experts=4, num_experts_per_tok=2
    ),
    "falcon": FalconConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        bias=False,
        alibi=False,
        eos_token_id=None,
        bos_token_id=None,
    ),
    # Learned positions, and a table that the head shares.
    "opt": OPTConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        ffn_dim=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
        pad_token_id=1,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=True,
    ),
    # Layers of two kinds, of which a stage has one alone, or both the other way round.
    "gemma3": gemma3(sliding_window_pattern=4),
    # Heads of one size on a stage, or of both.
    "gemma4": gemma4(),
    "gemma4, experts": gemma4(**GEMMA4_EXPERTS),
    # A first stage of the one size of heads, without sinks, and others of the other size.
    "mimo": mimo(num_hidden_layers=3),
    # The same of query heads, with gates.
    "laguna": laguna(
        num_hidden_layers=3,
        num_attention_heads_per_layer=[4, 6, 6],
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "gpt-oss": gpt_oss(num_hidden_layers=3),
    "afmoe": afmoe(),
    "command a+": cohere2_moe(),
    "glm4-moe": glm4_moe(num_hidden_layers=3),
    "deepseek-v3": deepseek(DeepseekV3Config, n_group=1, topk_group=1),
    # Several streams go from stage to stage, and with states.
    "hy 4": deepseek(HYV4Config, num_hidden_layers=3, index_topk=256),
    # What keys were chosen goes on with the stream, or with several.
    "glm 5, shared choices": CONFIGS["glm 5, shared choices"],
    "hy 4, shared choices": CONFIGS["hy 4, shared choices"],
    # Stages whose layers rotate all, some or none.
    "mistral large 4": CONFIGS["mistral large 4"],
    "glm 5.3": CONFIGS["glm 5.3"],
    # Routers that go by tokens, which another stage looks up.
    "deepseek v4": CONFIGS["deepseek v4, windows"],
    "deepseek v4, chosen keys": CONFIGS["deepseek v4, chosen keys"],
    # States and keys, and a stage of states alone.
    "qwen3.5 moe": CONFIGS["qwen3.5 moe"],
    "falcon h1": falcon_h1(num_hidden_layers=3),
    # A stage of an MLP and a state alone.
    "nemotron h": CONFIGS["nemotron h, no biases"],
    # A bias of the head, and a norm of embeddings with positions that keys carry.
    "phi": PhiConfig(**{**tiny.SIZES, "num_hidden_layers": 3}),
    "bloom": BloomConfig(**{**tiny.SIZES, "num_hidden_layers": 3}),
    "command-r7b": four_layers(Cohere2Config, sliding_window=9, logit_scale=0.25),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, config=FAMILIES[family])
    with_positions = family in UNCOUNTED
    wanted = tiny.tokens(tiny.reference(model, PROMPTS, STEPS, with_positions=with_positions))
    work = tiny.workload(PROMPTS, STEPS)
    options = {**tiny.ON_CPU, "admission": "refill"}
    told = answers(tmp_path, 3, requests(), work, **options)
    assert [ids(own) for own in told] == [wanted] * 3


@pytest.mark.parametrize("options", [tiny.ON_CPU, tiny.ON_SIM], ids=["disk", "device"])
@pytest.mark.parametrize(("first", "rolls"), [(1, True), (2, False)])
def test_windows_roll_on_all_stages_or_on_none(
    first: int, rolls: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Layers have windows from the second on, or those of the second stage alone; rows move."""
    config = Qwen2Config(
        **{**tiny.SIZES, "num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=first,
    )
    model = tiny.make_model(tmp_path, config=config)
    prompts = tiny.prompts(9, 80)
    wanted = tiny.tokens(tiny.reference(model, prompts, STEPS))
    found: list[bool] = []
    with patch("freight.plan.windows.pays", return_value=True):
        told = answers(
            tmp_path,
            2,
            list(tiny.requests(prompts, SamplingParams(max_tokens=STEPS))),
            tiny.workload(prompts, STEPS),
            look=lambda own: found.append(own.plan.geometry.rolls),
            admission="refill",
            **options,
        )
    assert [ids(own) for own in told] == [wanted] * 2
    assert found == [rolls] * 2


def one_process(
    directory: Path, asked: Sequence[Request], work: Workload, **options: Any
) -> list[Completion]:
    defaults = {"dtype": "float32", "device": "cpu", "disk_dir": directory}
    engine = build_engine(
        directory, options=EngineOptions(**{**defaults, **options}), workload=work
    )
    try:
        return sorted(engine.run(iter(asked)), key=lambda one: one.index)
    finally:
        engine.close()


def test_the_bundled_model() -> None:
    """Text in, text out: stop strings and ends of sequences are found on every stage."""
    from freight.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(MODEL_DIR)
    texts = ["copy: abc ->", "add 12 34 =", "hello", "reverse abcd", "sort 3 1 2", "x y z"]
    params = SamplingParams(max_tokens=12, stop=("\n",), temperature=0.7, seed=5)
    asked = [
        Request(index=i, prompt_ids=tokenizer.encode(text), params=params)
        for i, text in enumerate(texts * 2)
    ]
    work = replace(tiny.workload([one.prompt_ids for one in asked], 12), ends_early=True)
    wanted = one_process(MODEL_DIR, asked, work)
    told = answers(MODEL_DIR, 3, asked, work, admission="refill", disk_dir=None)
    assert told == [wanted] * 3
    assert len({len(one.token_ids) for one in wanted}) > 1, "all ended alike"


@given(data=st.data())
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_mixtures(llama: tuple[Path, list[list[int]]], data: st.DataObject) -> None:
    """Lengths, samples, stop tokens, scores, shared beginnings, chunks of prompts, few rows."""
    directory, wanted = llama
    count = data.draw(st.integers(1, len(PROMPTS)), "rows")
    size = data.draw(st.sampled_from([2, 3, 4]), "stages")
    shared = [7, 9, 11, 13] * 5 if data.draw(st.booleans(), "shared") else []
    scored = 2 if data.draw(st.booleans(), "scored") else None
    asked = []
    for i in range(count):
        prefix = Prefix(key=0, num_tokens=len(shared)) if shared and scored is None else None
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, STEPS)),
            n=data.draw(st.sampled_from([1, 1, 3])),
            temperature=0.8,
            seed=i,
            logprobs=scored,
            prompt_logprobs=scored,
            stop_token_ids=(wanted[i][3],),
            repetition_penalty=1.2,
        )
        prompt = [*shared, *PROMPTS[i]]
        asked.append(Request(index=i, prompt_ids=prompt, params=params, prefix=prefix))
    work = workload(asked, shared=len(shared) if scored is None else 0)
    told = answers(
        directory,
        size,
        asked,
        work,
        admission=data.draw(st.sampled_from(RULES)),
        micro_batch_size=data.draw(st.integers(1, 4)),
        num_micro_batches=data.draw(st.integers(1, 3)),
        batch_tokens=data.draw(st.sampled_from([None, 16, 40])),
        **data.draw(st.sampled_from(HOMES)),
    )
    alone = one_process(directory, asked, work)
    for own in told:
        for one, other in zip(own, alone, strict=True):
            assert [out.token_ids for out in one.outputs] == [
                out.token_ids for out in other.outputs
            ]
            assert [out.stop_reason for out in one.outputs] == [
                out.stop_reason for out in other.outputs
            ]
            assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)


def logprobs(done: Completion) -> list[float]:
    """Of the prompt's tokens and of those made, with all alternatives."""
    listed = [*done.scored, *(one for out in done.outputs for one in out.logprobs or ())]
    return [value for one in listed for value in (one.logprob, *(top.logprob for top in one.top))]


def workload(asked: Sequence[Request], *, shared: int) -> Workload:
    prompts = [len(one.prompt_ids) for one in asked]
    new = [one.params.max_tokens for one in asked]
    samples = [one.params.n for one in asked]
    scored = asked[0].params.prompt_logprobs is not None
    return Workload(
        num_rows=sum(samples),
        max_prompt_tokens=max(prompts),
        max_new_tokens=max(new),
        max_total_tokens=max(map(sum, zip(prompts, new, strict=True))),
        total_prompt_tokens=sum(prompts),
        total_new_tokens=sum(n * count for n, count in zip(new, samples, strict=True)),
        min_samples=min(samples),
        max_samples=max(samples),
        max_scored_tokens=max(prompts) - 1 if scored else 0,
        max_listed_tokens=max(new) if scored else 0,
        max_logprobs=2 if scored else 0,
        ends_early=True,
    ).with_beginning(shared)


def test_stages_bring_the_same_micro_batches(llama: tuple[Path, list[list[int]]]) -> None:
    """And as many are in flight as there are stages: a sweep's tokens are taken as many later."""
    from freight.distributed.pipeline.planning import build_stage_engine
    from freight.distributed.ranks import Ranks

    directory, _ = llama
    work = tiny.workload(PROMPTS, STEPS)
    options = EngineOptions(
        device="cpu", dtype="float32", micro_batch_size=1, num_micro_batches=2, admission="refill"
    )

    def run(ranks: Ranks) -> list[tuple[int, MicroBatch]]:
        engine = build_stage_engine(directory, options=options, workload=work, ranks=ranks)
        seen: list[tuple[int, MicroBatch]] = []
        list(engine.run(iter(requests()), lambda sweep, batch: seen.append((sweep, batch))))
        engine.close()
        return seen

    first, *others = on_ranks(3, run)
    assert isinstance(first, list)
    assert others == [first] * 2
    rows = [
        {span.row for _, batch in first if _ == sweep for span in batch.rows} for sweep in (0, 1, 2)
    ]
    assert not rows[0] & rows[1] and not rows[1] & rows[2] and not rows[0] & rows[2]
