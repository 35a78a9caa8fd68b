"""``freight partition plan --sweep``: what the published figures show, for any model and chips.

Reckons with ``partition.frontier`` and hands curves to ``charts``; a curve is a list of (x, y).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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

__all__ = ["describe_sweep", "sweep"]

_BATCHES: Final = (1, 4, 16, 64, 256, 1024)
_ROWS_OF_CONTEXTS: Final = (128, 512)
_SHAPES: Final = ((20, 8), (60, 20), (128, 8))
_KV_SHARE: Final = 0.3


def sweep(arguments: argparse.Namespace, config: ModelConfig, setting: Setting) -> dict[str, Any]:
    """Write charts into the directory that was named; returns their numbers, [x, y] by chart and
    curve, and the ``rows`` of the points where they have batches of different sizes."""
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
    rows: dict[str, dict[str, list[int]]] = {}
    numbers: dict[str, Any] = {"mesh": dict(box.axes), "rows": rows}
    for chart, curves in (
        *_frontiers(config, chips, context, setting),
        *_crossovers(config, box, setting),
        _stationary(config, chips, context, setting),
        _prefill(config, box, context, setting),
        _contexts(config, box, setting),
        _single(config, chips, setting),
        _shapes(config, chips, setting),
    ):
        title = f"{chart.title}\n{_asked(arguments, setting)}"
        draw(folder / f"{chart.name}.png", replace(chart, title=title), curves)
        numbers[chart.name] = curves
        if chart.marks:
            rows[chart.name] = {
                name: [int(own) for own in marks] for name, marks in chart.marks.items()
            }
    numbers["max_context"] = _max_contexts(config, box, setting)
    own = {key: getattr(setting, f"{key}_bytes") for key in ("activation", "weight")}
    if config.experts is None:
        sizes = layer_sizes(config, rows=1, new_tokens=1)
        numbers["crossover_tokens"] = dict(crossovers(sizes, box, own["activation"], own["weight"]))
    return numbers


def _asked(arguments: argparse.Namespace, setting: Setting) -> str:
    """What a chart is of, for whoever finds it later."""
    return (
        f"{arguments.model}, weights in {arguments.weight_bits} bits, keys and values in "
        f"{arguments.kv_bits}; {setting.chip.name}"
    )


def describe_sweep(numbers: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """What charts do not say at a glance, and where they are."""
    box = " ".join(f"{axis}={size}" for axis, size in numbers["mesh"].items())
    yield ""
    layouts = ", ".join(
        f"{name} from {tokens:,.0f}" if tokens else name
        for name, tokens in numbers.get("crossover_tokens", {}).items()
    )
    if layouts:
        yield f"crossing by tokens in a batch on {box}, an MLP moves least as {layouts}"
    for name, found in numbers["max_context"].items():
        contexts = " or ".join(f"{own:,} tokens for {rows}" for rows, own in found.items())
        yield f"context  {name}: {contexts}, with {_KV_SHARE:.0%} of memory for keys and values"
    charts = sorted(path.name for path in folder.glob("*.png"))
    yield f"charts   in {folder}: {', '.join(charts)}"


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
        ("decode", "time of a step, one token of each row"),
        ("prefill", "time of a batch of prompts"),
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
        marks = {
            f"{number} chips": [str(own.cost.step.rows) for own in found]
            for number, found in by_chips.items()
        }
        after = f"{context} tokens of {'context' if phase == 'decode' else 'each prompt'}"
        about = f"{after}; numbers at points are rows"
        yield (
            Chart(
                name=f"frontier-{phase}",
                title=f"{phase}: cost and latency, {about}",
                x=what,
                y="chip-seconds per token",
                x_unit="s",
                marks=marks,
            ),
            curves,
        )
        mfu = {
            f"{number} chips": [(own.seconds, own.mfu) for own in found]
            for number, found in by_chips.items()
        }
        yield (
            Chart(
                name=f"mfu-{phase}",
                title=f"{phase}: MFU and latency, {about}",
                x=what,
                y="MFU",
                x_unit="s",
                y_unit="share",
                log_y=False,
                marks=marks,
            ),
            mfu,
        )


def _latency_and_cost(found: Sequence[Point]) -> list[tuple[float, float]]:
    return [(own.seconds, own.chip_seconds) for own in found]


def _crossovers(config: ModelConfig, box: Mesh, setting: Setting) -> Iterator[tuple[Chart, Curves]]:
    """Fig. 3; none for experts, which no closed form knows."""
    if config.experts is not None:
        return
    sizes = layer_sizes(config, rows=1, new_tokens=1)
    curves: Curves = {}
    for power in range(6, 24):
        tokens = 2.0**power
        sent = moved_bytes(sizes, box, tokens, setting.activation_bytes, setting.weight_bytes)
        for name, num_bytes in sent.items():
            curves.setdefault(name, []).append((tokens, num_bytes))
    chart = Chart(
        name="crossovers",
        title=f"what feed-forward layouts move on {box}",
        x="tokens in a batch",
        y="sent by each chip, per layer",
        y_unit="B",
    )
    yield chart, curves


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
    chart = Chart(
        name="stationary",
        title=f"decoding 512 rows after {context} tokens with stationary weights",
        x="chips",
        y="time per token",
        y_unit="s",
        log_y=False,
    )
    return chart, curves


def _prefill(
    config: ModelConfig, box: Mesh, context: int, setting: Setting
) -> tuple[Chart, Curves]:
    """Fig. 7."""
    curves: Curves = {}
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        for name, own in by_shape(config, box, "prefill", rows, context, setting).items():
            curves.setdefault(name, []).append((rows * context, own.mfu))
    chart = Chart(
        name="prefill-mfu",
        title=f"prefill of prompts of {context} tokens on {box}",
        x="tokens in a batch",
        y="MFU",
        y_unit="share",
        log_y=False,
    )
    return chart, curves


def _contexts(config: ModelConfig, box: Mesh, setting: Setting) -> tuple[Chart, Curves]:
    """Fig. 8."""
    contexts = [2**power for power in range(7, 18)]
    found = by_context(config, box, 256, contexts, setting)
    curves: Curves = {f"attention {name}": [*own] for name, own in found.items()}
    notes = {
        name: f" ({contexts[len(own)]:,} tokens do not fit)"
        for name, own in curves.items()
        if len(own) < len(contexts)
    }
    chart = Chart(
        name="contexts",
        title=f"decoding 256 rows on {box}",
        x="tokens of context",
        y="time per token",
        y_unit="s",
        log_y=False,
        notes=notes,
    )
    return chart, curves


def _single(config: ModelConfig, chips: int, setting: Setting) -> tuple[Chart, Curves]:
    """Fig. B.1."""
    curves: Curves = {}
    steps = [Step(phase="prefill", rows=1, new_tokens=2**power) for power in range(5, 11)]
    for number in _numbers_of_chips(chips):
        curves[f"{number} chips"] = [
            (own.cost.step.new_tokens, own.seconds)
            for own in points(config, [number], steps, setting)
        ]
    chart = Chart(
        name="one-prompt",
        title="prefill of one prompt",
        x="tokens of the prompt",
        y="time",
        y_unit="s",
    )
    return chart, curves


def _shapes(config: ModelConfig, chips: int, setting: Setting) -> tuple[Chart, Curves]:
    """Fig. 9 and appendix D: prompts and answers together, from small batches to large ones."""
    curves: Curves = {}
    marks: dict[str, list[str]] = {}
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
            marks.setdefault(f"{prompt}:{new}", []).append(str(rows))
    chart = Chart(
        name="shapes",
        title=f"prompt and new tokens, on {chips} chips; numbers at points are rows",
        x="time of a batch, prompts and answers",
        y="MFU",
        x_unit="s",
        y_unit="share",
        log_y=False,
        marks=marks,
    )
    return chart, curves


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
