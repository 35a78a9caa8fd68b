"""One measure of one setting, in a process of its own: the rows through the engine, and the score.

The engine is made as ``freight run`` makes it, with the same budgets and the same planner. Knows no
other setting; what it saves is reckoned against what an exact run of the same model would hold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from freight.entrypoints.compress import compress_ahead
from freight.entrypoints.eval.exact_match import ExactMatchScore
from freight.entrypoints.eval.last_word import LastWordScore
from freight.entrypoints.eval.options import options_of
from freight.entrypoints.eval.perplexity import PerplexityScore
from freight.entrypoints.eval.settings import parse_settings
from freight.entrypoints.own_machine import nominal_s, own_machine
from freight.entrypoints.progress import Progress
from freight.jobs.spool import Spool
from freight.model.checkpoint import resolve
from freight.model.config import read_config
from freight.model.number_format import DTYPE_BYTES
from freight.model.sources import TensorSource
from freight.plan.layout import WeightLayout
from freight.plan.page_sizes import near_page_sizes
from freight.plan.parts import Part
from freight.runtime.failures import demand_numbers
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, SamplingParams

__all__ = ["Score", "run_measure"]


class Score(Protocol):
    """What a measure makes of completions, each with what it is held against."""

    def add(self, completion: Completion, target: Any) -> None: ...

    def result(self) -> dict[str, float]: ...


_SCORES: Final[Mapping[str, Callable[[], Score]]] = {
    "perplexity": PerplexityScore,
    "last_word": LastWordScore,
    "exact_match": ExactMatchScore,
}


def run_measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """The scores, the time it took, and what was held."""
    (setting,) = parse_settings([job["setting"]])
    options = options_of(job["flags"], setting)
    options = replace(options, dtype=job["dtype"] or options.dtype)
    defaults = SamplingParams(**job["sampling"])
    with (
        _progress(job["messages"]) as progress,
        Spool(Path(job["spool"]), defaults=defaults, input_hash="") as spool,
    ):
        engine, load_s = _ready_engine(Path(job["model"]), options, spool, progress.say)
        with closing(engine):
            result = _score(engine, spool, _SCORES[job["measure"]](), progress)
            return {**result, "load_s": load_s, **_holdings(engine, Path(job["model"]))}


@contextmanager
def _progress(messages: int | None) -> Iterator[Progress]:
    """Where the descriptor ``messages`` leads; quiet without one."""
    with open(os.devnull if messages is None else messages, "w") as file:
        with Progress(file, is_quiet=messages is None) as progress:
            yield progress


def _ready_engine(
    model_dir: Path, options: EngineOptions, spool: Spool, say: Callable[[str], None]
) -> tuple[Any, float]:
    """The engine for all rows, and how long it took to plan and to place the weights."""
    from freight.runtime.engine import build_engine

    workload = spool.workload(spool.order())
    compress_ahead(options, model_dir, say)
    work_s = nominal_s(read_config(model_dir), workload)
    planned = replace(options, machine=own_machine(options, model_dir, work_s, say))
    started_s = time.perf_counter()
    engine = build_engine(model_dir, options=planned, workload=workload, say=say)
    return engine, time.perf_counter() - started_s


def _score(engine: Any, spool: Spool, score: Score, progress: Progress) -> dict[str, Any]:
    """All rows through the engine, each held against what its id says."""
    num_tokens, started_s = 0, time.perf_counter()
    progress.on_start(num_rows=spool.num_rows, num_done=0, status=engine.status)
    for completion in engine.run(spool.request(int(index)) for index in spool.order()):
        demand_numbers(completion, f"Row {completion.index}")
        score.add(completion, spool.row_id(completion.index))
        num_tokens += completion.num_prompt_tokens + completion.num_new_tokens
        progress.on_row(num_new_tokens=completion.num_new_tokens)
    progress.on_end()
    return {
        "scores": score.result(),
        "tokens": num_tokens,
        "seconds": time.perf_counter() - started_s,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "compute": engine.compute,
        "summary": engine.summary(),
    }


def _holdings(engine: Any, model_dir: Path) -> dict[str, Any]:
    """Bytes of all weights and of a token's keys and values, on whatever tier, and how many they
    would be if they were not compressed."""
    config, plan = engine.config, engine.plan
    pages = near_page_sizes(config, plan.policy.page_tokens, plan.layout.element_bytes)
    exact = replace(config, kv_format=None).kv_bytes_per_token(plan.layout.element_bytes)
    return {
        "weight_bytes": sum(plan.layout.tier_bytes().values()),
        "exact_weight_bytes": _exact_bytes(plan.layout, resolve(config, model_dir)),
        "kv_bytes_per_token": sum(pages) / plan.policy.page_tokens,
        "exact_kv_bytes_per_token": exact,
    }


def _exact_bytes(layout: WeightLayout, sources: Mapping[str, TensorSource]) -> int:
    """Of all units as an exact run holds them, by the checkpoint's own numbers; a norm that two
    units use is held twice."""

    def size(part: Part) -> int:
        if part.compressed is None:
            return part.num_bytes
        own = DTYPE_BYTES.get(sources[part.weight.name].dtype, layout.element_bytes)
        return part.num_elements * min(own, layout.element_bytes)

    of_units = ((part, count) for form, count in layout.counted() for part in form.parts)
    return sum(map(size, layout.own_parts())) + sum(n * size(part) for part, n in of_units)
