"""The rows of all measures, made in a process of its own: tokenising takes memory that the command
would keep while runs are measured.

Knows which flags are whose.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.eval import exact_match, last_word, perplexity
from freight.entrypoints.eval.rows import Rows, spool_rows
from freight.entrypoints.model_source import limits_of
from freight.jobs.formats import RowLimits
from freight.model.config import read_config
from freight.runtime.request import SamplingParams
from freight.runtime.tokenizer import Tokenizer

__all__ = ["prepare_rows"]

_SCORING: Final[Mapping[str, Any]] = {"max_tokens": 0, "prompt_logprobs": 0}
Described = tuple[Rows, Mapping[str, Any], Mapping[str, Any]]


def prepare_rows(job: Mapping[str, Any]) -> dict[str, Any]:
    """Spool the rows of each measure. Of each: its spool and number of rows, how their tokens are
    chosen (``sampling``), and what else its figures depend on (``about``)."""
    model_dir = Path(job["model"])
    config, tokenizer = read_config(model_dir), Tokenizer(model_dir)
    limits = limits_of(config)
    prepared = {}
    for measure, source in job["sources"].items():
        rows, sampling, about = _describe(measure, Path(source), job["flags"], tokenizer, limits)
        spool = Path(job["directory"], measure)
        spool.mkdir()
        num_rows = spool_rows(
            rows, spool, tokenizer=tokenizer, limits=limits, defaults=SamplingParams(**sampling)
        )
        prepared[measure] = {
            "spool": str(spool),
            "num_rows": num_rows,
            "sampling": sampling,
            "about": about,
        }
    return prepared


def _describe(
    measure: str,
    source: Path,
    flags: Mapping[str, Any],
    tokenizer: Tokenizer,
    limits: RowLimits,
) -> Described:
    if measure == "perplexity":
        context, stride = flags["context"], flags["stride"]
        windows = perplexity.choose_windows(context, stride, tokenizer, limits.max_positions)
        about = {"context": windows.context, "stride": windows.stride}
        return perplexity.make_rows(source, tokenizer, windows), _SCORING, about
    if measure == "last_word":
        return last_word.make_rows(source, tokenizer), _SCORING, {}
    sampling = {"max_tokens": flags["max_tokens"], "stop": flags["stop"]}
    return exact_match.make_rows(source, flags["answer_key"]), sampling, sampling
