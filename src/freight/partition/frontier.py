"""Plans side by side: cost against latency, layouts against tokens, contexts against batches.

Every point is priced by ``cost`` and nothing else; what cannot be cut or does not fit is left out.
Knows no chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from freight.errors import FreightError
from freight.model.switches import ModelConfig
from freight.partition.cost import Cost, Setting, Step
from freight.partition.efficiency import Phase
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.named import FEED_FORWARD
from freight.partition.planner import best_plan
from freight.partition.sharded import Sizes

__all__ = [
    "Point",
    "by_context",
    "by_shape",
    "crossovers",
    "frontier",
    "moved_bytes",
    "points",
    "priced",
    "stationary",
]


@dataclass(frozen=True, slots=True)
class Point:
    """A plan by what it gives: seconds of a step, chip-seconds of a token, MFU."""

    cost: Cost
    seconds: float
    chip_seconds: float
    mfu: float


def priced(cost: Cost) -> Point | None:
    """None where it cannot be cut or does not fit."""
    try:
        if cost.memory_bytes > cost.room_bytes:
            return None
        return Point(cost, cost.seconds, cost.chip_seconds_per_token, cost.mfu)
    except FreightError:
        return None


def points(
    config: ModelConfig, chips: Iterable[int], steps: Sequence[Step], setting: Setting
) -> Iterator[Point]:
    """The best plan for each number of chips and each step, where there is one."""
    for number in chips:
        for step in steps:
            try:
                (cost,) = best_plan(config, number, [(step, 1.0)], setting)
            except FreightError:
                continue
            yield Point(cost, cost.seconds, cost.chip_seconds_per_token, cost.mfu)


def frontier(found: Iterable[Point]) -> list[Point]:
    """Those that no other beats in latency and cost, fastest first (Fig. 1)."""
    kept: list[Point] = []
    for own in sorted(found, key=lambda point: (point.seconds, point.chip_seconds)):
        if not kept or own.chip_seconds < kept[-1].chip_seconds:
            kept.append(own)
    return kept


def stationary(
    config: ModelConfig, meshes: Iterable[Mesh], step: Step, setting: Setting
) -> Point | None:
    """The fastest weight-stationary plan on some meshes, whatever attention is cut by: those with
    X = 1 are 1D (Fig. 6)."""
    found = [
        priced(Cost(config, mesh, Cut(batch=batch), step, setting))
        for mesh in meshes
        for batch in _batches()
    ]
    return min((own for own in found if own), key=lambda own: own.seconds, default=None)


def by_shape(
    config: ModelConfig, mesh: Mesh, phase: Phase, rows: int, tokens: int, setting: Setting
) -> dict[str, Point]:
    """Each of the papers' feed-forward layouts on one mesh, with the best attention (Fig. 7)."""
    found = {}
    past = tokens if phase == "decode" else 0
    step = Step(phase=phase, rows=rows, new_tokens=tokens - past or 1, past=past)
    for name, named in FEED_FORWARD.items():
        if named.cut.width != Cut().width:
            continue
        used = named.cut.used_axes
        cuts = [
            Cut(gathered=named.cut.gathered, batch=used[first:]) for first in range(len(used) + 1)
        ]
        every = [priced(Cost(config, mesh, cut, step, setting)) for cut in cuts]
        best = min((own for own in every if own), key=lambda own: own.seconds, default=None)
        if best is not None:
            found[name] = best
    return found


def by_context(
    config: ModelConfig, mesh: Mesh, rows: int, contexts: Iterable[int], setting: Setting
) -> dict[str, list[tuple[int, float]]]:
    """Seconds to decode one token by attention and tokens of context (Fig. 8)."""
    kinds = {"by heads": Cut(), "by rows": Cut(batch=Cut().used_axes)}
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in kinds}
    for context in contexts:
        step = Step(phase="decode", rows=rows, new_tokens=1, past=context)
        for name, cut in kinds.items():
            own = priced(Cost(config, mesh, cut, step, setting))
            if own is not None:
                curves[name].append((context, own.seconds))
    return curves


def moved_bytes(
    sizes: Sizes, mesh: Mesh, tokens: float, activation_bytes: float, weight_bytes: float
) -> dict[str, float]:
    """Bytes that a chip sends for a feed-forward layer, by layout (Fig. 3)."""
    own = {**sizes, "B": tokens, "L": 1}
    found = {}
    for name, named in FEED_FORWARD.items():
        form = named.form(own, mesh)
        found[name] = form.activations * activation_bytes + form.weights * weight_bytes
    return found


def crossovers(
    sizes: Sizes, mesh: Mesh, activation_bytes: float, weight_bytes: float
) -> Mapping[str, float]:
    """From how many tokens on each layout that is ever best moves least; the first from 0 on."""
    forms = {
        name: (
            named.form({**sizes, "B": 1, "L": 1}, mesh).activations * activation_bytes,
            named.form({**sizes, "B": 1, "L": 1}, mesh).weights * weight_bytes,
        )
        for name, named in FEED_FORWARD.items()
    }
    best = min(forms, key=lambda name: (forms[name][1], forms[name][0]))
    starts, tokens = {best: 0.0}, 0.0
    while True:
        slope, fixed = forms[best]
        later = {
            name: (own[1] - fixed) / (slope - own[0])
            for name, own in forms.items()
            if own[0] < slope
        }
        if not later:
            return starts
        best = min(later, key=lambda name: (later[name], forms[name][0]))
        tokens = max(tokens, later[best])
        starts[best] = tokens


def _batches() -> list[str]:
    axes = Cut().used_axes
    return [axes[first:] for first in range(len(axes) + 1)]
