"""What an evaluation says: one table, the reasons of what failed, and the same as one object.

Knows results as the runs gave them; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from freight.entrypoints.eval.settings import Setting
from freight.quantities import format_bytes

__all__ = ["SettingResult", "compare", "describe_data", "format_scores", "format_table", "notes"]

Column = tuple[str, Callable[[Mapping[str, float]], str]]

_RATIO: Final[Column] = ("ratio", lambda s: f"{s['ratio']:.4f}" if "ratio" in s else "-")
"""Of perplexities: to that of the exact setting, where it was run."""
_SCORES: Final[Mapping[str, tuple[Column, ...]]] = {
    "perplexity": (("perplexity", lambda s: f"{s['perplexity']:.4f}"), _RATIO),
    "last_word": (
        ("last word", lambda s: f"{100 * s['accuracy']:.2f} %"),
        ("its perplexity", lambda s: f"{s['perplexity']:.4f}"),
        _RATIO,
    ),
    "exact_match": (("exact match", lambda s: f"{100 * s['accuracy']:.2f} %"),),
}
_COSTS: Final = ("weights", "saved", "KV/token", "saved", "token/s", "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingResult:
    """What is known of one setting so far: runs by measure, and why others have none."""

    setting: Setting
    runs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Everything, as one object."""
        return {"setting": self.setting.name, **self.costs(), **self.runs} | (
            {"failures": self.failures} if self.failures else {}
        )

    def costs(self) -> dict[str, float]:
        """Bytes held, shares of an exact run's that are saved, tokens per second of all runs, and
        their time without planning and loading; empty where no run came to an end."""
        if not self.runs:
            return {}
        # Any of the runs: what a weight or a token takes does not depend on the rows.
        held = next(iter(self.runs.values()))
        exact = held["exact_kv_bytes_per_token"]  # none where all layers keep states instead
        seconds = sum(run["seconds"] for run in self.runs.values())
        tokens = sum(run["tokens"] for run in self.runs.values())
        return {
            "weight_bytes": held["weight_bytes"],
            "weights_saved": 1 - held["weight_bytes"] / held["exact_weight_bytes"],
            "kv_bytes_per_token": held["kv_bytes_per_token"],
            "kv_saved": 1 - held["kv_bytes_per_token"] / exact if exact else 0.0,
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
        }


def compare(results: Sequence[SettingResult]) -> None:
    """Tell each perplexity its ratio to the exact one, as soon as that is known."""
    exact = next((result.runs for result in results if not result.setting.fields), {})
    for result in results:
        for measure, run in result.runs.items():
            scores, of = run["scores"], exact.get(measure)
            if of is not None and "perplexity" in scores:
                scores["ratio"] = scores["perplexity"] / of["scores"]["perplexity"]


def describe_data(
    sources: Mapping[str, str], prepared: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What each measure was taken on."""
    lines = []
    for measure, rows in prepared.items():
        about = rows["about"]
        what = f"{rows['num_rows']} rows"
        if measure == "perplexity":
            what = (
                f"{rows['num_rows']} windows of {about['context']} tokens, {about['stride']} from "
                "one to the next, each token scored once"
            )
        lines.append(f"{measure.replace('_', ' ') + ':':<13}{sources[measure]}, {what}")
    return lines


def format_scores(measure: str, scores: Mapping[str, float]) -> str:
    """The scores of one run, in a few words."""
    told = {name: write(scores) for name, write in _SCORES[measure]}
    return ", ".join(f"{name} {text}" for name, text in told.items() if text != "-")


def format_table(results: Sequence[SettingResult], measures: Sequence[str]) -> list[str]:
    """A line of names and one for each setting."""
    names = [name for measure in measures for name, _ in _SCORES[measure]]
    rows = [["setting", *names, *_COSTS]]
    rows += [[result.setting.name, *_cells(result, measures)] for result in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _cells(result: SettingResult, measures: Sequence[str]) -> list[str]:
    cells = []
    for measure in measures:
        run = result.runs.get(measure)
        for _, write in _SCORES[measure]:
            cells.append("failed" if run is None else write(run["scores"]))
    costs = result.costs()
    if not costs:
        return cells + ["-"] * len(_COSTS)
    return [
        *cells,
        format_bytes(costs["weight_bytes"]),
        _share(costs["weights_saved"]),
        format_bytes(costs["kv_bytes_per_token"]),
        _share(costs["kv_saved"]),
        f"{costs['tokens_per_s']:.1f}",
        f"{costs['seconds']:.1f}",
    ]


def _share(saved: float) -> str:
    return f"{100 * saved:.1f} %"


def notes(results: Sequence[SettingResult]) -> list[str]:
    """What the table cannot say."""
    lines = []
    if any(result.setting.fields.get("weight_bits") == 3 for result in results):
        lines.append(
            "weights=3 is a negative control: its codes are stored in 4 bits and save nothing more."
        )
    sparse = [r for r in results if r.setting.fields.get("sparse_attention", 1) < 1]
    if any({"perplexity", "last_word"} & set(result.runs) for result in sparse):
        lines.append(
            "sparse attention is of tokens that are generated: text that is scored in one pass is "
            "attended whole."
        )
    for result in results:
        asked = result.setting.fields.get("compute")
        if asked and any(run["compute"] != asked for run in result.runs.values()):
            lines.append(
                f"{result.setting.name}: this CPU is not faster with 8-bit integers, so products "
                "were those of an exact run."
            )
        for measure, reason in result.failures.items():
            lines.append(f"{result.setting.name}, {measure.replace('_', ' ')}: {reason}")
    return lines
