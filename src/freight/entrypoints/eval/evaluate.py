"""``freight eval``: every setting on the same rows, then one table.

Everything that can be refused is refused before anything runs. Each measure of each setting is
taken by a process of its own, for memory is taken once per process and budgets count all of it;
another one makes the rows, once. This process holds no model and imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.bench.children import (
    Outcome,
    ended_by_sigterm,
    run_child,
    run_or_raise,
)
from freight.entrypoints.eval.options import options_of
from freight.entrypoints.eval.report import (
    SettingResult,
    compare,
    describe_data,
    format_scores,
    format_table,
    notes,
)
from freight.entrypoints.eval.settings import SETTINGS_OF_QUANTISED, parse_settings
from freight.entrypoints.model_source import find_model
from freight.entrypoints.version import freight_version
from freight.errors import FreightError, InputError
from freight.jobs.durable import write_atomically
from freight.jobs.paths import check_paths
from freight.model.checkpoint import resolve
from freight.model.compression import packed_formats
from freight.model.config import read_config
from freight.model.gguf_tensors import find_gguf
from freight.model.number_format import find_compressed
from freight.model.task import refuse_other

__all__ = ["evaluate_model"]

_FLAGS: Final[Mapping[str, str]] = {
    "perplexity": "--perplexity",
    "last_word": "--last-word",
    "exact_match": "--exact-match",
}


def evaluate_model(arguments: argparse.Namespace) -> int:
    """Run the evaluation that the flags describe; returns the exit status."""
    settings = parse_settings(arguments.setting)
    for setting in settings:
        options_of(vars(arguments), setting)  # refuses values that do not exist
    sources = _find_sources(arguments)
    sink = None if arguments.json is None else Path(arguments.json)
    if sink is not None:
        for source in sources.values():
            check_paths(source, sink)
    model = find_model(arguments.model, arguments.lora)
    if not arguments.setting and _is_quantised(model):
        settings = parse_settings(SETTINGS_OF_QUANTISED)
    job = {"model": str(model), "flags": vars(arguments)}
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="freight-eval-") as directory:
        named = {measure: str(path) for measure, path in sources.items()}
        wanted = {**job, "task": "evaluation rows", "sources": named, "directory": directory}
        prepared = run_or_raise(wanted, "The rows were to be read and tokenised.")
        evaluation = _Evaluation(job=job, sources=named, prepared=prepared, sink=sink)
        for setting in settings:
            evaluation.run(SettingResult(setting=setting))
    return evaluation.finish()


def _is_quantised(model_dir: Path) -> bool:
    """Whether the checkpoint has matrices in few bits, which are not made anew."""
    config = read_config(model_dir)
    asked = "A model was to be evaluated by the odds of its tokens."
    refuse_other(config.readout, "generate", asked, takes_task=False)
    if config.packing is None and find_gguf(model_dir) is None:
        return False
    sources = resolve(config, model_dir)
    return any(find_compressed(dtype) for dtype in packed_formats(sources).values())


def _find_sources(arguments: argparse.Namespace) -> dict[str, Path]:
    given = {measure: getattr(arguments, measure) for measure in _FLAGS}
    sources = {measure: Path(name) for measure, name in given.items() if name is not None}
    if not sources:
        raise InputError(
            "There is nothing to evaluate.",
            "No data was given.",
            f"Pass at least one of {', '.join(_FLAGS.values())}, each with a file.",
        )
    for measure, path in sources.items():
        _check_file(_FLAGS[measure], path)
    return sources


def _check_file(flag: str, path: Path) -> None:
    if not path.is_file():
        raise InputError(
            f"{flag} {path} was given.",
            "It is a directory." if path.is_dir() else "There is no such file.",
            "Check the path.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluation:
    """The measured part, a setting after the other. ``sources`` and ``prepared`` are by measure."""

    job: Mapping[str, Any]
    sources: Mapping[str, str]
    prepared: Mapping[str, Mapping[str, Any]]
    sink: Path | None
    results: list[SettingResult] = field(default_factory=list)

    def run(self, result: SettingResult) -> None:
        """Take all measures of a setting. What fails is a result, and loses no other."""
        self.results.append(result)
        for measure, rows in self.prepared.items():
            name = f"{result.setting.name}, {measure.replace('_', ' ')}"
            self._say(f"{name}: {rows['num_rows']} rows")
            reason = self._take(measure, result)
            compare(self.results)
            if reason is None:
                said = format_scores(measure, result.runs[measure]["scores"])
            else:
                result.failures[measure] = said = reason
            self._say(f"{name}: {said}")
            self._write()

    def _take(self, measure: str, result: SettingResult) -> str | None:
        """Take one measure; why there is none, if there is none."""
        job = {
            **self.job,
            "task": "evaluation",
            "setting": result.setting.name,
            "measure": measure,
            "sampling": self.prepared[measure]["sampling"],
            "spool": self.prepared[measure]["spool"],
            "dtype": self._dtype(),
        }
        try:
            outcome = self._run_child(job)
        except FreightError as error:
            return str(error)
        if outcome.result is None:
            return f"Its process was {outcome.reason}."
        result.runs[measure] = outcome.result
        return None

    def _run_child(self, job: Mapping[str, Any]) -> Outcome:
        """Run a job that may tell people how far it is."""
        if self.job["flags"]["quiet"]:
            return run_child({**job, "messages": None})
        descriptor = os.dup(sys.stderr.fileno())
        try:
            return run_child({**job, "messages": descriptor}, descriptors=(descriptor,))
        finally:
            os.close(descriptor)

    def _dtype(self) -> str | None:
        """What the first run chose, for all others: figures in two number formats do not compare,
        and the choice is made by trying."""
        return next((run["dtype"] for result in self.results for run in result.runs.values()), None)

    def finish(self) -> int:
        """Print the table; the exit status, 1 where something failed."""
        lines = describe_data(self.sources, self.prepared)
        lines += ["", *format_table(self.results, list(self.prepared)), *notes(self.results)]
        print("\n".join(lines))
        return int(any(result.failures for result in self.results))

    def _write(self) -> None:
        """What is known so far: a later setting may take hours."""
        if self.sink is not None:
            write_atomically(self.sink, json.dumps(self._record(), indent=1).encode() + b"\n")

    def _record(self) -> dict[str, Any]:
        return {
            "version": freight_version(),
            "model": self.job["flags"]["model"],
            "dtype": self._dtype(),
            "data": {
                measure: {"file": self.sources[measure], "rows": rows["num_rows"], **rows["about"]}
                for measure, rows in self.prepared.items()
            },
            "settings": [result.record() for result in self.results],
        }

    def _say(self, text: str) -> None:
        if not self.job["flags"]["quiet"]:
            print(f"freight: {text}", file=sys.stderr, flush=True)
