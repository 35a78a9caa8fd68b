"""The linear programme: which shares of weights, KV cache and activations on which tier are best.

For one block shape. Time is that of the prompts' sweep and of the later ones, each at least what
every lane needs for it (FlexGen, appendix A.3); the shares of each tier's memory add up to no more
than there is. Knows no tensors: bytes, seconds and rooms come in as numbers, so that what a share
costs is said in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from freight.plan.policy import TIERS, Split, Tier

__all__ = ["LinearProblem", "LinearSolution", "Phase", "solve"]

KINDS: Final = ("weights", "kv", "activations")

Placed = tuple[str, Tier]
"""A kind of tensor on a tier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One kind of sweep: how many there are, what lanes take whatever the shares, and how many
    seconds more each lane takes for all of a kind on a tier."""

    count: float
    fixed_s: Mapping[str, float]
    seconds: Mapping[str, Mapping[Placed, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearProblem:
    """``sizes`` are bytes of all of a kind, wherever it is: by tier whose memory it takes there,
    homes and what passes through them; ``rooms`` what each tier has left for them. ``bounds`` are
    the least and the most share of each pair that may have one."""

    phases: tuple[Phase, ...]
    sizes: Mapping[Placed, Mapping[Tier, float]]
    rooms: Mapping[Tier, float]
    bounds: Mapping[Placed, tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSolution:
    """The best shares, and the seconds that they promise."""

    seconds: float
    shares: Mapping[Placed, float]

    def split(self, kind: str) -> Split:
        gpu, cpu, _ = (min(1.0, max(0.0, self.shares.get((kind, tier), 0.0))) for tier in TIERS)
        cpu = min(cpu, 1.0 - gpu)
        return Split(gpu=gpu, cpu=cpu, disk=1.0 - gpu - cpu)


def solve(problem: LinearProblem) -> LinearSolution | None:
    """The optimum, by HiGHS; None where nothing fits."""
    from scipy.optimize import linprog

    pairs = sorted(problem.bounds)
    place = {pair: number for number, pair in enumerate(pairs)}
    num_phases = len(problem.phases)
    width = len(pairs) + num_phases
    above: list[list[float]] = []
    most: list[float] = []
    for number, phase in enumerate(problem.phases):
        for lane in {*phase.fixed_s, *phase.seconds}:
            row = [0.0] * width
            for pair, seconds in phase.seconds.get(lane, {}).items():
                if pair in place:
                    row[place[pair]] = seconds
            row[len(pairs) + number] = -1.0
            above.append(row)
            most.append(-phase.fixed_s.get(lane, 0.0))
    for tier, room in problem.rooms.items():
        row = [0.0] * width
        for pair, number in place.items():
            row[number] = problem.sizes.get(pair, {}).get(tier, 0.0) / 2**30
        above.append(row)
        most.append(room / 2**30)
    equal = [[float(pair[0] == kind) for pair in pairs] + [0.0] * num_phases for kind in KINDS]
    found = linprog(
        [0.0] * len(pairs) + [phase.count for phase in problem.phases],
        A_ub=above,
        b_ub=most,
        A_eq=equal,
        b_eq=[1.0] * len(KINDS),
        bounds=[*(problem.bounds[pair] for pair in pairs), *([(0.0, None)] * num_phases)],
        method="highs",
    )
    if not found.success:
        return None
    return LinearSolution(
        seconds=float(found.fun),
        shares={pair: float(found.x[number]) for pair, number in place.items()},
    )
