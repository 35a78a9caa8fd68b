"""The linear programme: which shares of weights, KV cache and activations on which tier are best.

For one block shape. Time is that of the prompts' sweep and of the later ones, each at least what
every lane needs for it (FlexGen, appendix A.3); the shares of each tier's memory add up to no more
than there is. Knows no tensors: bytes, seconds and rooms come in as numbers, so that what a share
costs is said in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    # Imported late: a run whose policy is given needs none of it.
    import highspy

    pairs = sorted(problem.bounds)
    place = {pair: number for number, pair in enumerate(pairs)}
    width = len(pairs) + len(problem.phases)
    model = _Rows()
    cost = [0.0] * len(pairs)
    always_s = 0.0
    for number, phase in enumerate(problem.phases, len(pairs)):
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
            row[number] = -1.0
            model.add(row, most=-sum(phase.fixed_s.get(lane, 0.0) for lane in together))
    for tier, room in problem.rooms.items():
        sizes = [problem.sizes.get(pair, {}).get(tier, 0.0) / 2**30 for pair in pairs]
        model.add(sizes, most=room / 2**30)
    for kind in KINDS:
        model.add([float(_kind_of(pair) == kind) for pair in pairs], least=1.0, most=1.0)
    for factors, value in problem.ties:
        model.add([factors.get(pair, 0.0) for pair in pairs], least=value, most=value)
    bounds = [*(problem.bounds[pair] for pair in pairs), *([(0.0, inf)] * len(problem.phases))]

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = width, len(model.least)
    lp.col_cost_ = cost + [phase.count for phase in problem.phases]
    lp.col_lower_, lp.col_upper_ = [own[0] for own in bounds], [own[1] for own in bounds]
    lp.row_lower_, lp.row_upper_ = model.least, model.most
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_ = model.starts, model.columns
    lp.a_matrix_.value_ = model.values
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    found = highs.getSolution().col_value
    return LinearSolution(
        seconds=float(highs.getInfo().objective_function_value) + always_s,
        shares={pair: float(found[number]) for pair, number in place.items()},
    )


@dataclass(kw_only=True, slots=True)
class _Rows:
    """The sides of a linear programme, row by row: what is not 0, and between what each lies."""

    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def add(self, row: Sequence[float], *, least: float = -inf, most: float) -> None:
        for column, value in enumerate(row):
            if value:
                self.columns.append(column)
                self.values.append(value)
        self.starts.append(len(self.columns))
        self.least.append(least)
        self.most.append(most)


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
