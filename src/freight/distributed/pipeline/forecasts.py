"""What a stage of a pipeline takes, and from that of all stages what the pipeline does.

A stage is told as a model of its layers alone, with the head where it is the last. What it hands to
the next one goes over a link whose rate was measured, once the sweep is done, while the stage goes
on with another block. Knows plans and rates, no messages and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from freight.hardware.machine import Machine
from freight.model.config import DTYPE_BYTES
from freight.model.decoder import build_programme
from freight.model.passing import handed_columns
from freight.model.programme import Programme
from freight.plan.default import Plan, Planner
from freight.plan.forecast import Forecast, SweepRun, forecast
from freight.plan.pipeline import Hop
from freight.plan.policy import Policy
from freight.plan.shares import sources_of, with_layers
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload
from freight.runtime.engine import OpenedModel
from freight.runtime.options import EngineOptions
from freight.runtime.planning import plan_run, rates_for

__all__ = ["Phases", "StageForecaster", "flow"]


_SETTLED: Final = 4
"""Sweeps alike after which each takes as long as the one before."""


class Phases(NamedTuple):
    """Seconds in which prompts' first tokens, and in which later ones, were what was next."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, kw_only=True)
class StageForecaster:
    """For a stage with some ``layers`` of the whole ``model``. ``workload`` are the rows of one of
    ``blocks_in_flight``, ``hops`` what is between each stage and the next, and the last one and the
    first."""

    model: OpenedModel
    layers: range
    workload: Workload
    blocks_in_flight: int
    hops: Sequence[Hop]

    @cached_property
    def _machine(self) -> Machine | None:
        machine = rates_for(self.model.options, self.model.device)
        is_known = machine is not None and self.model.dtype in machine.compute_unit.products
        return machine if is_known else None

    @property
    def knows_rates(self) -> bool:
        return self._machine is not None

    @cached_property
    def _own(self) -> OpenedModel:
        """The layers as a model."""
        whole = self.model
        is_last = self.layers.stop == whole.config.num_layers
        return replace(
            whole,
            config=with_layers(whole.config, self.layers, with_ends=is_last),
            sources=sources_of(whole.sources, self.layers, with_ends=is_last),
        )

    @cached_property
    def _programme(self) -> Programme:
        """Whose last layer works on all tokens, unless it is the model's."""
        is_last = self.layers.stop == self.model.config.num_layers
        return replace(build_programme(self._own.config), needs_all=not is_last)

    def search(self, options: EngineOptions) -> Plan:
        """The best plan for these layers, if no other stage had a say. BudgetError if none fits."""
        own = self._own
        plan, _ = plan_run(
            own.config,
            own.sources,
            own.dtype,
            own.device,
            options,
            self.workload,
            programme=self._programme,
            blocks_in_flight=self.blocks_in_flight,
        )
        return plan

    def of_pipeline(self, told: Forecast, stages: Sequence[Sequence[SweepRun]]) -> Forecast:
        """The whole pipeline, of whose ``stages`` each says what its sweeps of a block take, with
        this one's own work as ``told`` of a block: bytes and lanes are of all its blocks."""
        count = self.blocks_in_flight
        token_bytes = handed_columns(self.model.config) * DTYPE_BYTES[self.model.dtype]
        phases = flow(stages, count, self.hops, token_bytes)
        return replace(
            told,
            prefill_s=phases.prefill_s,
            decode_s=phases.decode_s,
            # Of as many blocks as are in flight each has its part of the time.
            block_s=told.block_s * (phases.prefill_s + phases.decode_s) / told.seconds,
            new_tokens=count * told.new_tokens,
            num_bytes={lane: count * size for lane, size in told.num_bytes.items()},
            busy_s={lane: count * busy for lane, busy in told.busy_s.items()},
        )

    def tell(self, policy: Policy) -> Forecast:
        """What this stage takes with a policy for one of the blocks, if none waits for another."""
        assert self._machine is not None
        config = self._own.config
        planner = Planner(
            config=config,
            programme=self._programme,
            sources=self._own.sources,
            dtype=self.model.dtype,
            workload=self.workload,
            compute_tier=policy.compute_tier,
            room={},
            taken={},
            has_disk_dir=True,
            wishes=Wishes(),
            blocks_in_flight=self.blocks_in_flight,
        )
        plan = planner.derive(policy)
        return forecast(plan, self._machine, config, planner.programme, self.model.dtype)


def flow(
    stages: Sequence[Sequence[SweepRun]],
    blocks_in_flight: int,
    hops: Sequence[Hop],
    token_bytes: float,
) -> Phases:
    """So many blocks in turn through all stages, of which each says what its sweeps of a block
    take. A stage begins a sweep when what the one before it has made is there and its own last one
    is done, the first stage when the tokens of the block's sweep before are known. ``hops`` are
    behind each stage; a token has ``token_bytes`` on all but the last, where it is but a number."""
    free_s = [0.0] * len(stages)
    sent_s = [0.0] * len(stages)
    known_s = [0.0] * blocks_in_flight
    phases = {True: 0.0, False: 0.0}
    for runs in zip(*stages, strict=True):
        seconds = [run.seconds for run in runs]
        size = runs[0].tokens * token_bytes
        sending_s = [*(size / hop.bytes_per_s for hop in hops[:-1]), 0.0]
        begun_s, count = max(known_s), runs[0].times
        alone = min(int(count), _SETTLED)
        for _ in range(alone):
            for block in range(blocks_in_flight):
                reached_s = known_s[block]
                for stage, (own_s, hop) in enumerate(zip(seconds, hops, strict=True)):
                    reached_s = free_s[stage] = max(reached_s, free_s[stage]) + own_s
                    sent_s[stage] = max(reached_s, sent_s[stage]) + sending_s[stage]
                    reached_s = sent_s[stage] + hop.latency_s
                known_s[block] = reached_s
        # A round takes the slowest stage or link with all blocks, or a block with all of them.
        through_s = sum(seconds) + sum(sending_s) + sum(hop.latency_s for hop in hops)
        slowest_s = max(*seconds, *sending_s)
        later_s = (count - alone) * max(blocks_in_flight * slowest_s, through_s)
        free_s, sent_s, known_s = (
            [own_s + later_s for own_s in some] for some in (free_s, sent_s, known_s)
        )
        phases[runs[0].is_prompts] += max(known_s) - begun_s
    return Phases(prefill_s=phases[True], decode_s=phases[False])
