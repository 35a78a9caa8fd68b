"""``freight eval``: every setting on the same rows, then one table.

Everything that can be refused is refused before anything runs. Rows are read and tokenised here,
once; each measure of each setting is taken by a process of its own, for memory is taken once per
process and budgets count all of it. This process holds no model and imports no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.bench.children import ended_by_sigterm, run_child
from freight.entrypoints.eval import exact_match, last_word, perplexity
from freight.entrypoints.eval.own_run import options_of
from freight.entrypoints.eval.report import SettingResult, format_scores, format_table, notes
from freight.entrypoints.eval.rows import Rows, spool_rows
from freight.entrypoints.eval.settings import parse_settings
from freight.entrypoints.model_source import find_model
from freight.entrypoints.version import freight_version
from freight.errors import FreightError, InputError
from freight.jobs.durable import write_atomically
from freight.jobs.formats import RowLimits
from freight.jobs.paths import check_paths
from freight.model.config import read_config
from freight.runtime.request import SamplingParams
from freight.runtime.tokenizer import Tokenizer

__all__ = ["evaluate_model"]

_FLAGS: Final[Mapping[str, str]] = {
    "perplexity": "--perplexity",
    "last_word": "--last-word",
    "exact_match": "--exact-match",
}
_SCORING: Final[Mapping[str, Any]] = {"max_tokens": 0, "prompt_logprobs": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """One measure with its rows: how tokens are chosen, and where the spool lies."""

    measure: str
    source: Path
    sampling: Mapping[str, Any]
    spool: Path
    num_rows: int
    about: Mapping[str, Any]


def evaluate_model(arguments: argparse.Namespace) -> int:
    """Run the evaluation that the flags describe; returns the exit status."""
    settings = parse_settings(arguments.setting)
    for setting in settings:
        options_of(vars(arguments), setting.fields)  # refuses values that there are not
    sources = _find_sources(arguments)
    sink = None if arguments.json is None else Path(arguments.json)
    for source in sources.values():
        check_paths(source, 1 if sink is None else sink)
    model_dir = find_model(arguments.model)
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="freight-eval-") as directory:
        tasks = _prepare(arguments, sources, model_dir, Path(directory))
        evaluation = _Evaluation(arguments=arguments, model_dir=model_dir, tasks=tasks, sink=sink)
        for setting in settings:
            evaluation.run(SettingResult(setting=setting))
    return evaluation.finish()


def _find_sources(arguments: argparse.Namespace) -> dict[str, Path]:
    given = {measure: getattr(arguments, measure) for measure in _FLAGS}
    sources = {measure: Path(name) for measure, name in given.items() if name is not None}
    if not sources:
        raise InputError(
            "There is nothing to evaluate.",
            "No data was given.",
            f"Pass at least one of {', '.join(_FLAGS.values())}, each with a file.",
        )
    return sources


def _prepare(
    arguments: argparse.Namespace, sources: Mapping[str, Path], model_dir: Path, directory: Path
) -> list[_Task]:
    config = read_config(model_dir)
    tokenizer = Tokenizer(model_dir)
    limits = RowLimits(max_positions=config.max_positions, vocab_size=config.vocab_size)
    tasks = []
    for measure, source in sources.items():
        rows, sampling, about = _describe(measure, source, arguments, tokenizer, limits)
        spool = directory / measure
        spool.mkdir()
        num_rows = spool_rows(
            rows, spool, tokenizer=tokenizer, limits=limits, defaults=SamplingParams(**sampling)
        )
        task = _Task(
            measure=measure,
            source=source,
            sampling=sampling,
            spool=spool,
            num_rows=num_rows,
            about=about,
        )
        tasks.append(task)
    return tasks


def _describe(
    measure: str,
    source: Path,
    arguments: argparse.Namespace,
    tokenizer: Tokenizer,
    limits: RowLimits,
) -> tuple[Rows, Mapping[str, Any], dict[str, Any]]:
    """A measure's rows, how their tokens are chosen, and what else its figures depend on."""
    if measure == "perplexity":
        context = perplexity.choose_context(arguments.context, limits.max_positions)
        windows = perplexity.make_windows(source, tokenizer, context, arguments.stride)
        return windows, _SCORING, {"context": context, "stride": arguments.stride}
    if measure == "last_word":
        return last_word.make_rows(source, tokenizer), _SCORING, {}
    sampling = {"max_tokens": arguments.max_tokens, "stop": arguments.stop}
    return exact_match.make_rows(source, arguments.answer_key), sampling, dict(sampling)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluation:
    """The measured part, a setting after the other."""

    arguments: argparse.Namespace
    model_dir: Path
    tasks: Sequence[_Task]
    sink: Path | None
    results: list[SettingResult] = field(default_factory=list)

    def run(self, result: SettingResult) -> None:
        """Take all measures of a setting. What fails is a result, and loses no other."""
        self.results.append(result)
        for task in self.tasks:
            name = task.measure.replace("_", " ")
            self._say(f"{result.setting.name}: {name}, {task.num_rows} rows")
            reason = self._take(task, result)
            if reason is None:
                said = format_scores(task.measure, result.runs[task.measure]["scores"])
            else:
                result.failures[task.measure] = said = reason
            self._say(f"{result.setting.name}: {said}")
            self._write()

    def _take(self, task: _Task, result: SettingResult) -> str | None:
        """Take one measure; why there is none, if there is none."""
        job = {
            "task": "evaluate",
            "model": str(self.model_dir),
            "flags": vars(self.arguments),
            "setting": result.setting.fields,
            "measure": task.measure,
            "sampling": task.sampling,
            "spool": str(task.spool),
        }
        try:
            outcome = run_child(job)
        except FreightError as error:
            return str(error)
        if outcome.result is None:
            return f"Its process was {outcome.reason}."
        result.runs[task.measure] = outcome.result
        return None

    def finish(self) -> int:
        """Print the table; the exit status, 1 where something failed."""
        lines = format_table(self.results, [task.measure for task in self.tasks])
        print("\n".join([*lines, *notes(self.results)]))
        return int(any(result.failures for result in self.results))

    def _write(self) -> None:
        """What is known so far: a later setting may take hours."""
        if self.sink is not None:
            write_atomically(self.sink, json.dumps(self._record(), indent=1).encode() + b"\n")

    def _record(self) -> dict[str, Any]:
        return {
            "version": freight_version(),
            "model": self.arguments.model,
            "data": {
                task.measure: {"file": str(task.source), "rows": task.num_rows, **task.about}
                for task in self.tasks
            },
            "settings": [result.record() for result in self.results],
        }

    def _say(self, text: str) -> None:
        if not self.arguments.quiet:
            print(f"freight: {text}", file=sys.stderr, flush=True)
