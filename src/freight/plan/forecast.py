"""What a plan will take on a machine: time by phase, bytes and work by lane.

Some blocks of the dataset stand for all, and some sweeps of each for the whole block: what lies
between is taken to change evenly, as the number of keys does. Knows no torch; nothing is executed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from freight.hardware.machine import Machine
from freight.model.programme import Programme
from freight.model.switches import ModelConfig
from freight.plan.continuous import RolledSweep
from freight.plan.default import Plan
from freight.plan.operation import Lane
from freight.plan.samples import Lanes, Sampler, continuous_story, roll, zigzag_story
from freight.plan.sweep_loads import sweep_loads
from freight.plan.workload import RowLength

__all__ = ["Forecast", "SweepRun", "forecast"]

_FEW_STEPS: Final = 3
_MOST_STEPS: Final = 5
_MOST_BLOCKS: Final = 3
_MOST_COUNTED: Final = 2000
"""Beyond that a billion rows would take minutes to add up."""
_MOST_SAMPLES: Final = 5
_MOST_ROLLED_BLOCKS: Final = 4
"""Fewer samples, of fewer blocks, had ranked plans wrongly: the same plan came out up to 28 % lower
and 21 % higher."""
_ALIKE: Final = 0.97
"""Sweeps that take about as long as each other are told by one."""
_REQUEST_BYTES: Final = 8 << 20


class SweepRun(NamedTuple):
    """So many sweeps (``times``), one after the other, that take as long each, and of how many
    ``tokens`` the residual stream goes through each; those of blocks' prompts apart, where these
    have sweeps of their own."""

    seconds: float
    times: float
    is_prompts: bool = False
    tokens: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A whole workload. ``load_s`` is the time until the first operation, ``prefill_s`` that of
    each block's first sweep, ``decode_s`` that of all others: of all sweeps where prompts come
    beside rows that decode. ``block_s`` is the longest block's, from its prompts to its last token,
    or where rows enter at any time the longest row's. ``sweeps`` are all of them, in order."""

    load_s: float
    prefill_s: float
    decode_s: float
    block_s: float
    new_tokens: float
    num_bytes: Lanes
    busy_s: Lanes
    sweeps: tuple[SweepRun, ...]

    @property
    def seconds(self) -> float:
        """From the first operation to the last token."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of generating."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def utilisation(self) -> dict[Lane, float]:
        """The share of the time that each lane works."""
        return {lane: busy / self.seconds for lane, busy in self.busy_s.items()}

    @property
    def binding(self) -> Lane:
        """The lane that works most."""
        return max(self.busy_s, key=self.busy_s.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """One block of rows; ``prompt_tokens`` are those that it computes."""

    num_rows: int
    num_sweeps: int
    prompt_tokens: float
    new_tokens: float
    prefill_s: float
    decode_s: float
    num_bytes: Lanes
    busy_s: Lanes

    def sweeps(self) -> Iterator[SweepRun]:
        yield SweepRun(self.prefill_s, 1, is_prompts=True, tokens=self.prompt_tokens)
        if later := self.num_sweeps - 1:
            tokens = (self.new_tokens - self.num_rows) / later
            yield SweepRun(self.decode_s / later, later, tokens=tokens)


def forecast(
    plan: Plan,
    machine: Machine,
    config: ModelConfig,
    programme: Programme,
    dtype: str,
    *,
    is_rough: bool = False,
) -> Forecast:
    """Predict ``plan`` for its workload; ``is_rough``: from fewer sweeps and layers, to compare."""
    most_steps = _FEW_STEPS if is_rough else _MOST_STEPS
    sampler = Sampler(
        plan=plan,
        machine=machine,
        config=config,
        programme=programme,
        dtype=dtype,
        is_rough=is_rough,
    )
    if plan.policy.is_continuous:
        return _continuous(sampler, _load_s(plan, machine))
    size, total = plan.policy.block_rows, plan.workload.num_rows
    starts = range(0, total, size)
    alike: dict[tuple[RowLength, ...], _Block] = {}
    told = {}
    whole = starts[:-1] or starts
    for start in whole[:1] if is_rough and not plan.workload.lengths else _spread(starts):
        page = plan.geometry.shared_page
        lengths = tuple(plan.workload.row_lengths(start, min(start + size, total), page))
        if lengths not in alike:
            alike[lengths] = _tell(sampler, lengths, most_steps)
        told[start] = alike[lengths]
    known = sorted(told)
    blocks = [(_between(told, known, start), times) for start, times in _counted(starts)]
    return Forecast(
        load_s=_load_s(plan, machine),
        prefill_s=sum(times * block.prefill_s for block, times in blocks),
        decode_s=sum(times * block.decode_s for block, times in blocks),
        block_s=max(block.prefill_s + block.decode_s for block, _ in blocks),
        new_tokens=sum(times * block.new_tokens for block, times in blocks),
        num_bytes=_added([(block.num_bytes, times) for block, times in blocks]),
        busy_s=_added([(block.busy_s, times) for block, times in blocks]),
        sweeps=tuple(
            run._replace(times=times * run.times)
            for block, times in blocks
            for run in block.sweeps()
        ),
    )


def _continuous(sampler: Sampler, load_s: float) -> Forecast:
    """Of rows that enter at any time: some sweeps stand for all those that take about as long.
    Where there are very many rows, those between the first and the last come as at the middle of a
    few blocks."""
    plan = sampler.plan
    total = plan.workload.num_rows
    rolled_rows = min(total, _MOST_ROLLED_BLOCKS * plan.policy.block_rows)
    rolled = roll(plan, rolled_rows)
    longest = max(1, max(row.new for row in plan.workload.row_lengths(0, rolled_rows)))
    weights = _weights(rolled, total - rolled_rows, longest)
    loads = sweep_loads(rolled, plan, sampler.machine, sampler.cost)
    chosen, shares = _representatives(loads, weights, _MOST_SAMPLES)
    sample = sampler.sample(continuous_story(rolled, chosen), chosen)

    def summed(values: Mapping[int, Lanes]) -> dict[Lane, float]:
        lanes = {lane for own in values.values() for lane in own}
        return {
            lane: sum(share * values[i].get(lane, 0.0) for i, share in shares.items())
            for lane in sorted(lanes)
        }

    seconds = sum(share * sample.seconds[i] for i, share in shares.items())
    of_each = _of_each(loads, chosen, sample.seconds)
    return Forecast(
        load_s=load_s,
        prefill_s=0.0,
        decode_s=seconds,
        # No row takes longer than all of them.
        block_s=min(seconds, longest * max(sample.seconds[i] for i in chosen[1:] or chosen)),
        new_tokens=plan.workload.expected_new_tokens,
        num_bytes=summed(sample.num_bytes),
        busy_s=summed(sample.busy_s),
        sweeps=tuple(
            SweepRun(own_s, times, tokens=float(own.census.brought.sum()))
            for own_s, times, own in zip(of_each, weights, rolled, strict=True)
        ),
    )


def _of_each(
    loads: Sequence[float], chosen: Sequence[int], seconds: Mapping[int, float]
) -> list[float]:
    """What every sweep takes, by its load; the first one by itself."""
    nodes = sorted(chosen[1:], key=loads.__getitem__)
    if not nodes:
        return [seconds[0]] * len(loads)
    told = np.interp(loads[1:], [loads[i] for i in nodes], [seconds[i] for i in nodes])
    return [seconds[0], *map(float, told)]


def _weights(rolled: Sequence[RolledSweep], rows_left: int, longest: int) -> list[float]:
    """How many sweeps each stands for: more of those in the middle, where rows were left out."""
    weights = [1.0] * len(rolled)
    if not rows_left:
        return weights
    begin, end = longest, len(rolled) - longest
    if begin >= end:
        begin, end = len(rolled) // 3, max(len(rolled) // 3 + 1, 2 * len(rolled) // 3)
    ended = sum(own.num_ended for own in rolled[begin:end])
    more = rows_left / max(1, ended)
    weights[begin:end] = [1.0 + more] * (end - begin)
    return weights


def _representatives(
    loads: Sequence[float], weights: Sequence[float], count: int
) -> tuple[list[int], dict[int, float]]:
    """Sweeps to run on the clock, in order, and for how many each stands: the first, with nothing
    loaded ahead, and about ``count`` others, which share the work evenly among them. A sweep whose
    load is between those of two of them is told by both, in a straight line."""
    shares = {0: weights[0]}
    order = sorted(range(1, len(loads)), key=lambda i: (loads[i], i))
    if not order:
        return [0], shares
    reached = list(accumulate(weights[i] * loads[i] for i in order))
    parts = (part * reached[-1] / (count - 1) for part in range(count))
    places = (min(len(order) - 1, bisect_left(reached, part)) for part in parts)
    known: list[int] = []
    for i in sorted({order[place] for place in places}, key=loads.__getitem__, reverse=True):
        if not known or loads[i] < _ALIKE * loads[known[-1]]:
            known.append(i)
    known.reverse()
    reach = [loads[i] for i in known]
    for i in order:
        above = min(len(known) - 1, bisect_left(reach, loads[i]))
        below = max(0, above - 1)
        wide = reach[above] - reach[below]
        upper = min(1.0, (loads[i] - reach[below]) / wide) if wide else 1.0
        for node, part in ((known[above], upper), (known[below], 1 - upper)):
            if part:
                shares[node] = shares.get(node, 0.0) + part * weights[i]
    return sorted(shares), shares


def _load_s(plan: Plan, machine: Machine) -> float:
    """Weights that stay in memory are read once."""
    held = plan.layout.tier_bytes()
    disk, size = machine.links["disk read"], float(_REQUEST_BYTES)
    read_s = disk.seconds(held["gpu"] + held["cpu"], "weights", size)
    if not held["gpu"]:
        return read_s
    return read_s + machine.links["host to device"].seconds(held["gpu"], "weights", size)


def _spread(starts: range) -> list[int]:
    """Some blocks: the first, the last, which may be smaller, and a few between."""
    whole = starts[:-1]
    if len(whole) <= _MOST_BLOCKS:
        return list(starts)
    step = (len(whole) - 1) / (_MOST_BLOCKS - 1)
    return sorted({*(whole[round(i * step)] for i in range(_MOST_BLOCKS)), starts[-1]})


def _counted(starts: range) -> Iterator[tuple[int, int]]:
    """All blocks, by where they start: of very many those at equal distances, each for the ones
    behind it too. The last one is by itself."""
    whole = len(starts) - 1
    count = min(whole, _MOST_COUNTED)
    borders = [whole * place // max(1, count) for place in range(count + 1)]
    for first, last in pairwise(borders):
        yield starts[(first + last - 1) // 2], last - first
    yield starts[-1], 1


def _tell(sampler: Sampler, lengths: Sequence[RowLength], most_steps: int) -> _Block:
    steps = _steps(max(1, max(row.new for row in lengths)), most_steps)
    sample = sampler.sample(zigzag_story(lengths, steps), steps)
    return _Block(
        num_rows=len(lengths),
        num_sweeps=steps[-1] + 1,
        prompt_tokens=sum(row.prompt - (0 if row.computes else row.shared) for row in lengths),
        new_tokens=sum(row.new for row in lengths),
        prefill_s=sample.seconds[0],
        decode_s=_sum_between(steps[1:], sample.seconds),
        num_bytes=_integrated(steps, sample.num_bytes),
        busy_s=_integrated(steps, sample.busy_s),
    )


def _steps(count: int, most: int) -> list[int]:
    """The first two sweeps of ``count``, the last, and some between."""
    if count <= most:
        return list(range(count))
    step = (count - 2) / (most - 2)
    return [0, *(1 + round(i * step) for i in range(most - 1))]


def _between(told: Mapping[int, _Block], known: Sequence[int], start: int) -> _Block:
    """The block that starts there: as it was told, or a mean of its neighbours."""
    if start in told:
        return told[start]
    place = bisect_right(known, start)
    if place == len(known):
        return told[known[-1]]
    first, second = told[known[place - 1]], told[known[place]]
    if second.num_rows != first.num_rows:
        return first
    share = (start - known[place - 1]) / (known[place] - known[place - 1])

    def mix(one: Lanes, other: Lanes) -> dict[Lane, float]:
        return {
            lane: (1 - share) * one.get(lane, 0.0) + share * other.get(lane, 0.0)
            for lane in {**one, **other}
        }

    return _Block(
        num_rows=first.num_rows,
        num_sweeps=round((1 - share) * first.num_sweeps + share * second.num_sweeps),
        prompt_tokens=(1 - share) * first.prompt_tokens + share * second.prompt_tokens,
        new_tokens=(1 - share) * first.new_tokens + share * second.new_tokens,
        prefill_s=(1 - share) * first.prefill_s + share * second.prefill_s,
        decode_s=(1 - share) * first.decode_s + share * second.decode_s,
        num_bytes=mix(first.num_bytes, second.num_bytes),
        busy_s=mix(first.busy_s, second.busy_s),
    )


def _added(parts: Sequence[tuple[Lanes, int]]) -> dict[Lane, float]:
    """Each so many times."""
    lanes = {lane for part, _ in parts for lane in part}
    return {
        lane: sum(times * part.get(lane, 0.0) for part, times in parts) for lane in sorted(lanes)
    }


def _integrated(steps: Sequence[int], values: Mapping[int, Lanes]) -> dict[Lane, float]:
    """By lane, the sum over all sweeps."""
    totals = {}
    for lane in {lane for own in values.values() for lane in own}:
        own = {step: values[step].get(lane, 0.0) for step in steps}
        totals[lane] = own[0] + _sum_between(steps[1:], own)
    return totals


def _sum_between(steps: Sequence[int], values: Mapping[int, float]) -> float:
    """The sum over every whole step from the first to the last."""
    if not steps:
        return 0.0
    total = values[steps[0]]
    for earlier, later in pairwise(steps):
        # Those strictly between change evenly from one value to the other.
        inner = (later - earlier - 1) * (values[earlier] + values[later]) / 2
        total += inner + values[later]
    return total
