"""The stages of a pipeline on one clock: their own operations, and what they wait for.

Each stage's stream is that of a run, of sweeps whose rows are known by their lengths. A lane works
through its operations in order; what a stage receives is there when the stage before has sent it,
and tokens when the last stage has. Parts of one machine are not taken to slow each other down, and
whoever sends to find room at the other end. Knows plans, machines and one link; no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from freight.hardware.machine import Machine
from freight.plan.cost import Cost
from freight.plan.default import Plan, Planner
from freight.plan.operation import Kind, Lane, Operation
from freight.plan.parallel import Answer, Parallel
from freight.plan.ring import forecast_pieces, stream_model
from freight.plan.rollout import WorkSizes
from freight.plan.samples import zigzag_story
from freight.plan.schedule import schedule
from freight.plan.shares import part_of
from freight.plan.stages import StageModel, stage_model
from freight.plan.sweep import Awaited, Sweep
from freight.plan.workload import RowLength

__all__ = ["Hop", "PipelineTime", "PlannedStage", "clock", "planned_stages", "time_stages"]

_MOST_STEPS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """The link from a stage to the next, and from the last one to all others."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """A stage with its plan, by which ``blocks_in_flight`` of its policy are under way, and the
    machine that it runs on."""

    model: StageModel
    plan: Plan
    machine: Machine
    dtype: str

    def operations(self, sweeps: Iterator[Sweep | Awaited]) -> list[Operation]:
        """Those of a run; of experts all are needed, as blocks of many rows do."""
        experts = self.model.config.experts
        layout, policy = self.plan.layout, self.plan.policy
        rolls = self.plan.geometry.rolls
        model = stream_model(layout, policy, most_pieces=forecast_pieces(policy), rolls=rolls)
        count = 0 if experts is None else experts.num_experts
        return list(schedule(sweeps, model, lambda: True, lambda _: range(count)))

    def seconds(self) -> Callable[[Operation], float]:
        """What each operation takes that is no message."""
        programme = self.model.programme
        cost = Cost(
            machine=self.machine,
            config=self.model.config,
            programme=programme,
            layout=self.plan.layout,
            policy=self.plan.policy,
            dtype=self.dtype,
            window_pages=self.plan.geometry.windows.pages,
            units=tuple(range(len(programme.units))),
        )

        def take(operation: Operation) -> float:
            if operation.kind is Kind.TAKE_TOKENS or operation.lane in (Lane.SEND, Lane.RECEIVE):
                return 0.0
            is_empty = not programme.units[operation.unit].steps
            if is_empty and operation.lane is Lane.COMPUTE:  # rows are copied, read and written
                moved = 2 * operation.accesses[-1].num_bytes
                return moved / self.machine.units[self.plan.policy.compute_tier].memory_bytes_per_s
            return cost.demand(operation).seconds

        return take


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTime:
    """A round of blocks: until the last one's first tokens, then until all tokens; ``rows`` are
    those of all blocks, ``new_tokens`` what each of them makes."""

    prefill_s: float
    decode_s: float
    rows: int
    new_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.rows * self.new_tokens / (self.prefill_s + self.decode_s)

    @property
    def decoded_per_s(self) -> float:
        """Tokens behind the first, by the time that they take."""
        return self.rows * (self.new_tokens - 1) / self.decode_s


def planned_stages(parallel: Parallel, answer: Answer) -> list[PlannedStage]:
    """The stages of a plan for several chips as they will run, each with its own layers' weights,
    what comes and what goes."""
    sources = parallel.sources(parallel.config)
    stages = []
    for own in answer.stages:
        model = stage_model(parallel.config, range(own.first, own.last + 1))
        planner = Planner(
            config=model.config,
            programme=model.programme,
            sources=model.sources(sources),
            dtype=parallel.dtype,
            workload=part_of(parallel.workload, answer.in_flight),
            compute_tier=own.choice.plan.policy.compute_tier,
            room={},
            taken={},
            has_disk_dir=True,
            wishes=parallel.wishes,
            blocks_in_flight=answer.in_flight,
        )
        plan = planner.derive(own.choice.plan.policy)
        stages.append(
            PlannedStage(model=model, plan=plan, machine=parallel.machine, dtype=parallel.dtype)
        )
    return stages


def time_stages(
    stages: Sequence[PlannedStage], hop: Hop, *, prompt_tokens: int, new_tokens: int
) -> PipelineTime:
    """One round: full blocks of rows alike, as many as are in flight. Some of the later sweeps
    stand for all; what lies between changes evenly."""
    policy = stages[0].plan.policy
    steps = _steps(new_tokens)
    lengths = [RowLength(prompt_tokens, new_tokens)] * policy.block_rows
    streams = []
    for stage in stages:
        own = stage.plan
        sizes = WorkSizes.of(own, stage.model.config)
        sweeps = zigzag_story(lengths, steps)(sizes)
        streams.append(stage.operations(_turns(sweeps, policy.blocks_in_flight)))
    ends = clock(
        streams,
        [stage.seconds() for stage in stages],
        hop,
        overlap=policy.overlap,
        is_inline=[stage.machine.is_inline(stage.plan.policy.compute_tier) for stage in stages],
    )
    count = policy.blocks_in_flight
    reached = [max(ends[n * count + lane] for lane in range(count)) for n in range(len(steps))]
    passed = {step: reached[n] - reached[n - 1] for n, step in enumerate(steps) if n}
    decode_s = 0.0
    for n, step in enumerate(steps[1:], start=1):
        between = step - steps[n - 1] - 1 if n > 1 else 0
        decode_s += passed[step] + between * (passed[step] + passed.get(steps[n - 1], 0.0)) / 2
    return PipelineTime(
        prefill_s=reached[0],
        decode_s=decode_s,
        rows=count * policy.block_rows,
        new_tokens=new_tokens,
    )


def _steps(count: int) -> list[int]:
    """The first two tokens of ``count``, the last, and some between."""
    if count <= _MOST_STEPS:
        return list(range(count))
    gap = (count - 2) / (_MOST_STEPS - 2)
    return [0, *(1 + round(n * gap) for n in range(_MOST_STEPS - 1))]


def _turns(sweeps: Sequence[Sweep], count: int) -> Iterator[Sweep | Awaited]:
    """Those of ``count`` blocks alike in turn, each after its own tokens."""
    for n, sweep in enumerate(sweeps):
        for lane in range(count):
            if n:
                batches = tuple(work.batch for work in sweeps[n - 1].works)
                yield Awaited(sweep=(n - 1) * count + lane, batches=batches)
            yield Sweep(index=n * count + lane, works=sweep.works)


# -- the clock -------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Stage:
    """How far a stage has come."""

    operations: Sequence[Operation]
    seconds: Callable[[Operation], float]
    is_inline: bool
    position: int = 0
    free: dict[Lane, float] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    computed_s: float = 0.0
    last_s: float = 0.0


def clock(
    streams: Sequence[Sequence[Operation]],
    seconds: Sequence[Callable[[Operation], float]],
    hop: Hop,
    *,
    overlap: bool,
    is_inline: Sequence[bool],
) -> Mapping[int, float]:
    """When the tokens of each sweep are known on the last stage. ``is_inline``, by stage: the
    thread that computes also issues. The streams must be legal, and those of one run."""
    stages = [
        _Stage(operations=own, seconds=take, is_inline=inline)
        for own, take, inline in zip(streams, seconds, is_inline, strict=True)
    ]
    arrived: dict[tuple[int, int, int], float] = {}
    made: dict[tuple[int, int], float] = {}
    ends: dict[int, float] = {}
    while any(stage.position < len(stage.operations) for stage in stages):
        before = [stage.position for stage in stages]
        for number, stage in enumerate(stages):
            while stage.position < len(stage.operations):
                operation = stage.operations[stage.position]
                k = -1 if operation.batch is None else operation.batch.index
                message = operation.sweep, k
                there_s = 0.0
                if operation.kind is Kind.RECEIVE_HIDDEN:
                    there_s = arrived.get((number, *message), math.inf)
                elif operation.kind is Kind.TAKE_TOKENS:
                    far = number + 1 < len(stages)
                    there_s = made.get(message, math.inf) + far * hop.latency_s
                if there_s == math.inf:
                    break
                end_s = _run(stage, operation, there_s, hop, overlap=overlap)
                if operation.kind is Kind.SEND_HIDDEN:
                    arrived[number + 1, operation.sweep, k] = end_s + hop.latency_s
                elif operation.is_last and operation.kind is not Kind.TAKE_TOKENS:
                    made[message] = end_s
                    ends[operation.sweep] = max(end_s, ends.get(operation.sweep, 0.0))
        assert before != [stage.position for stage in stages], "stages wait for each other"
    return ends


def _run(stage: _Stage, operation: Operation, there_s: float, hop: Hop, *, overlap: bool) -> float:
    """When the stage's next operation ends, not beginning before ``there_s``."""
    lane = operation.lane
    waits = [there_s, stage.free.get(lane, 0.0)]
    waits += [stage.ends[index] for _, index in operation.after]
    if not overlap:
        waits.append(stage.last_s)
    elif stage.is_inline:
        waits.append(stage.computed_s)
    taken_s = stage.seconds(operation)
    if lane is Lane.SEND:
        taken_s = operation.num_bytes / hop.bytes_per_s
    end_s = max(waits) + taken_s
    stage.ends.append(end_s)
    stage.free[lane] = stage.last_s = end_s
    if lane is Lane.COMPUTE:
        stage.computed_s = end_s
    stage.position += 1
    return end_s
