"""What a search finds: solutions for shapes of blocks, whole plans with their times, and which of
these is best. Knows no rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from freight.hardware.machine import Machine
from freight.plan.default import Plan, Planner
from freight.plan.forecast import Forecast
from freight.plan.linear import LinearProblem
from freight.plan.policy import Policy
from freight.plan.terms import Terms
from freight.plan.workload import Workload

__all__ = ["Choice", "Known", "Solution", "is_near", "least_share", "ranked"]

_AS_FAST: Final = 1.01
_ALL: Final = 1e-6
_LEAST: Final = 0.85
_LEAST_MIXED: Final = 0.74
_LEAST_UNEVEN: Final = 0.7
"""No best plan was found to take less than these shares of what the linear programme says, over
models, machines and lengths: of zig-zag blocks of rows that are all alike, of such rows that enter
at any time, and of rows of many lengths, for which its mean sweep says less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan with what it will take."""

    plan: Plan
    forecast: Forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A block shape with the best shares that a linear programme finds for it: seconds of a block,
    and of the whole workload. ``is_near``: all of it lies where the arithmetic is."""

    policy: Policy
    block_s: float
    seconds: float
    is_near: bool


@dataclass(slots=True)
class Known:
    """What was found before, by policies, which say all of a plan: linear programmes, solutions and
    whole plans with or without the disk, forecasts that are rough or not."""

    problems: dict[tuple[Policy, bool], tuple[Terms, LinearProblem]] = field(default_factory=dict)

    solved: dict[tuple[Policy, bool], Solution | None] = field(default_factory=dict)
    whole: dict[tuple[Policy, bool], Plan | None] = field(default_factory=dict)
    priced: dict[tuple[Policy, bool], Choice] = field(default_factory=dict)
    timed: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)

    def problem(
        self, planner: Planner, machine: Machine, policy: Policy, *, uses_disk: bool
    ) -> LinearProblem:
        """Of a block shape; a planner with wishes of its own has other bounds."""
        key = policy, uses_disk
        if key not in self.problems:
            own = Terms.of(planner, machine, policy, uses_disk=uses_disk, timed=self.timed)
            self.problems[key] = own, own.problem()
        terms, problem = self.problems[key]
        return problem if terms.planner is planner else terms.narrowed(problem, planner)


def is_near(policy: Policy) -> bool:
    """Whether weights, keys and activations all lie where the arithmetic is."""
    near = policy.compute_tier
    splits = policy.weights, policy.kv, policy.activations
    return all(own.share(near) > 1 - _ALL for own in splits)


def least_share(policy: Policy, workload: Workload) -> float:
    """The least share of what the linear programme says that a plan may take."""
    if len(workload.lengths) > 1:
        return _LEAST_UNEVEN
    return _LEAST_MIXED if policy.is_continuous else _LEAST


def ranked(priced: Iterable[Choice]) -> list[Choice]:
    """Fastest first; but of those about as fast as the fastest that move no more the one with the
    smallest block, whose answers come sooner and which takes less memory."""
    order = sorted(priced, key=lambda choice: choice.forecast.seconds)
    if not order:
        return []
    least_s, least_bytes = order[0].forecast.seconds, sum(order[0].forecast.num_bytes.values())

    def rank(own: Choice) -> tuple[float, int]:
        told = own.forecast
        moves_more = sum(told.num_bytes.values()) > least_bytes
        if moves_more or told.seconds > _AS_FAST * least_s:
            return told.seconds, 0
        return least_s, own.plan.policy.block_rows

    return sorted(order, key=rank)
