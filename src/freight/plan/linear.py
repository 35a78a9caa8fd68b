"""The linear programme: which shares of weights, KV cache and activations on which tier are best.

For one block shape. Time is that of the prompts' sweep and of the later ones, each at least what
every lane needs for it (FlexGen, appendix A.3); the shares of each tier's memory add up to no more
than there is. Knows no tensors: bytes, seconds and rooms come in as numbers, so that what a share
costs is said in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from freight.plan.policy import TIERS, Split, Tier

__all__ = [
    "DELEGATED",
    "KINDS",
    "LinearProblem",
    "LinearSolution",
    "Phase",
    "solve",
    "solve_by_highs",
]

KINDS: Final = ("weights", "kv", "activations")
DELEGATED: Final = "delegated"
"""Keys and values that the CPU attends where they are: a part of "kv"."""

_TINY: Final = 1e-9

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
    the least and the most share of each pair that may have one. ``ties`` are sums of shares, each
    times a factor, that have a certain value. Without ``overlap`` lanes work one after the other;
    with it some of the work of all, ``friction``, is not hidden by the lane that works longest."""

    phases: tuple[Phase, ...]
    sizes: Mapping[Placed, Mapping[Tier, float]]
    rooms: Mapping[Tier, float]
    bounds: Mapping[Placed, tuple[float, float]]
    ties: tuple[tuple[Mapping[Placed, float], float], ...] = ()
    overlap: bool = True
    friction: float = 0.0

    def of_blocks(self, blocks: Iterable[tuple[float, float]]) -> LinearProblem:
        """The same for so many blocks, each with a share of its rows: weights come all the same."""

        def scaled(phase: Phase, times: float, share: float) -> Phase:
            return Phase(
                count=times * phase.count,
                fixed_s={lane: share * seconds for lane, seconds in phase.fixed_s.items()},
                seconds={
                    lane: {pair: s * (1.0 if pair[0] == "weights" else share) for pair, s in own}
                    for lane, own in ((lane, own.items()) for lane, own in phase.seconds.items())
                },
            )

        parts = [(times, share) for times, share in blocks if times and share]
        phases = (scaled(phase, *part) for part in parts for phase in self.phases)
        return replace(self, phases=tuple(phases))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSolution:
    """The best shares, and the seconds that they promise."""

    seconds: float
    shares: Mapping[Placed, float]

    @classmethod
    def of(cls, problem: LinearProblem, shares: Mapping[Placed, float]) -> LinearSolution:
        """Given shares, and what they take."""
        seconds = 0.0
        for phase in problem.phases:
            lanes = {*phase.fixed_s, *phase.seconds}
            busy_s = [
                phase.fixed_s.get(lane, 0.0)
                + sum(shares.get(pair, 0.0) * s for pair, s in phase.seconds.get(lane, {}).items())
                for lane in lanes
            ]
            longest_s = max(busy_s) if problem.overlap else sum(busy_s)
            seconds += phase.count * (longest_s + problem.friction * sum(busy_s))
        return cls(seconds=seconds, shares=shares)

    def split(self, kind: str) -> Split:
        gpu, cpu, _ = (min(1.0, max(0.0, self._share(kind, tier))) for tier in TIERS)
        cpu = min(cpu, 1.0 - gpu)
        return Split(gpu=gpu, cpu=cpu, disk=1.0 - gpu - cpu)

    def cpu_attention(self) -> float:
        """The share of the keys off the device that the CPU attends."""
        away: tuple[Tier, ...] = ("cpu", "disk")
        delegated = sum(self.shares.get((DELEGATED, tier), 0.0) for tier in away)
        total = sum(self._share("kv", tier) for tier in away)
        return min(1.0, max(0.0, delegated / total)) if total > _TINY else 0.0

    def _share(self, kind: str, tier: Tier) -> float:
        own = self.shares.get((kind, tier), 0.0)
        return own + (self.shares.get((DELEGATED, tier), 0.0) if kind == "kv" else 0.0)


def _kind_of(pair: Placed) -> str:
    return "kv" if pair[0] == DELEGATED else pair[0]


def solve(problem: LinearProblem) -> LinearSolution | None:
    """The optimum; None where nothing fits."""
    return _fill_memory(problem) if _is_plain(problem) else solve_by_highs(problem)


def solve_by_highs(problem: LinearProblem) -> LinearSolution | None:
    """The optimum of any such problem; None where nothing fits."""
    # Imported late: it takes 50 MiB, which a small budget should not pay for nothing.
    from scipy.optimize import Bounds, LinearConstraint, milp

    pairs = sorted(problem.bounds)
    place = {pair: number for number, pair in enumerate(pairs)}
    num_phases = len(problem.phases)
    width = len(pairs) + num_phases
    cost = [0.0] * len(pairs)
    always_s = 0.0
    above: list[list[float]] = []
    most: list[float] = []
    for number, phase in enumerate(problem.phases):
        lanes = sorted({*phase.fixed_s, *phase.seconds})
        always_s += phase.count * problem.friction * sum(phase.fixed_s.values())
        for lane in lanes:
            for pair, seconds in phase.seconds.get(lane, {}).items():
                if pair in place:
                    cost[place[pair]] += phase.count * problem.friction * seconds
        for together in [[lane] for lane in lanes] if problem.overlap else [lanes]:
            row = [0.0] * width
            for lane in together:
                for pair, seconds in phase.seconds.get(lane, {}).items():
                    if pair in place:
                        row[place[pair]] += seconds
            row[len(pairs) + number] = -1.0
            above.append(row)
            most.append(-sum(phase.fixed_s.get(lane, 0.0) for lane in together))
    for tier, room in problem.rooms.items():
        row = [0.0] * width
        for pair, number in place.items():
            row[number] = problem.sizes.get(pair, {}).get(tier, 0.0) / 2**30
        above.append(row)
        most.append(room / 2**30)
    equal = [[float(_kind_of(pair) == kind) for pair in pairs] for kind in KINDS]
    equal += [[factors.get(pair, 0.0) for pair in pairs] for factors, _ in problem.ties]
    bounds = [*(problem.bounds[pair] for pair in pairs), *([(0.0, inf)] * num_phases)]
    rows = [*above, *([*row, *([0.0] * num_phases)] for row in equal)]
    exact = [1.0] * len(KINDS) + [value for _, value in problem.ties]
    # Without whole numbers it solves what linprog does, and checks its arguments less.
    found = milp(
        cost + [phase.count for phase in problem.phases],
        constraints=LinearConstraint(rows, [-inf] * len(most) + exact, most + exact),
        bounds=Bounds(*zip(*bounds, strict=True)),
    )
    if not found.success:
        return None
    return LinearSolution(
        seconds=float(found.fun) + always_s,
        shares={pair: float(found.x[number]) for pair, number in place.items()},
    )


def _is_plain(problem: LinearProblem) -> bool:
    """Whether only the weights have a choice, and only between memory and disk: then as much as
    fits belongs into memory, whatever the rates."""
    if problem.ties:
        return False
    open_pairs = {pair for pair, (least, most) in problem.bounds.items() if least < most}
    kinds = [kind for kind, _ in problem.bounds]
    choices = {pair for pair in open_pairs if kinds.count(pair[0]) > 1}
    return choices <= {("weights", "cpu"), ("weights", "disk")}


def _fill_memory(problem: LinearProblem) -> LinearSolution | None:
    """As much of the weights in RAM as fits."""
    shares: dict[Placed, float] = {
        pair: least if ("weights", "cpu") != pair else 0.0
        for pair, (least, _) in problem.bounds.items()
    }
    kinds = [kind for kind, _ in problem.bounds]
    for pair, (_, most) in problem.bounds.items():
        if kinds.count(pair[0]) == 1:
            shares[pair] = most
    least, most = problem.bounds["weights", "cpu"]
    taken = sum(share * problem.sizes[pair].get("cpu", 0.0) for pair, share in shares.items())
    ring = problem.sizes["weights", "disk"].get("cpu", 0.0)
    weights = problem.sizes["weights", "cpu"]["cpu"]
    left = problem.rooms["cpu"] - taken
    share = most if left >= weights else (left - ring) / max(1.0, weights - ring)
    share = min(most, max(least, share))
    shares["weights", "cpu"], shares["weights", "disk"] = share, 1.0 - share
    used = taken + share * weights + (1.0 - share) * ring
    return None if used > problem.rooms["cpu"] * (1 + 1e-9) else LinearSolution.of(problem, shares)
