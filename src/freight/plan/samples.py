"""Some sweeps of a block on the virtual clock, to stand for all of them.

The schedule's own operations are made for sweeps whose rows are known by their lengths alone, and
run by ``simulate``. A stretch of sweeps far apart is run as if they followed one another, so that
loads run ahead over their borders as they do. Long models are run at two depths and extended in a
straight line. Knows no datasets: a block's lengths come in.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from freight.hardware.machine import Machine
from freight.model.decoder import build_programme
from freight.model.layer_kinds import CompressedKeys
from freight.model.programme import Programme
from freight.model.switches import ModelConfig
from freight.plan.continuous import RolledSweep, roll_out
from freight.plan.cost import Cost
from freight.plan.default import Plan
from freight.plan.kept_pages import held_pages
from freight.plan.operation import Lane
from freight.plan.policy import Policy
from freight.plan.ring import forecast_pieces, stream_model
from freight.plan.rollout import WorkSizes, make_sweep, rows_of_block
from freight.plan.schedule import schedule
from freight.plan.simulate import Step, simulate
from freight.plan.sweep import Sweep
from freight.plan.workload import RowLength

__all__ = ["Sample", "Sampler", "Story", "continuous_story", "rehearse", "roll", "zigzag_story"]

_DEPTHS: Final = (6, 12)
"""Six layers apart, as rings have two slots or three: of one micro-batch, what a layer waits for is
what the sixth before it did. Other distances came out up to 36 % off where all layers were run."""
_ROUGH_DEPTHS: Final = ((2, (2, 8)), (8, (3, 5)), (math.inf, (2, 4)))
"""Up to so many micro-batches: of more than a few, rings turn within a layer or two. Of 100 plans
for eight machines one was 2.2 % off, and no other more than 0.2; with eight micro-batches some were
by 1.1 % from two layers on, or one apart."""
_UNITS_APART: Final = 12
"""That is as many units; a layer with experts has more by itself."""
_FEW_BATCHES: Final = 2
"""Up to so many sweeps pass over into each other."""
_MOST_REHEARSED: Final = 60_000

Lanes = Mapping[Lane, float]

Story = Callable[[WorkSizes], Sequence[Sweep]]
"""Some sweeps, once it is known what rows and tokens are in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Of some sweeps, by the token that their rows make: seconds, and what each lane did."""

    seconds: Mapping[int, float]
    num_bytes: Mapping[int, Lanes]
    busy_s: Mapping[int, Lanes]

    def extended(self, far: Sample, reach: float) -> Sample:
        """In a straight line through this one (0) and ``far`` (1)."""

        def line(pick: Callable[[Sample], Mapping[int, Lanes]]) -> dict[int, Lanes]:
            # The few layers of this one may leave lanes idle that the others do not.
            return {
                step: {
                    lane: near.get(lane, 0.0) + reach * (own - near.get(lane, 0.0))
                    for lane, own in pick(far)[step].items()
                }
                for step, near in pick(self).items()
            }

        return Sample(
            seconds={
                step: own + reach * (far.seconds[step] - own) for step, own in self.seconds.items()
            },
            num_bytes=line(lambda sample: sample.num_bytes),
            busy_s=line(lambda sample: sample.busy_s),
        )


def zigzag_story(lengths: Sequence[RowLength], steps: Sequence[int]) -> Story:
    """The sweeps in which a block's rows of these lengths make their tokens ``steps``."""

    def tell(sizes: WorkSizes) -> Sequence[Sweep]:
        block = rows_of_block(lengths, sizes)
        return [make_sweep(i, block, step, sizes) for i, step in enumerate(steps)]

    return tell


def roll(plan: Plan, num_rows: int) -> list[RolledSweep]:
    """The sweeps of the first rows, where they enter while others are under way."""
    workload, policy = plan.workload, plan.policy
    num_pages = {**plan.geometry.kv_pages}
    num_pages[policy.compute_tier] -= held_pages(policy, workload)
    return roll_out(
        workload.row_lengths(0, num_rows, plan.geometry.shared_page),
        policy,
        num_pages=num_pages,
        slot_pages=plan.geometry.kv_slot_pages,
        mean_answer=workload.mean_new_tokens,
        samples=workload.samples,
        answers=workload.answers() if workload.ends_early else None,
    )


def continuous_story(rolled: Sequence[RolledSweep], chosen: Sequence[int]) -> Story:
    """Some of the sweeps of such a run."""

    def tell(sizes: WorkSizes) -> Sequence[Sweep]:
        return [rolled[own].sweep(i, sizes.policy, sizes) for i, own in enumerate(chosen)]

    return tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Runs sweeps of one plan on one machine's clock; ``is_rough`` with fewer layers. ``cost`` is
    of all units."""

    plan: Plan
    machine: Machine
    config: ModelConfig
    programme: Programme
    dtype: str
    is_rough: bool = False
    cost: Cost = field(init=False)

    def __post_init__(self) -> None:
        cost = Cost(
            machine=self.machine,
            config=self.config,
            programme=self.programme,
            layout=self.plan.layout,
            policy=self.plan.policy,
            dtype=self.dtype,
            window_pages=self.plan.geometry.windows.pages,
            units=tuple(range(len(self.programme.units))),
        )
        object.__setattr__(self, "cost", cost)

    def sample(self, story: Story, steps: Sequence[int]) -> Sample:
        """The sweeps of ``story``, which are those numbered ``steps``, from 0 on."""
        layers = self.config.num_layers
        sweeps = story(WorkSizes.of(self.plan, self.config))
        first, second = _rough_depths(self.plan.policy) if self.is_rough else _DEPTHS
        if self.config.sharing is not None:  # they do not repeat
            first = second = layers
        elif self.config.experts is not None or not _are_alike(self.config):
            first, second = _depths_with(self.config)
        cost = replace(self.cost, kept={})  # of these sweeps
        if layers <= second:
            return self._at_depth(sweeps, steps, layers, cost)
        near, far = (self._at_depth(sweeps, steps, depth, cost) for depth in (first, second))
        return near.extended(far, (layers - first) / (second - first))

    def _at_depth(
        self, sweeps: Sequence[Sweep], steps: Sequence[int], depth: int, cost: Cost
    ) -> Sample:
        return _summed(self._clocked(sweeps, steps, depth, cost), steps)

    def run(self, story: Story, steps: Sequence[int], depth: int) -> Iterator[Step]:
        """Sweeps through the first ``depth`` layers on the clock."""
        sweeps = story(WorkSizes.of(self.plan, self.config))
        return self._clocked(sweeps, steps, depth, replace(self.cost, kept={}))

    def _clocked(
        self, sweeps: Sequence[Sweep], steps: Sequence[int], depth: int, cost: Cost
    ) -> Iterator[Step]:
        plan, policy = self.plan, self.plan.policy
        feed = _Feed(sweeps=sweeps, config=self.config, is_whole=len(steps) == steps[-1] + 1)
        layers = range(depth)
        model = stream_model(
            plan.layout,
            policy,
            layers=layers,
            most_pieces=forecast_pieces(policy, is_rough=self.is_rough),
            rolls=plan.geometry.rolls,
        )
        units = self.programme.units
        kept = (unit.layer is None or unit.layer in layers for unit in units)
        cost = replace(cost, units=tuple(n for n, is_kept in enumerate(kept) if is_kept))
        return simulate(
            schedule(feed.run(), model, feed.expects_more, feed.chosen),
            cost.demand,
            overlap=policy.overlap,
            is_inline=self.machine.is_inline(policy.compute_tier),
            share=cost.share if self.machine.beside else None,
        )


def _rough_depths(policy: Policy) -> tuple[int, int]:
    """Where the CPU attends few micro-batches, what they wait for turns more slowly."""
    count = policy.num_micro_batches
    if policy.cpu_attention and count <= _FEW_BATCHES:
        return _DEPTHS
    return next(depths for most, depths in _ROUGH_DEPTHS if count <= most)


def _depths_with(config: ModelConfig) -> tuple[int, int]:
    """Behind one layer with experts, or where layers are of several kinds and have none behind a
    period of them, and whole periods of layers later, so many units apart: of the last layer some
    tokens alone are computed to its end, so both end with one of the same kind."""
    experts, layers = config.experts, range(config.num_layers)
    kept = config.recurrence
    rates = kept.rates if isinstance(kept, CompressedKeys) else (0,) * config.num_layers
    plain = next(filter(config.has_experts, layers), 0)
    kinds = [
        (
            config.has_experts(i),
            config.sliding_windows[i],
            config.attends(i),
            config.parts and config.parts[i],
            rates[i],
        )
        for i in layers
    ]
    behind = kinds[plain:]
    period = next(p for p in range(1, len(behind) + 1) if behind[p:] == behind[:-p])
    num_experts = 0 if experts is None else experts.num_experts
    of_period = sum(
        (config.attends(i) or config.keeps_state(i))
        + (num_experts if config.has_experts(i) else config.has_mlp(i))
        for i in layers[plain : plain + period]
    )
    plain += period if experts is None and not _are_alike(config) else 1
    return plain, plain + period * -(-_UNITS_APART // of_period)


def _are_alike(config: ModelConfig) -> bool:
    """Whether all layers have the same parts, and attend with the same heads."""
    return config.recurrence is None and config.parts is None and config.other_heads is None


def rehearse(plan: Plan, machine: Machine, config: ModelConfig, dtype: str) -> Iterator[Step]:
    """The first sweeps, operation by operation as they are expected to run: all layers, each unit's
    weights in a few pieces, and as many of its sweeps as one can look at."""
    sampler = Sampler(
        plan=plan,
        machine=machine,
        config=config,
        programme=build_programme(config),
        dtype=dtype,
    )
    workload = plan.workload
    num_rows, page = min(plan.policy.block_rows, workload.num_rows), plan.geometry.shared_page
    lengths = workload.row_lengths(0, num_rows, page)
    operations = 4 * plan.policy.num_micro_batches * len(sampler.programme.units)
    most = max(2, _MOST_REHEARSED // operations)
    if plan.policy.is_continuous:
        rolled = roll(plan, min(workload.num_rows, most * plan.policy.block_rows))
        steps = range(min(most, len(rolled)))
        story = continuous_story(rolled, steps)
    else:
        steps = range(min(most, max(1, max(row.new for row in lengths))))
        story = zigzag_story(lengths, steps)
    return sampler.run(story, steps, config.num_layers)


@dataclass(kw_only=True, slots=True)
class _Feed:
    """Hands out sweeps as the scheduler would; experts are chosen by chance, the same each time.
    Unless these are all sweeps, the last stands for others: loads for one more are begun in it."""

    sweeps: Sequence[Sweep]
    config: ModelConfig
    is_whole: bool
    current: int = -1
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self) -> Iterator[Sweep]:
        for number, sweep in enumerate(self.sweeps):
            self.current = number
            yield sweep

    def expects_more(self) -> bool:
        return not self.is_whole or self.current + 1 < len(self.sweeps)

    def chosen(self, k: int) -> Collection[int]:
        experts = self.config.experts
        assert experts is not None
        works = self.sweeps[self.current].works
        tokens = next(work.batch.num_tokens for work in works if work.batch.index == k)
        likely = self.config.expert_likelihood(tokens)
        return [e for e in range(experts.num_experts) if self.dice.random() >= 1.0 - likely]


def _summed(ran: Iterable[Step], steps: Sequence[int]) -> Sample:
    ends = [0.0] * len(steps)
    num_bytes: list[dict[Lane, float]] = [defaultdict(float) for _ in steps]
    busy: list[dict[Lane, float]] = [defaultdict(float) for _ in steps]
    for operation, start_s, end_s in ran:
        sweep, lane = operation.sweep, operation.lane
        if sweep == len(steps):
            continue
        busy[sweep][lane] += end_s - start_s
        if lane is not Lane.COMPUTE:
            num_bytes[sweep][lane] += operation.num_bytes
        elif operation.is_last:
            ends[sweep] = end_s
    starts = (0.0, *ends)
    return Sample(
        seconds={step: ends[i] - starts[i] for i, step in enumerate(steps)},
        num_bytes={step: num_bytes[i] for i, step in enumerate(steps)},
        busy_s={step: busy[i] for i, step in enumerate(steps)},
    )
