"""Curves as PNG files. Draws with matplotlib, which is needed for nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from freight.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Formatter

__all__ = ["Chart", "Curves", "draw"]

Curves = dict[str, list[tuple[float, float]]]

_WIDE: Final = 2.0
"""Decades from which on only powers of ten are written at an axis."""
_FEW: Final = 7
"""Different values of x that are all written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The name of a file and what is written on it; x is logarithmic, y if ``log_y``, or from 0.

    Units are "s" and "B", written with their prefixes, "share", written in percent, and "" for
    plain numbers. ``marks`` stand at the points of each curve, ``notes`` behind its name.
    """

    name: str
    title: str
    x: str
    y: str
    x_unit: str = ""
    y_unit: str = ""
    log_y: bool = True
    marks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def draw(path: Path, chart: Chart, curves: Mapping[str, list[tuple[float, float]]]) -> None:
    """The curves that have points, in a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name, points in curves.items():
        if points:
            _draw_curve(axes, chart, name, points)
    axes.set(xscale="log", yscale="log" if chart.log_y else "linear")
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.grid(visible=True, which="both", alpha=0.25)
    xs = sorted({x for points in curves.values() for x, _ in points})
    _write_axis(axes.xaxis, chart.x_unit, axes.get_xlim(), xs if len(xs) <= _FEW else [])
    if chart.log_y:
        _write_axis(axes.yaxis, chart.y_unit, axes.get_ylim(), [])
    else:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(_formatter(chart.y_unit))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise InputError(
            f"--sweep {path.parent} was given.",
            f"{path.name} cannot be written: {error.strerror}.",
            "Name a directory that can be written.",
        ) from error
    finally:
        pyplot.close(figure)


def _draw_curve(axes: Axes, chart: Chart, name: str, points: list[tuple[float, float]]) -> None:
    xs, ys = zip(*points, strict=True)
    behind = name == "frontier"
    axes.plot(
        xs,
        ys,
        marker="" if behind else "o",
        markersize=4,
        label=f"{name}{chart.notes.get(name, '')}",
        linewidth=7.0 if behind else 1.4,
        color="0.8" if behind else None,
        zorder=1 if behind else 2,
    )
    for x, y, mark in zip(xs, ys, chart.marks.get(name, ()), strict=False):
        axes.annotate(mark, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=7)


def _write_axis(
    axis: Axis, unit: str, limits: tuple[float, float], values: Sequence[float]
) -> None:
    """Numbers that can be read at a logarithmic axis, however short it is: those of the points
    where they are few."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

    decades = math.log10(limits[1] / limits[0])
    if values:
        axis.set_major_locator(FixedLocator([*values]))
    elif decades < _WIDE:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades > 1 else (1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(_formatter(unit))
    axis.set_minor_formatter(NullFormatter())


def _formatter(unit: str) -> Formatter:
    from matplotlib.ticker import EngFormatter, FuncFormatter, PercentFormatter

    if unit == "share":
        return PercentFormatter(1.0, decimals=0)
    if unit:
        return EngFormatter(unit)
    return FuncFormatter(lambda value, _: f"{value:,.10g}")
