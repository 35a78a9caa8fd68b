"""Rows that enter, wait, grow and give way, through the whole engine: never another answer.

Lengths, rules, chunks, homes, pages, samples and shared beginnings are drawn at random; tokens and
scores of prompts are held against transformers, row by row. Samples are drawn from the most likely
token alone, so that each of them has one right answer too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from freight.entrypoints.bench.closed_form import SweepLog, logged_bytes
from freight.model.batch import MicroBatch
from freight.plan.default import Planner
from freight.plan.policy import Policy
from freight.plan.workload import Workload
from freight.runtime.engine import Engine, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, Prefix, Request, SamplingParams

from . import tiny
from .draws import draw_entering

STEPS = 12
LONG, SHORT = list(range(5, 53)), list(range(100, 132))
BEGINNINGS = [LONG] * 5 + [SHORT] * 4 + [[]] * 4
OWN = tiny.prompts(len(BEGINNINGS), 30)
PROMPTS = [[*first, *own] for first, own in zip(BEGINNINGS, OWN, strict=True)]
PROMPTS[1] = [*LONG, 7]
KEYS = [0] * 5 + [1] * 4 + [None] * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request: a prompt by its number, and how much of its answer is wanted; one that
    ``might_stop`` does not, but nobody knows."""

    prompt: int
    max_tokens: int = STEPS
    samples: int = 1
    stops: bool = False
    might_stop: bool = False
    is_scored: bool = False
    is_shared: bool = False
    shares_all: bool = False

    @property
    def beginning(self) -> tuple[int | None, list[int]]:
        """Key and tokens of what it shares: all of its prompt with its samples, or what others
        begin with."""
        whole = PROMPTS[self.prompt]
        if not self.is_shared or self.is_scored:
            return None, []
        if self.shares_all and self.samples > 1:
            return 100 + self.prompt, whole[:-1]
        return KEYS[self.prompt], BEGINNINGS[self.prompt]

    def request(self, index: int, answers: Sequence[tiny.Answer]) -> Request:
        answer = answers[self.prompt].token_ids
        stop = answer[STEPS // 2] if self.stops else next(n for n in range(99) if n not in answer)
        params = SamplingParams(
            max_tokens=self.max_tokens,
            n=self.samples,
            temperature=1.0 if self.samples > 1 else 0.0,
            top_k=1,
            stop_token_ids=(stop,) if self.stops or self.might_stop else (),
            prompt_logprobs=0 if self.is_scored else None,
        )
        key, first = self.beginning
        prefix = None if key is None else Prefix(key=key, num_tokens=len(first))
        return Request(index=index, prompt_ids=PROMPTS[self.prompt], params=params, prefix=prefix)

    def answer(self, answers: Sequence[tiny.Answer]) -> tuple[int, ...]:
        whole = answers[self.prompt].token_ids
        end = whole.index(whole[STEPS // 2]) if self.stops else STEPS
        return tuple(whole[: min(end, self.max_tokens)])


def workload(asked: Sequence[Asked], expected_tokens: int | None = None) -> Workload:
    """As a dataset's would be; answers may be expected to be shorter than they may become."""
    rows = sum(own.samples for own in asked)
    prompts = [len(PROMPTS[own.prompt]) for own in asked]
    new = [own.max_tokens for own in asked]
    total = sum(own.samples * own.max_tokens for own in asked)
    work = Workload(
        num_rows=rows,
        max_prompt_tokens=max(prompts),
        max_new_tokens=max(new),
        max_total_tokens=max(map(sum, zip(prompts, new, strict=True))),
        total_prompt_tokens=sum(prompts),
        total_new_tokens=min(total, rows * (expected_tokens or STEPS)),
        min_samples=min(own.samples for own in asked),
        max_samples=max(own.samples for own in asked),
        max_scored_tokens=max(
            (n - 1 for n, own in zip(prompts, asked, strict=True) if own.is_scored), default=0
        ),
        ends_early=any(own.stops or own.might_stop for own in asked),
    )
    return tiny.begin_alike(
        work,
        keys=[own.beginning[0] for own in asked],
        tokens=[len(own.beginning[1]) for own in asked],
        prompts=prompts,
        new=new,
        samples=[own.samples for own in asked],
    )


@contextmanager
def policies_with(**changes: Any) -> Iterator[None]:
    """Plans whose policies have these values, whatever the planner thinks of them."""
    candidates = Planner._candidates

    def changed(self: Planner) -> Iterator[Policy]:
        return (replace(policy, **changes) for policy in candidates(self))

    with patch.object(Planner, "_candidates", changed):
        yield


@contextmanager
def engine(
    directory: Path, work: Workload, changes: dict[str, Any], **options: Any
) -> Iterator[Engine]:
    defaults = {"device": "cpu", "dtype": "float32", "verify": True, "disk_dir": directory}
    with policies_with(**changes):
        built = build_engine(
            directory, options=EngineOptions(**{**defaults, **options}), workload=work
        )
    try:
        yield built
    finally:
        built.close()


def check(
    done: Sequence[Completion],
    asked: Sequence[Asked],
    answers: Sequence[tiny.Answer],
    scores: Mapping[int, torch.Tensor] | None = None,
) -> None:
    assert sorted(own.index for own in done) == list(range(len(asked)))
    for own in done:
        wanted = asked[own.index]
        for output in own.outputs:
            assert output.token_ids == wanted.answer(answers)
        assert len(own.outputs) == wanted.samples
        if wanted.is_scored:
            assert own.prompt_logprobs is not None
            found = [one.logprob for one in own.prompt_logprobs if one is not None]
            torch.testing.assert_close(
                torch.tensor(found), (scores or SCORES)[wanted.prompt], atol=2e-4, rtol=1e-3
            )


def run_counted(
    built: Engine,
    asked: Sequence[Asked],
    answers: Sequence[tiny.Answer],
    scores: Mapping[int, torch.Tensor] | None = None,
    *,
    is_counted: bool = True,
) -> Counter[str]:
    """Answers, and scores of prompts, are right, and what crosses links is what is reckoned of who
    was in which sweep, which is told where rows share nothing: ``is_counted``."""
    log, before = SweepLog(built), Counter(built.traffic.moved)
    requests = [own.request(index, answers) for index, own in enumerate(asked)]
    check([*built.run(iter(requests), on_batch=log.on_batch)], asked, answers, scores)
    moved = Counter(built.traffic.moved)
    moved.subtract(before)
    if is_counted:
        told = Counter(logged_bytes(built, log))
        # A sweep that is expected may not come, where a row stops or is guessed to its end.
        if any(own.stops for own in asked) or built.plan.policy.draft_tokens:
            told += read_in_vain(built, moved, told)
        assert +moved == told
    return moved


def read_in_vain(built: Engine, moved: Counter[str], told: Counter[str]) -> Counter[str]:
    """What was brought for a sweep that did not come: no more than the first units' weights, which
    are read ahead."""
    first = built.plan.layout.units[:4]
    most = sum(unit.streamed_bytes(tier)[1] for unit in first for tier in ("disk", "cpu"))
    more = moved - told
    assert more.keys() <= {"disk read", "host to device"}
    assert all(size <= most for size in more.values())
    return more


SCORES: dict[int, torch.Tensor] = {}


def score(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Log-probabilities of the tokens of each prompt but its first."""
    scores = {}
    for number, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0].float()
        logprobs = logits.log_softmax(-1)[:-1]
        scores[number] = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return scores


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def answers(model_dir: Path) -> list[tiny.Answer]:
    # With heads so wide that what comes into attention is narrower than keys and values.
    model = tiny.make_model(model_dir, head_dim=32)
    SCORES.update(score(model))
    return tiny.reference(model, PROMPTS, STEPS)


asked_rows = st.builds(
    Asked,
    prompt=st.integers(0, len(PROMPTS) - 1),
    max_tokens=st.integers(1, STEPS),
    samples=st.sampled_from([1, 1, 1, 2, 3]),
    stops=st.booleans(),
    is_scored=st.sampled_from([False, False, False, True]),
    is_shared=st.sampled_from([True, True, False]),
    shares_all=st.booleans(),
)
# What all begin with is planned for, and shared by rows on any tier.
asked_alike = st.builds(
    Asked,
    prompt=st.integers(0, KEYS.index(None) - 1),
    max_tokens=st.integers(1, STEPS),
    samples=st.sampled_from([1, 1, 1, 2, 3]),
    stops=st.booleans(),
    is_shared=st.just(True),
    shares_all=st.booleans(),
)
CPU, GPU, DISK = (0.0, 100.0, 0.0), (100.0, 0.0, 0.0), (0.0, 0.0, 100.0)
homes = st.one_of(
    st.tuples(st.just("cpu"), st.sampled_from([CPU, CPU, DISK, (0.0, 50.0, 50.0)]), st.none()),
    st.tuples(
        st.just("sim"),
        st.sampled_from([GPU, CPU, (50.0, 50.0, 0.0), (34.0, 33.0, 33.0)]),
        st.sampled_from([0.0, 0.0, 50.0, 100.0]),
    ),
)


@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_admission_gives_the_same_answers(
    data: st.DataObject, model_dir: Path, answers: list[tiny.Answer]
) -> None:
    rows = data.draw(st.sampled_from([asked_rows, asked_alike]))
    asked = data.draw(st.lists(rows, min_size=1, max_size=14))
    asked.sort(key=lambda own: own.beginning[1])
    entering, changes = draw_entering(data)
    device, kv, attention = data.draw(homes)
    options = {
        "device": device,
        "kv_percent": kv,
        "cpu_attention_percent": attention,
        "recompute_percent": None if attention else data.draw(st.sampled_from([0.0, 50.0, 100.0])),
        **entering,
        "draft_tokens": data.draw(st.sampled_from([0, 0, 1, 5])),
    }
    expected_tokens = data.draw(st.integers(1, STEPS))
    work = workload(asked, expected_tokens)
    with engine(model_dir, work, changes, **options) as built:
        requests = [own.request(index, answers) for index, own in enumerate(asked)]
        check([*built.run(iter(requests))], asked, answers)


mixed_homes = st.one_of(
    st.tuples(st.just("cpu"), st.sampled_from([(0.0, 50.0, 50.0), (0.0, 30.0, 70.0)]), st.none()),
    st.tuples(
        st.just("sim"),
        st.sampled_from(
            [(50.0, 50.0, 0.0), (34.0, 33.0, 33.0), (0.0, 50.0, 50.0), (50.0, 0, 50.0)]
        ),
        st.sampled_from([0.0, 0.0, 50.0]),
    ),
)


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_rows_that_move_go_on_as_they_would_have(
    data: st.DataObject, model_dir: Path, answers: list[tiny.Answer]
) -> None:
    move_rows(data, model_dir, answers, SCORES, page_tokens=8)


def move_rows(
    data: st.DataObject,
    directory: Path,
    answers: Sequence[tiny.Answer],
    scores: Mapping[int, torch.Tensor],
    *,
    page_tokens: int,
) -> None:
    """Few pages for what answers become, and rows on every tier; what crosses links is counted, and
    reckoned from where rows were, unless some rows have keys of others, or the CPU attends."""
    rows = data.draw(st.sampled_from([asked_rows, asked_alike]))
    asked = data.draw(st.lists(rows, min_size=8, max_size=20))
    if is_counted := data.draw(st.booleans()):
        asked = [replace(own, samples=1, is_shared=False) for own in asked]
    asked.sort(key=lambda own: own.beginning[1])
    device, kv, attention = data.draw(mixed_homes)
    options = {
        "device": device,
        "kv_percent": kv,
        "cpu_attention_percent": 0.0 if is_counted and device == "sim" else attention,
        "admission": data.draw(st.sampled_from(["diagonal", "refill", "refill"])),
        "micro_batch_size": data.draw(st.integers(3, 9)),
        "num_micro_batches": data.draw(st.integers(1, 2)),
        "batch_tokens": data.draw(st.sampled_from([None, 17, 40])),
        "draft_tokens": data.draw(st.sampled_from([0, 0, 1, 5])),
    }
    changes: dict[str, Any] = {
        "entry_pace": data.draw(st.sampled_from([2.0, 1000.0])),
        "row_tokens": data.draw(st.sampled_from([1, 20, 40, 60, 0])),
        "page_tokens": page_tokens,
    }
    work = workload(asked, data.draw(st.integers(1, STEPS)))
    with engine(directory, work, changes, **options) as built:
        run_counted(built, asked, answers, scores, is_counted=is_counted)


def run(
    directory: Path,
    asked: Sequence[Asked],
    answers: Sequence[tiny.Answer],
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    with engine(directory, workload(asked), changes or {}, **options) as built:
        check(_answer(built, asked, answers), asked, answers)


def _answer(
    built: Engine, asked: Sequence[Asked], answers: Sequence[tiny.Answer]
) -> list[Completion]:
    return [*built.run(own.request(index, answers) for index, own in enumerate(asked))]


@pytest.mark.parametrize("is_shared", [False, True], ids=["whole prompts", "a beginning is shared"])
@pytest.mark.parametrize(
    "device, kv, ways",
    [
        ("cpu", (0.0, 30.0, 70.0), {("disk", "compute")}),
        ("sim", (30.0, 70.0, 0.0), {("cpu", "compute")}),
        ("sim", (0.0, 30.0, 70.0), {("disk", "cpu")}),
        ("sim", (30.0, 30.0, 40.0), {("cpu", "compute"), ("disk", "compute"), ("disk", "cpu")}),
    ],
)
def test_rows_take_the_places_of_those_that_have_ended(
    device: str,
    kv: tuple[float, float, float],
    ways: set[tuple[str, str]],
    is_shared: bool,
    model_dir: Path,
    answers: list[tiny.Answer],
) -> None:
    """Of ten rows every other one ends soon; no more come."""
    asked = [
        Asked(prompt=row % 5, max_tokens=STEPS if row % 2 else 3, is_shared=is_shared)
        for row in range(10)
    ]
    found = moves_of(
        model_dir,
        asked,
        answers,
        {"entry_pace": 1000.0, "row_tokens": 0},
        workload(asked),
        device=device,
        kv_percent=kv,
        micro_batch_size=10,
        num_micro_batches=1,
        admission="refill",
    )
    assert {*found} == ways and len(found) >= 2


@pytest.mark.parametrize(
    "device, kv, attention, way, prompts",
    [
        ("cpu", (0.0, 50.0, 50.0), None, ("compute", "disk"), "whole"),
        ("sim", (50.0, 50.0, 0.0), None, ("compute", "cpu"), "whole"),
        ("sim", (0.0, 50.0, 50.0), None, ("cpu", "disk"), "whole"),
        ("sim", (50.0, 50.0, 0.0), 100.0, ("compute", "cpu"), "whole"),
        ("cpu", (0.0, 50.0, 50.0), None, ("compute", "disk"), "shared"),
        ("sim", (50.0, 50.0, 0.0), None, ("compute", "cpu"), "shared"),
        ("sim", (0.0, 50.0, 50.0), None, ("cpu", "disk"), "shared"),
    ],
)
def test_rows_that_outgrow_their_tier_move_on(
    device: str,
    kv: tuple[float, float, float],
    attention: float | None,
    way: tuple[str, str],
    prompts: str,
    model_dir: Path,
    answers: list[tiny.Answer],
) -> None:
    """Answers are expected to end at once, and there are pages for little more. What prompts share
    stays on the tier where all is computed."""
    is_shared = prompts == "shared"
    numbers = [row % 5 if is_shared else 12 for row in range(13)]
    asked = [Asked(prompt=own, max_tokens=1, is_shared=is_shared) for own in numbers[:6]]
    asked += [Asked(prompt=own, might_stop=True, is_shared=is_shared) for own in numbers[6:]]
    found = moves_of(
        model_dir,
        asked,
        answers,
        {"entry_pace": 1000.0, "row_tokens": 16, "page_tokens": 4},
        workload(asked, 1),
        device=device,
        kv_percent=kv,
        cpu_attention_percent=attention,
        micro_batch_size=10,
        num_micro_batches=1,
        admission="refill",
    )
    assert way in found


def moves_of(
    directory: Path,
    asked: Sequence[Asked],
    answers: Sequence[tiny.Answer],
    changes: dict[str, Any],
    work: Workload,
    **options: Any,
) -> list[tuple[str, str]]:
    """Tiers that rows left and came to, of a run with the right answers."""
    found: list[tuple[str, str]] = []

    def note(sweep: int, batch: MicroBatch) -> None:
        rows = (built.placement.kv_cache.rows[span.row] for span in batch.rows)
        found.extend((own.origin.home, own.home) for own in rows if own.origin is not None)

    with engine(directory, work, changes, **options) as built:
        requests = (own.request(index, answers) for index, own in enumerate(asked))
        check([*built.run(requests, on_batch=note)], asked, answers)
    return found


def test_samples_that_enter_one_micro_batch_on_two_tiers(
    model_dir: Path, answers: list[tiny.Answer]
) -> None:
    """The first two find seats in RAM, the third one on the device, which comes first."""
    run(
        model_dir,
        [Asked(prompt=9), Asked(prompt=10, samples=3)],
        answers,
        {"entry_pace": 1000.0, "row_tokens": 0},
        device="sim",
        kv_percent=(50.0, 50.0, 0.0),
        micro_batch_size=4,
        num_micro_batches=1,
        admission="refill",
    )


@pytest.mark.parametrize("kv", [CPU, (0.0, 0.0, 100.0)], ids=str)
def test_samples_whose_prompt_ends_in_a_chunk_of_one_token(
    kv: tuple[float, float, float], model_dir: Path, answers: list[tiny.Answer]
) -> None:
    """The CPU attends single tokens, and all samples need the keys of this one."""
    prompt = 4
    run(
        model_dir,
        [Asked(prompt=prompt, samples=3)],
        answers,
        device="sim",
        kv_percent=kv,
        cpu_attention_percent=100.0,
        micro_batch_size=3,
        num_micro_batches=1,
        admission="zigzag",
        batch_tokens=len(PROMPTS[prompt]) - 1,
    )


def test_prompts_in_chunks_beside_rows_that_the_cpu_attends(
    model_dir: Path, answers: list[tiny.Answer]
) -> None:
    """Zig-zag: prompts whose beginnings are shared on the device alone come whole elsewhere."""
    run(
        model_dir,
        [Asked(prompt=row, is_shared=True) for row in range(5)],
        answers,
        device="sim",
        kv_percent=CPU,
        cpu_attention_percent=100.0,
        micro_batch_size=5,
        num_micro_batches=1,
        admission="zigzag",
    )


@pytest.mark.parametrize("admission", ["zigzag", "refill"])
def test_a_beginning_gives_way_to_a_row_that_cannot_use_it(
    admission: str, model_dir: Path, answers: list[tiny.Answer]
) -> None:
    """Pages for one row, and the second one begins alike but is scored."""
    longest = max(range(5), key=lambda row: len(PROMPTS[row]))
    run(
        model_dir,
        [
            Asked(prompt=longest, is_shared=True),
            Asked(prompt=longest, is_shared=True, is_scored=True),
        ],
        answers,
        micro_batch_size=1,
        num_micro_batches=1,
        admission=admission,
    )


def test_an_engine_is_used_again_after_a_run_that_was_given_up(
    model_dir: Path, answers: list[tiny.Answer]
) -> None:
    """Neither rows under way nor beginnings keep their pages."""
    asked = [Asked(prompt=row, is_shared=True) for row in range(9)]
    with engine(model_dir, workload(asked), {}, micro_batch_size=2, num_micro_batches=2) as built:
        for most in (1, 3, len(asked)):
            running = built.run(own.request(index, answers) for index, own in enumerate(asked))
            done = [completion for _, completion in zip(range(most), running, strict=False)]
            running.close()  # type: ignore[attr-defined]
        check(done, asked, answers)


@pytest.mark.parametrize("admission", ["zigzag", "refill"])
def test_scratch_for_beginnings_beside_rows(admission: str, tmp_path: Path) -> None:
    """A beginning and what one row has behind it, as long, are attended together."""
    model = tiny.make_model(tmp_path, intermediate_size=16, vocab_size=64, head_dim=64)
    prompt = [token % 60 for token in (*LONG, *LONG)]
    (answer,) = tiny.reference(model, [prompt], 2)
    work = Workload(
        num_rows=1,
        max_prompt_tokens=96,
        max_new_tokens=2,
        max_total_tokens=98,
        total_prompt_tokens=96,
        total_new_tokens=2,
    ).with_beginning(48)
    params, prefix = SamplingParams(max_tokens=2), Prefix(key=0, num_tokens=48)
    request = Request(index=0, prompt_ids=prompt, params=params, prefix=prefix)
    with engine(
        tmp_path, work, {}, micro_batch_size=1, num_micro_batches=1, admission=admission
    ) as built:
        (done,) = built.run(iter([request]))
        assert list(done.token_ids) == answer.token_ids


ROPES: dict[str, tuple[int, dict[str, Any]]] = {
    "dynamic": (24, {"rope_type": "dynamic", "factor": 2.0}),
    "longrope": (
        128,
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 40,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.7 * i for i in range(8)],
        },
    ),
}


@pytest.mark.parametrize("admission", ["zigzag", "refill"])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_that_change_with_the_length(name: str, admission: str, tmp_path: Path) -> None:
    """Neither chunks, nor beginnings that prompts of other lengths have, nor rows that are computed
    again change how a prompt is rotated."""
    limit, rope = ROPES[name]
    model = tiny.make_model(
        tmp_path,
        max_position_embeddings=limit,
        rope_parameters={**rope, "rope_theta": 10000.0},
    )
    asked = [Asked(prompt=row, is_shared=row < 5) for row in range(13)]
    expected = tiny.reference(model, PROMPTS, STEPS)
    with engine(
        tmp_path,
        workload(asked, 1),
        {"entry_pace": 1000.0, "row_tokens": 1} if admission == "refill" else {},
        micro_batch_size=3,
        num_micro_batches=2,
        batch_tokens=11,
        admission=admission,
    ) as built:
        assert built.plan.policy.admission == admission
        check(_answer(built, asked, expected), asked, expected)


@pytest.mark.usefixtures("answers")
def test_sparse_attention_is_of_tokens_that_were_made(model_dir: Path) -> None:
    """A token of a prompt that comes alone, in a chunk or behind a beginning, sees all keys."""
    asked = [Asked(prompt=row, is_shared=row < 5) for row in range(13)]
    found = []
    for options in ({"share_prefixes": False}, {"batch_tokens": 3}):
        shape = {"micro_batch_size": 3, "num_micro_batches": 2, "admission": "zigzag"}
        with engine(
            model_dir, workload(asked), {}, sparse_attention=0.1, **shape, **options
        ) as built:
            requests = (
                Request(
                    index=index,
                    prompt_ids=PROMPTS[own.prompt],
                    params=SamplingParams(max_tokens=4),
                    prefix=Prefix(key=0, num_tokens=len(LONG)) if own.is_shared else None,
                )
                for index, own in enumerate(asked)
            )
            found.append({own.index: own.token_ids for own in built.run(requests)})
    assert found[0] == found[1]
