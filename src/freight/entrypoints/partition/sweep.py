"""``freight partition plan --sweep``: what the published figures show, for any model and chips.

Reckons with ``partition.frontier`` and hands curves to ``charts``; a curve is a list of (x, y).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.frontier import require_plots
from freight.entrypoints.partition.charts import Chart, Curves, draw
from freight.entrypoints.partition.inputs import read_mesh
from freight.errors import FreightError, InputError
from freight.model.switches import ModelConfig
from freight.partition.cost import Cost, Setting, Step
from freight.partition.efficiency import Phase
from freight.partition.frontier import (
    Point,
    by_context,
    by_shape,
    crossovers,
    frontier,
    moved_bytes,
    points,
    stationary,
)
from freight.partition.layers import Cut, layer_sizes
from freight.partition.layout import Mesh
from freight.partition.planner import best_plan, meshes

__all__ = ["sweep"]

_BATCHES: Final = (1, 4, 16, 64, 256, 1024)
_ROWS_OF_CONTEXTS: Final = (128, 512)
_SHAPES: Final = ((20, 8), (60, 20), (128, 8))
_KV_SHARE: Final = 0.3


def sweep(arguments: argparse.Namespace, config: ModelConfig, setting: Setting) -> dict[str, Any]:
    """Write charts into the directory that was named; returns their numbers."""
    require_plots()
    folder = Path(arguments.sweep)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--sweep {folder} was given.",
            f"The directory cannot be made: {error.strerror}.",
            "Name one that can be written.",
        ) from error
    chips, context = arguments.chips, arguments.context
    box = read_mesh(arguments.mesh, chips) or _box(chips)
    numbers: dict[str, Any] = {"mesh": dict(box.axes)}
    for chart, curves in (
        *_frontiers(config, chips, context, setting),
        _crossovers(config, box, setting),
        _stationary(config, chips, context, setting),
        _prefill(config, box, context, setting),
        _contexts(config, box, setting),
        _single(config, chips, setting),
        _shapes(config, chips, setting),
    ):
        draw(folder / f"{chart.name}.png", chart, curves)
        numbers[chart.name] = curves
    numbers["max_context"] = _max_contexts(config, box, setting)
    own = {key: getattr(setting, f"{key}_bytes") for key in ("activation", "weight")}
    sizes = layer_sizes(config, rows=1, new_tokens=1)
    numbers["crossover_tokens"] = dict(crossovers(sizes, box, own["activation"], own["weight"]))
    return numbers


def _box(num_chips: int) -> Mesh:
    """The mesh that is nearest to a cube, for the charts that compare layouts on one."""
    return min(meshes(num_chips), key=lambda own: (max(n for _, n in own.axes), own.size("x")))


def _numbers_of_chips(chips: int) -> list[int]:
    return sorted({max(1, chips // 4), max(1, chips // 2), chips, 2 * chips, 4 * chips})


def _frontiers(
    config: ModelConfig, chips: int, context: int, setting: Setting
) -> Iterable[tuple[Chart, Curves]]:
    """Fig. 1 and C.1: one curve for each number of chips, and the frontier of all."""
    phases: tuple[tuple[Phase, str], ...] = (
        ("decode", "seconds per token"),
        ("prefill", "seconds per batch of prompts"),
    )
    for phase, what in phases:
        new, past = (1, context) if phase == "decode" else (context, 0)
        steps = [Step(phase=phase, rows=rows, new_tokens=new, past=past) for rows in _BATCHES]
        by_chips = {
            number: [*points(config, [number], steps, setting)]
            for number in _numbers_of_chips(chips)
        }
        every = [own for found in by_chips.values() for own in found]
        curves = {f"{number} chips": _latency_and_cost(found) for number, found in by_chips.items()}
        curves["frontier"] = _latency_and_cost(frontier(every))
        yield (
            Chart(f"frontier-{phase}", f"{phase}: cost and latency", what, "chip-s per token"),
            curves,
        )
        mfu = {
            f"{number} chips": [(own.seconds, own.mfu) for own in found]
            for number, found in by_chips.items()
        }
        yield Chart(f"mfu-{phase}", f"{phase}: MFU and latency", what, "MFU", log_y=False), mfu


def _latency_and_cost(found: Sequence[Point]) -> list[tuple[float, float]]:
    return [(own.seconds, own.chip_seconds) for own in found]


def _crossovers(config: ModelConfig, box: Mesh, setting: Setting) -> tuple[Chart, Curves]:
    """Fig. 3."""
    sizes = layer_sizes(config, rows=1, new_tokens=1)
    curves: Curves = {}
    for power in range(6, 24):
        tokens = 2.0**power
        sent = moved_bytes(sizes, box, tokens, setting.activation_bytes, setting.weight_bytes)
        for name, num_bytes in sent.items():
            curves.setdefault(name, []).append((tokens, num_bytes))
    title = f"feed-forward layouts on {box}"
    return Chart("crossovers", title, "tokens in a batch", "bytes sent per chip and layer"), curves


def _stationary(
    config: ModelConfig, chips: int, context: int, setting: Setting
) -> tuple[Chart, Curves]:
    """Fig. 6."""
    step = Step(phase="decode", rows=512, new_tokens=1, past=context)
    curves: Curves = {"1D weight-stationary": [], "2D weight-stationary": []}
    for number in _numbers_of_chips(chips):
        boxes = [*meshes(number)]
        for name, own in (
            ("1D weight-stationary", [box for box in boxes if box.size("x") == 1]),
            ("2D weight-stationary", [box for box in boxes if box.size("x") > 1]),
        ):
            best = stationary(config, own, step, setting)
            if best is not None:
                curves[name].append((number, best.seconds))
    title = "decoding 512 rows with stationary weights"
    return Chart("stationary", title, "chips", "seconds per token"), curves


def _prefill(
    config: ModelConfig, box: Mesh, context: int, setting: Setting
) -> tuple[Chart, Curves]:
    """Fig. 7."""
    curves: Curves = {}
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        for name, own in by_shape(config, box, "prefill", rows, context, setting).items():
            curves.setdefault(name, []).append((rows * context, own.mfu))
    title = f"prefill of prompts of {context} tokens on {box}"
    return Chart("prefill-mfu", title, "tokens in a batch", "MFU", log_y=False), curves


def _contexts(config: ModelConfig, box: Mesh, setting: Setting) -> tuple[Chart, Curves]:
    """Fig. 8."""
    contexts = [2**power for power in range(7, 18)]
    curves: Curves = {
        f"attention {name}": [*own]
        for name, own in by_context(config, box, 256, contexts, setting).items()
    }
    return Chart("contexts", f"decoding 256 rows on {box}", "context", "seconds per token"), curves


def _single(config: ModelConfig, chips: int, setting: Setting) -> tuple[Chart, Curves]:
    """Fig. B.1."""
    curves: Curves = {}
    steps = [Step(phase="prefill", rows=1, new_tokens=2**power) for power in range(5, 11)]
    for number in _numbers_of_chips(chips):
        curves[f"{number} chips"] = [
            (own.cost.step.new_tokens, own.seconds)
            for own in points(config, [number], steps, setting)
        ]
    return Chart("one-prompt", "prefill of one prompt", "tokens", "seconds"), curves


def _shapes(config: ModelConfig, chips: int, setting: Setting) -> tuple[Chart, Curves]:
    """Fig. 9 and appendix D: prompts and answers together, from small batches to large ones."""
    curves: Curves = {}
    for prompt, new in _SHAPES:
        curve = curves.setdefault(f"{prompt}:{new}", [])
        for rows in _BATCHES:
            steps = (
                (Step(phase="prefill", rows=rows, new_tokens=prompt), 1.0),
                (Step(phase="decode", rows=rows, new_tokens=1, past=prompt + new // 2), float(new)),
            )
            try:
                plans = best_plan(config, chips, steps, setting)
            except FreightError:
                continue
            seconds = plans[0].seconds + new * plans[1].seconds
            done = plans[0].mfu * plans[0].seconds + new * plans[1].mfu * plans[1].seconds
            curve.append((seconds, done / seconds))
    title = f"prompts and answers on {chips} chips"
    return Chart("shapes", title, "seconds of a batch", "MFU", log_y=False), curves


def _max_contexts(config: ModelConfig, box: Mesh, setting: Setting) -> dict[str, dict[str, int]]:
    """Table 1: tokens of context with 30 % of memory for keys and values."""
    found: dict[str, dict[str, int]] = {}
    for name, cut in (("by heads", Cut()), ("by rows", Cut(batch=Cut().used_axes))):
        for rows in _ROWS_OF_CONTEXTS:
            step = Step(phase="decode", rows=rows, new_tokens=1, past=1)
            try:
                own = Cost(config, box, cut, step, setting)
                longest = own.max_context(_KV_SHARE * setting.chip.memory_bytes)
            except FreightError:
                continue
            found.setdefault(f"attention {name}", {})[f"{rows} rows"] = longest
    return found
