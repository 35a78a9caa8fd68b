"""Throughput against latency: the best plans under ever looser bounds, as curves and as a picture.

One curve has all techniques, the others do without one each. Draws with matplotlib, which is needed
for nothing else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from freight.errors import InputError
from freight.plan.search import Choice, Search
from freight.plan.techniques import ALL, ROW_BY_ROW, searches_without

__all__ = ["draw", "frontiers", "require_plots"]

_POINTS: Final = 10


def require_plots() -> None:
    """InputError where matplotlib is not installed: said before anything is reckoned."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--frontier was given.",
            "Drawing needs matplotlib, which is not installed.",
            "Install it with pip install 'freight[plot]', or leave --frontier out.",
        )


def frontiers(search: Search) -> dict[str, list[Choice]]:
    """By technique that is left out, plans from short blocks to high throughput."""
    curves = {ALL: search.frontier(_POINTS)}
    for name, own in searches_without(search):
        curves[name] = own.frontier(_POINTS)
    return {name: _rising(choices) for name, choices in curves.items()}


def draw(curves: Mapping[str, Sequence[Choice]], path: Path, title: str, rate: str) -> None:
    """The curves in a PNG file, both axes logarithmic; ``rate`` is what throughput counts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name, choices in curves.items():
        if not choices:
            continue
        axes.plot(
            [choice.forecast.block_s for choice in choices],
            [choice.forecast.tokens_per_s for choice in choices],
            marker="o",
            markersize=4,
            linewidth=2.2 if name == ALL else 1.2,
            label=name if name in (ALL, ROW_BY_ROW) else f"without {name}",
        )
    axes.set(xscale="log", yscale="log", title=title)
    axes.set_xlabel("latency: seconds from a block's prompts to its last token")
    axes.set_ylabel(rate)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise InputError(
            f"--frontier {path} was given.",
            f"It cannot be written: {error.strerror}.",
            "Name a file in a directory that can be written.",
        ) from error
    finally:
        pyplot.close(figure)


def _rising(choices: Sequence[Choice]) -> list[Choice]:
    """Those faster than all with shorter blocks: what is priced can differ from what was
    promised."""
    kept: list[Choice] = []
    for choice in choices:
        if not kept or choice.forecast.tokens_per_s > kept[-1].forecast.tokens_per_s:
            kept.append(choice)
    return kept
