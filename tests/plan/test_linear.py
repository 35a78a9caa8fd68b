"""The linear programme's optimum against a fine grid of all shares."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.plan.linear import KINDS, LinearProblem, Phase, solve, solve_by_highs
from freight.plan.policy import TIERS

STEPS = 12
PAIRS = [*product(KINDS, TIERS)]
LANES = ("compute", "disk read", "host to device")
GIB = float(2**30)

# All ways to share one kind out over three tiers, in twelfths.
SHARES = np.array([(g, c, STEPS - g - c) for g in range(STEPS + 1) for c in range(STEPS + 1 - g)])
SHARES = SHARES / STEPS


def table(draw: st.DrawFn, most: float) -> dict[Any, float]:
    return {pair: draw(st.floats(0, most)) for pair in PAIRS}


@st.composite
def problems(draw: st.DrawFn) -> LinearProblem:
    return LinearProblem(
        phases=tuple(
            Phase(
                count=draw(st.sampled_from([1.0, 7.0, 31.0])),
                fixed_s={"compute": draw(st.floats(0, 2))},
                seconds={lane: table(draw, 3) for lane in LANES[1:]},
            )
            for _ in range(2)
        ),
        sizes={pair: {t: draw(st.floats(0, 2)) * GIB for t in TIERS} for pair in PAIRS},
        rooms={tier: draw(st.floats(0.5, 8)) * GIB for tier in TIERS},
        bounds=dict.fromkeys(PAIRS, (0.0, 1.0)),
    )


def totals(of: Mapping[Any, float]) -> np.ndarray:
    """A sum over pairs for every combination of the kinds' shares, on the grid."""
    parts = [SHARES @ np.array([of.get((kind, tier), 0.0) for tier in TIERS]) for kind in KINDS]
    return parts[0][:, None, None] + parts[1][None, :, None] + parts[2][None, None, :]


def best_on_grid(problem: LinearProblem) -> float:
    fits = np.ones((len(SHARES),) * 3, dtype=bool)
    for tier, room in problem.rooms.items():
        fits &= totals({pair: own[tier] for pair, own in problem.sizes.items()}) <= room
    seconds = np.zeros(fits.shape)
    for phase in problem.phases:
        lanes = {*phase.fixed_s, *phase.seconds}
        each = [
            phase.fixed_s.get(lane, 0.0) + totals(phase.seconds.get(lane, {})) for lane in lanes
        ]
        seconds += phase.count * np.maximum.reduce(each)
    return float(seconds[fits].min()) if fits.any() else float("inf")


@settings(deadline=None, max_examples=15)
@given(problem=problems())
def test_no_point_of_a_grid_is_better(problem: LinearProblem) -> None:
    """And none is much worse: a grid's best point is near the optimum where there is room."""
    best = best_on_grid(problem)
    found = solve(problem)
    if found is None:
        assert best == float("inf")
        return
    assert found.seconds <= best * (1 + 1e-6)
    for kind in KINDS:
        shares = [found.shares[kind, tier] for tier in TIERS]
        assert abs(sum(shares) - 1) < 1e-6
        assert min(shares) >= -1e-9
    for tier, room in problem.rooms.items():
        used = sum(found.shares[pair] * problem.sizes[pair][tier] for pair in PAIRS)
        assert used <= room * (1 + 1e-6)
    roomy = LinearProblem(
        phases=problem.phases,
        sizes=problem.sizes,
        rooms={tier: 100 * GIB for tier in TIERS},
        bounds=problem.bounds,
    )
    easy = solve(roomy)
    assert easy is not None
    grid = best_on_grid(roomy)
    assert easy.seconds <= found.seconds * (1 + 1e-6)
    assert grid <= easy.seconds * 1.2 + 0.2 * sum(phase.count for phase in roomy.phases)


def test_a_share_that_was_fixed_is_kept() -> None:
    problem = LinearProblem(
        phases=(Phase(count=1.0, fixed_s={}, seconds={"disk read": {("weights", "disk"): 9.0}}),),
        sizes={},
        rooms={},
        bounds={pair: (0.0, 1.0) for pair in PAIRS if pair[0] != "weights"}
        | {("weights", "cpu"): (0.25, 0.25), ("weights", "disk"): (0.75, 0.75)},
    )
    found = solve(problem)
    assert found is not None
    assert found.split("weights").disk == 0.75
    assert abs(found.seconds - 6.75) < 1e-9


@settings(deadline=None, max_examples=60)
@given(
    room=st.floats(0.1, 12),
    weights=st.floats(1, 8),
    ring=st.floats(0.05, 1),
    kv=st.floats(0, 2),
    seconds=st.floats(0.1, 9),
    compute=st.floats(0, 5),
)
def test_memory_is_filled_where_only_weights_have_a_choice(
    room: float, weights: float, ring: float, kv: float, seconds: float, compute: float
) -> None:
    """Without HiGHS, and with the same result."""
    problem = LinearProblem(
        phases=(
            Phase(
                count=5.0,
                fixed_s={"compute": compute},
                seconds={"disk read": {("weights", "disk"): seconds}},
            ),
        ),
        sizes={
            ("weights", "cpu"): {"cpu": weights * GIB},
            ("weights", "disk"): {"cpu": ring * GIB},
            ("kv", "cpu"): {"cpu": kv * GIB},
            ("activations", "cpu"): {"cpu": 0.0},
        },
        rooms={"cpu": room * GIB},
        bounds={
            ("weights", "cpu"): (0.0, 1.0),
            ("weights", "disk"): (0.0, 1.0),
            ("kv", "cpu"): (0.0, 1.0),
            ("activations", "cpu"): (0.0, 1.0),
        },
    )
    found, expected = solve(problem), solve_by_highs(problem)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert abs(found.seconds - expected.seconds) <= 1e-6 * max(1.0, expected.seconds)
