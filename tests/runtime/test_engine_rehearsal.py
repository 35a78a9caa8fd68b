"""What a forecast's sweeps bring against what a run's do: tokens, keys, logits and scores.

Lengths are told exactly, so that the two can only differ where the forecast leaves something out:
workloads, rules, tiers, chunks, beginnings and scores are drawn at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.model.batch import MicroBatch
from freight.model.config import ModelConfig
from freight.plan.beginnings import Shared
from freight.plan.default import Plan
from freight.plan.rollout import WorkSizes
from freight.plan.samples import continuous_story, roll, zigzag_story
from freight.plan.sweep import Sweep
from freight.plan.workload import Workload
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Prefix, Request, SamplingParams

from . import tiny

BEGINNINGS = [list(range(5, 37)), list(range(100, 148)), list(range(50, 66))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Rows of (own tokens, new tokens), which have so many beginnings, neighbours the same; of a
    scored row all of its own tokens but the first are."""

    rows: tuple[tuple[int, int], ...]
    num_beginnings: int
    is_scored: bool

    def keys(self) -> list[int]:
        """Of each row, what it begins with."""
        count = min(self.num_beginnings, len(self.rows))
        return [i * count // len(self.rows) if count else -1 for i in range(len(self.rows))]

    def shared(self) -> list[int]:
        return [len(BEGINNINGS[key]) if key >= 0 else 0 for key in self.keys()]

    def prompts(self) -> list[list[int]]:
        firsts = [BEGINNINGS[key] if key >= 0 else [] for key in self.keys()]
        owns = [own for own, _ in self.rows]
        return [
            [*first, *(40 + (7 * i + j) % 200 for j in range(n))]
            for i, (first, n) in enumerate(zip(firsts, owns, strict=True))
        ]

    def scored(self) -> list[int]:
        return [self.is_scored * (own - 1) for own, _ in self.rows]

    def workload(self) -> Workload:
        prompts = [len(prompt) for prompt in self.prompts()]
        new = [most for _, most in self.rows]
        work = Workload(
            num_rows=len(new),
            max_prompt_tokens=max(prompts),
            max_new_tokens=max(new),
            max_total_tokens=max(map(sum, zip(prompts, new, strict=True))),
            total_prompt_tokens=sum(prompts),
            total_new_tokens=sum(new),
            max_scored_tokens=max(self.scored()),
            total_scored_tokens=sum(self.scored()),
            lengths=tuple((1, prompt, most) for prompt, most in zip(prompts, new, strict=True)),
        )
        keys, shared = self.keys(), self.shared()
        if not self.num_beginnings:
            return work
        alike = tiny.begin_alike(
            work, keys=keys, tokens=shared, prompts=prompts, new=new, samples=[1] * len(new)
        )
        assert alike.beginnings is not None
        groups = tuple(
            Shared(n, keys.index(k) == i) for i, (k, n) in enumerate(zip(keys, shared, strict=True))
        )
        return replace(work, beginnings=replace(alike.beginnings, groups=groups))

    def requests(self) -> list[Request]:
        return [
            Request(
                index=index,
                prompt_ids=prompt,
                params=SamplingParams(
                    max_tokens=most,
                    ignore_eos=True,
                    prompt_logprobs=0 if self.is_scored else None,
                ),
                prefix=Prefix(key=key, num_tokens=shared) if shared else None,
                score_from=shared + 1,
            )
            for index, (prompt, (_, most), key, shared) in enumerate(
                zip(self.prompts(), self.rows, self.keys(), self.shared(), strict=True)
            )
        ]


def counted(batches: Sequence[MicroBatch]) -> Counter[str]:
    """What costs anything, of all micro-batches."""
    totals: Counter[str] = Counter()
    for batch in batches:
        totals["tokens"] += batch.num_tokens
        totals["logits"] += batch.num_logits
        totals["scored"] += batch.num_scored
        totals["keys"] += sum(span.total_len for span in batch.rows)
    return totals


def told(plan: Plan, config: ModelConfig) -> Counter[str]:
    sizes, rows = WorkSizes.of(plan, config), plan.workload.num_rows
    sweeps: list[Sweep] = []
    if plan.policy.is_continuous:
        rolled = roll(plan, rows)
        sweeps += continuous_story(rolled, range(len(rolled)))(sizes)
    for first in range(0, 0 if plan.policy.is_continuous else rows, plan.policy.block_rows):
        last, page = min(rows, first + plan.policy.block_rows), plan.geometry.shared_page
        lengths = plan.workload.row_lengths(first, last, page)
        longest = max(1, max(row.new for row in lengths))
        sweeps += zigzag_story(lengths, range(longest))(sizes)
    return counted([work.batch for sweep in sweeps for work in sweep.works])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny.make_model(directory)
    return directory


def datasets() -> st.SearchStrategy[Dataset]:
    lengths = st.tuples(st.integers(2, 30), st.integers(1, 6))
    without = st.tuples(st.integers(2, 30), st.just(0))
    return st.builds(
        Dataset,
        rows=st.one_of(lengths, without).flatmap(
            lambda one: st.lists(without if one[1] == 0 else lengths, min_size=2, max_size=9).map(
                lambda rows: tuple(sorted(rows, key=lambda own: -sum(own)))
            )
        ),
        num_beginnings=st.integers(0, 3),
        is_scored=st.booleans(),
    )


CPU, GPU, DISK = (0.0, 100.0, 0.0), (100.0, 0.0, 0.0), (0.0, 0.0, 100.0)


def is_possible(data: Dataset) -> bool:
    """Rows that make nothing are scored."""
    return data.is_scored or data.rows[0][1] > 0


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=datasets().filter(is_possible),
    admission=st.sampled_from(["zigzag", "refill", "diagonal"]),
    home=st.sampled_from([("cpu", CPU), ("cpu", DISK), ("sim", GPU), ("sim", CPU)]),
    shape=st.sampled_from([(2, 2), (4, 1), (1, 3), (9, 1)]),
)
def test_sweeps_bring_what_was_told(
    model_dir: Path,
    data: Dataset,
    admission: str,
    home: tuple[str, Any],
    shape: tuple[int, int],
) -> None:
    device, kv = home
    options = EngineOptions(
        device=device,
        dtype="float32",
        disk_dir=model_dir,
        gpu_memory_bytes=64 << 20 if device == "sim" else None,
        admission=admission,
        kv_percent=kv,
        cpu_attention_percent=0.0 if device == "sim" else None,
        micro_batch_size=shape[0],
        num_micro_batches=shape[1],
    )
    engine = build_engine(model_dir, options=options, workload=data.workload())
    batches: list[MicroBatch] = []
    try:
        for _ in engine.run(iter(data.requests()), lambda _, batch: batches.append(batch)):
            pass
        expected = told(engine.plan, engine.config)
    finally:
        engine.close()
    found = counted(batches)
    assert (found["tokens"], found["logits"]) == (expected["tokens"], expected["logits"])
    # How long each row's scored part is, is told by the mean share alone.
    assert found["scored"] == pytest.approx(expected["scored"], abs=len(data.rows))
    # The row that computes the beginning comes as one with it, where the run has two.
    assert found["keys"] == pytest.approx(
        expected["keys"], abs=sum(map(len, BEGINNINGS[: data.num_beginnings]))
    )


@pytest.mark.parametrize("admission", ["zigzag", "refill"])
@pytest.mark.parametrize("samples", [2, 3])
def test_a_prompt_is_told_once_for_all_its_samples(
    model_dir: Path, admission: str, samples: int
) -> None:
    """But for one token of each further sample, which a forecast's row has to bring."""
    prompts, new, size = [list(range(5, 25 + i)) for i in range(4)], 5, 2 * samples
    lengths = [len(prompt) for prompt in prompts]
    workload = Workload(
        num_rows=samples * len(prompts),
        max_prompt_tokens=max(lengths),
        max_new_tokens=new,
        max_total_tokens=max(lengths) + new,
        total_prompt_tokens=sum(lengths),
        total_new_tokens=new * samples * len(prompts),
        min_samples=samples,
        max_samples=samples,
        lengths=tuple((samples, length, new) for length in lengths),
    )
    options = EngineOptions(
        device="cpu",
        dtype="float32",
        disk_dir=model_dir,
        admission=admission,
        kv_percent=CPU,
        micro_batch_size=size,
        num_micro_batches=1,
    )
    params = SamplingParams(max_tokens=new, n=samples, temperature=1.0, ignore_eos=True)
    requests = [
        Request(index=index, prompt_ids=prompt, params=params)
        for index, prompt in enumerate(prompts)
    ]
    engine = build_engine(model_dir, options=options, workload=workload)
    batches: list[MicroBatch] = []
    try:
        for _ in engine.run(iter(requests), lambda _, batch: batches.append(batch)):
            pass
        expected = told(engine.plan, engine.config)
    finally:
        engine.close()
    found, further = counted(batches), (samples - 1) * len(prompts)
    assert found["tokens"] == sum(lengths) + (new - 1) * samples * len(prompts)
    assert expected["tokens"] - found["tokens"] == further
    assert expected["logits"] - found["logits"] == further
