"""One measure of one setting, in a process of its own: the rows through the engine, and the score.

The engine is made as ``freight run`` makes it, with the same budgets and the same planner. Knows no
other setting; what it saves is reckoned against what an exact run of the same model would hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
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
from freight.jobs.spool import Spool
from freight.model.config import read_config
from freight.model.decoder import count_parameters
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
    model_dir = Path(job["model"])
    defaults = SamplingParams(**job["sampling"])
    with Spool(Path(job["spool"]), defaults=defaults, input_hash="") as spool:
        engine, load_s = _ready_engine(model_dir, options, spool)
        with closing(engine):
            score, tokens = _SCORES[job["measure"]](), 0
            started_s = time.perf_counter()
            for completion in engine.run(spool.request(int(index)) for index in spool.order()):
                score.add(completion, spool.row_id(completion.index))
                tokens += completion.num_prompt_tokens + completion.num_new_tokens
            seconds = time.perf_counter() - started_s
            return {
                "scores": score.result(),
                "tokens": tokens,
                "seconds": seconds,
                "load_s": load_s,
                "dtype": str(engine.dtype).removeprefix("torch."),
                "summary": engine.summary(),
                **_holdings(engine),
            }


def _ready_engine(model_dir: Path, options: EngineOptions, spool: Spool) -> tuple[Any, float]:
    """The engine for all rows, and how long it took to plan and to place the weights."""
    from freight.runtime.engine import build_engine

    workload = spool.workload(spool.order())
    compress_ahead(options, model_dir, _say_nothing)
    work_s = nominal_s(read_config(model_dir), workload)
    machine = own_machine(options, model_dir, work_s, _say_nothing)
    started_s = time.perf_counter()
    engine = build_engine(model_dir, options=replace(options, machine=machine), workload=workload)
    return engine, time.perf_counter() - started_s


def _say_nothing(text: str) -> None:
    """The parent says which run is under way."""


def _holdings(engine: Any) -> dict[str, Any]:
    """Bytes of all weights and of a token's keys and values, on whatever tier, and how many they
    would be if they were not compressed."""
    config, plan = engine.config, engine.plan
    size = plan.layout.element_bytes
    page = config.num_layers * plan.geometry.page_bytes
    return {
        "weight_bytes": sum(plan.layout.tier_bytes().values()),
        "exact_weight_bytes": size * count_parameters(config),
        "kv_bytes_per_token": page / plan.policy.page_tokens,
        "exact_kv_bytes_per_token": size
        * 2
        * config.num_layers
        * config.num_kv_heads
        * config.head_dim,
    }
