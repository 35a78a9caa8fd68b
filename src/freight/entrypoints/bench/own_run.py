"""One measured run of Freight, in a process of its own: times, bytes and peak memory.

Times come from the engine's word on each micro-batch; a sweep that brings prompts is prefill.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freight.entrypoints.bench.closed_form import expected_bytes
from freight.entrypoints.bench.work import Work, make_rows
from freight.entrypoints.run import engine_options
from freight.model.batch import MicroBatch
from freight.runtime.options import EngineOptions

__all__ = ["SweepClock", "own_options", "run_freight"]


def own_options(job: Mapping[str, Any]) -> EngineOptions:
    """The options of the command's flags. Weights are always those of the files."""
    options = engine_options(argparse.Namespace(**job["flags"]))
    return replace(options, dummy_seed=None, dtype=job.get("dtype") or options.dtype)


class SweepClock:
    """When each sweep ended, and whether it brought prompts."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self._ends_s: dict[int, float] = {}
        self._prefills: set[int] = set()

    def on_batch(self, sweep: int, batch: MicroBatch) -> None:
        self._ends_s[sweep] = time.perf_counter()
        if any(span.kv_len == 0 for span in batch.rows):
            self._prefills.add(sweep)

    def seconds(self) -> tuple[list[float], list[float]]:
        """Of each sweep with prompts, and of each without."""
        spans: tuple[list[float], list[float]] = ([], [])
        before_s = self.started_s
        for sweep, end_s in sorted(self._ends_s.items()):
            spans[sweep not in self._prefills].append(end_s - before_s)
            before_s = end_s
        return spans


def run_freight(job: Mapping[str, Any]) -> dict[str, Any]:
    """All rows through the engine, with the policy of the flags or the planner's."""
    from freight.runtime.engine import build_engine

    work, options = Work(**job["work"]), own_options(job)
    started_s = time.perf_counter()
    engine = build_engine(Path(job["model"]), options=options, workload=work.workload())
    load_s = time.perf_counter() - started_s
    engine.tokenizer = None  # with no end of sequence, every row makes all its tokens
    rows = make_rows(work, engine.config.vocab_size)
    streams = any(unit.pieces for unit in engine.plan.layout.units)
    if engine.device.kind == "cuda" or not streams:
        list(engine.run(_requests(rows[:1], min(2, work.new_tokens))))
    before = dict(engine.traffic.moved)
    clock = SweepClock()
    answers = {
        done.index: done.token_ids
        for done in engine.run(_requests(rows, work.new_tokens), clock.on_batch)
    }
    generate_s = time.perf_counter() - clock.started_s
    moved = {link: n - before.get(link, 0) for link, n in engine.traffic.moved.items()}
    expected = expected_bytes(engine, rows, [answers[row] for row in range(len(rows))])
    prefills, decodes = clock.seconds()
    result = {
        "load_s": load_s,
        "generate_s": generate_s,
        "prefill_s": sum(prefills),
        "decode_s": sum(decodes),
        "num_sweeps": len(prefills) + len(decodes),
        "new_tokens": sum(map(len, answers.values())),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "moved_bytes": moved,
        "expected_bytes": expected,
        "expected_is_exact": engine.config.experts is None,
        "first_tokens": [answers[row][0] for row in range(len(rows))],
        "summary": engine.summary(),
    }
    engine.close()
    return result


def _requests(rows: Sequence[Sequence[int]], num_new: int) -> Iterator[Any]:
    from freight.runtime.request import Request, SamplingParams

    params = SamplingParams(max_tokens=num_new)
    return (Request(index=i, prompt_ids=ids, params=params) for i, ids in enumerate(rows))
