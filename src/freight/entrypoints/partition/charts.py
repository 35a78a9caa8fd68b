"""Curves as PNG files. Draws with matplotlib, which is needed for nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freight.errors import InputError

__all__ = ["Chart", "Curves", "draw"]

Curves = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Chart:
    """The name of a file and what is written on it; x is logarithmic."""

    name: str
    title: str
    x: str
    y: str
    log_y: bool = True


def draw(path: Path, chart: Chart, curves: Mapping[str, list[tuple[float, float]]]) -> None:
    """The curves that have points, in a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name, points in curves.items():
        if points:
            xs, ys = zip(*points, strict=True)
            width, alpha = (3.0, 0.4) if name == "frontier" else (1.4, 1.0)
            axes.plot(xs, ys, marker="o", markersize=4, label=name, linewidth=width, alpha=alpha)
    axes.set(xscale="log", yscale="log" if chart.log_y else "linear", title=chart.title)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.grid(visible=True, which="both", alpha=0.25)
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
