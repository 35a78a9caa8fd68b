"""How often the steps of a unit pass over their values, where it is that which takes time.

Knows steps and how wide their values are, no machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from freight.model.kept_steps import AttendChosen, AttendKept, ProjectGroups
from freight.model.latent_steps import AbsorbKeys, ExpandValues, JoinLatent, SplitLatent
from freight.model.programme import (
    Activate,
    Add,
    AddPositions,
    Attend,
    Cap,
    Clear,
    Clip,
    Combine,
    Dispatch,
    Embed,
    Gate,
    Grow,
    GrowHeads,
    Level,
    Multiply,
    MultiplyColumns,
    Norm,
    Project,
    Rotate,
    Scale,
    ScaleBy,
    Split,
    Step,
    Unit,
    Weigh,
    Xielu,
)
from freight.model.recurrent_steps import Convolve, Deal, DeltaRule, Scan
from freight.model.slope_steps import Narrow, Widen
from freight.model.stream_steps import Average, Collapse, Expand, Spread

__all__ = ["bytes_passed"]

_PASSES: Final[Mapping[type, float]] = {
    **dict.fromkeys((Rotate, Level), 7.0),
    **dict.fromkeys((Split, Scale, ScaleBy, Grow, GrowHeads, Clip, Weigh, Dispatch), 2.0),
    **dict.fromkeys((Multiply, MultiplyColumns), 3.0),
    Gate: 10.0,
    Add: 2.2,
    Cap: 6.0,
    Clear: 1.0,
    Xielu: 20.0,
    AddPositions: 5.0,
    **dict.fromkeys((SplitLatent, JoinLatent, AbsorbKeys, ExpandValues), 4.0),
    Combine: 4.0,
    Embed: 4.0,
    Deal: 2.0,
    Convolve: 2.0,
    **dict.fromkeys((Widen, Narrow), 2.5),
    Spread: 5.0,
    Average: 5.0,
    Collapse: 20.0,
    Expand: 7.0,
}
_PASSES_OF_NORM: Final[Mapping[str, float]] = {
    **dict.fromkeys(("rms", "rms_plus_one"), 7.0),
    **dict.fromkeys(("layer", "layer_plus_one", "layer_bare"), 10.5),
}
_PLAIN_NORM: Final = _PASSES_OF_NORM["rms"]
_PASSES_OF_FUNCTION: Final[Mapping[str, float]] = {
    "silu": 4.5,
    "relu": 2.0,
    "relu2": 4.0,
    "gelu": 3.5,
    "gelu_tanh": 2.5,
}
"""How often a step passes over its value, in the compute dtype's size: its time on two cores over
that of reading or writing the value once. A product of two values reads two and writes one."""


def bytes_passed(
    unit: Unit, size: int, measured: Mapping[str, float], *, gates_apart: bool
) -> Iterator[float]:
    """Bytes per token that each step but products and attention passes over; how often some do is
    ``measured``, as a machine's unit has it. ``gates_apart``: products here take no gates in."""
    columns: dict[str, int] = {}
    for number, step in enumerate(unit.steps):
        before = unit.steps[number - 1] if number else None
        _note_columns(step, columns, unit)
        name = step.out if isinstance(step, Embed | Dispatch) else getattr(step, "x", "")
        own = _passes(step, measured)
        if "silu" in measured and isinstance(before, Activate) and _gates(before, step):
            is_taken_in = not gates_apart and _is_made(unit.steps[: number - 1], step)
            own = measured["gate" if is_taken_in else "silu"] - _passes(before, measured)  # of both
        yield own * columns.get(name, 0) * size


def _gates(activation: Activate, step: Step) -> bool:
    """Whether the step right behind multiplies what the activation makes."""
    is_by_it = isinstance(step, Multiply) and activation.x == step.x
    return is_by_it and activation.function == "silu"


def _is_made(before: Sequence[Step], gated: Step) -> bool:
    """Whether the steps before end with the products of one value that make both of what a step
    multiplies."""
    first, second = before[-2:] if len(before) > 1 else (None, None)
    return (
        isinstance(first, Project)
        and isinstance(second, Project)
        and isinstance(gated, Multiply)
        and first.x == second.x
        and (first.out, second.out) == (gated.x, gated.y)
    )


def _passes(step: Step, measured: Mapping[str, float]) -> float:
    if isinstance(step, Norm):
        own = _PASSES_OF_NORM[step.kind]
        return own * measured.get("norm", _PLAIN_NORM) / _PLAIN_NORM
    if isinstance(step, Rotate) and "rotation" in measured:
        return measured["rotation"]
    if isinstance(step, Activate):
        return _PASSES_OF_FUNCTION[step.function]
    return _PASSES.get(type(step), 0.0)


def _note_columns(step: Step, columns: dict[str, int], unit: Unit) -> None:
    """How wide the values are that a step makes or is the first to use."""
    if isinstance(step, Norm):
        columns.setdefault(step.x, step.weight.num_columns * step.num_heads)
        columns[step.out] = columns[step.x]
    elif isinstance(step, Project):
        columns.setdefault(step.x, step.weight.num_columns)
        columns[step.out] = step.weight.num_rows
    elif isinstance(step, Embed | AddPositions):
        columns[step.out if isinstance(step, Embed) else step.x] = step.weight.num_columns
    elif isinstance(step, Split):
        columns[step.q] = step.num_heads * step.head_dim
        columns[step.k] = columns[step.v] = step.num_kv_heads * step.head_dim
    elif isinstance(step, AttendKept | AttendChosen):
        columns[step.out] = step.num_heads * step.width
    elif isinstance(step, ProjectGroups):
        columns[step.out] = step.weight.num_rows
    elif isinstance(step, Attend | DeltaRule | Scan):
        width = step.head_dim if isinstance(step, Attend) else step.value_width
        columns[step.out] = step.num_heads * width
    elif isinstance(step, Widen | Narrow):
        more = step.columns * step.num_heads
        if isinstance(step, Narrow) and step.x not in columns:  # in a half of attention's unit
            columns[step.x] = more + _wanted(unit, step.out)
        columns[step.out] = columns[step.x] + (more if isinstance(step, Widen) else -more)
    elif isinstance(step, ExpandValues):
        columns[step.x] = step.num_heads * (step.turned_width + step.weight.num_columns)
        columns[step.out] = step.num_heads * step.value_width
    elif isinstance(step, Weigh) and step.x not in columns:  # in such a half
        columns[step.x] = _wanted(unit, step.x)
    elif isinstance(step, Spread):
        columns[step.out] = columns.get(step.x, 0) * step.num_streams
    elif isinstance(step, Collapse):
        columns[step.x] = step.weight.num_columns // step.num_mappings
        columns[step.out] = columns[step.x] // step.num_streams
    elif isinstance(step, Deal):
        columns |= {part.out: part.num_columns for part in step.parts}
    elif isinstance(step, SplitLatent):
        columns |= {step.latent: step.latent_width, step.turned: step.turned_width}
    elif isinstance(step, Dispatch):
        columns[step.out] = columns.get(step.x, max(w.num_columns for w in unit.weights))


def _wanted(unit: Unit, name: str) -> int:
    """How wide a value is that a product of the unit takes."""
    return next(
        step.weight.num_columns
        for step in unit.steps
        if isinstance(step, Project) and step.x == name
    )
