"""One measured run of Freight, in a process of its own: times, bytes and peak memory.

Times come from the engine's word on each micro-batch; a sweep that brings prompts is prefill.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freight.entrypoints.bench.closed_form import SweepLog, expected_bytes, logged_bytes
from freight.entrypoints.bench.work import Work, make_rows
from freight.entrypoints.own_machine import own_machine
from freight.entrypoints.run import engine_options
from freight.model.batch import MicroBatch
from freight.runtime.options import EngineOptions

if TYPE_CHECKING:
    import torch

    from freight.runtime.answers import NewTokens
    from freight.runtime.engine import Engine
    from freight.runtime.sampler import Draw

__all__ = ["SweepClock", "own_options", "run_freight"]


def own_options(
    job: Mapping[str, Any], *, work_s: float = 0.0, say: Callable[[str], None] = lambda _: None
) -> EngineOptions:
    """The options of the command's flags, with this machine's profile as a job has it: the one that
    is kept, or a new one where about ``work_s`` of work lie ahead. Weights are those of the files,
    unless none were written."""
    options = engine_options(argparse.Namespace(**job["flags"]))
    machine = own_machine(options, Path(job["model"]), work_s, say)
    dtype = job.get("dtype") or options.dtype
    seed = 0 if job["flags"].get("unwritten_weights") else None
    return replace(options, dummy_seed=seed, dtype=dtype, machine=machine)


class SweepClock:
    """When each sweep ended, whether it brought prompts, and how many rows made a token in it."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self._ends_s: dict[int, float] = {}
        self._prefills: set[int] = set()
        self._made: Counter[int] = Counter()

    def on_batch(self, sweep: int, batch: MicroBatch) -> None:
        self._ends_s[sweep] = time.perf_counter()
        self._made[sweep] += sum(bool(span.logit_positions) for span in batch.rows)
        if any(span.kv_len == 0 or span.num_new > 1 for span in batch.rows):
            self._prefills.add(sweep)

    @property
    def decoded_tokens(self) -> int:
        """New tokens of the sweeps without prompts."""
        return sum(count for sweep, count in self._made.items() if sweep not in self._prefills)

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
    streams = any(unit.stretches for unit in engine.plan.layout.units)
    if engine.device.kind == "cuda" or not streams:
        list(engine.run(_requests(rows[:1], min(2, work.new_tokens), None)))
    end = engine.config.vocab_size - 1 if work.is_ragged else None
    if end is not None:
        _end_rows(engine, work, end)
    before = dict(engine.traffic.moved)
    clock, log = SweepClock(), SweepLog(engine)
    is_free = work.is_ragged or engine.plan.policy.is_continuous or log.has_experts

    def on_batch(sweep: int, batch: MicroBatch) -> None:
        clock.on_batch(sweep, batch)
        if is_free:
            log.on_batch(sweep, batch)

    requests = _requests(rows, work.new_tokens, end)
    answers = {done.index: done.token_ids for done in engine.run(requests, on_batch)}
    generate_s = time.perf_counter() - clock.started_s
    moved = {link: n - before.get(link, 0) for link, n in engine.traffic.moved.items()}
    in_order = [answers[row] for row in range(len(rows))]
    expected = logged_bytes(engine, log) if is_free else expected_bytes(engine, rows, in_order)
    prefills, decodes = clock.seconds()
    result = {
        "plan": engine.status(),
        "forecast_s": None if engine.forecast is None else engine.forecast.seconds,
        "load_s": load_s,
        "generate_s": generate_s,
        "prefill_s": sum(prefills),
        "decode_s": sum(decodes),
        "num_sweeps": len(prefills) + len(decodes),
        "new_tokens": work.total_new_tokens,
        "decoded_tokens": clock.decoded_tokens,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "moved_bytes": moved,
        "expected_bytes": expected,
        "first_tokens": [ids[0] if ids else end for ids in in_order],
        "busy_s": {lane.value: seconds for lane, seconds in engine.meter.busy_s.items()},
        "idle_shares": engine.meter.idle_shares(),
        "summary": engine.summary(),
    }
    if engine.device.kind == "cuda":
        result["device_peak_bytes"] = _device_peak(engine.device.torch_device)
    engine.close()
    return result


def _device_peak(device: torch.device) -> dict[str, int]:
    """What the allocator gave at most, and what the driver counts as in use by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return {"allocator": torch.cuda.max_memory_reserved(device), "driver": total - free}


def _end_rows(engine: Engine, work: Work, end: int) -> None:
    """Let rows end where the work says, as a token that ends them would: nobody knows before."""
    from freight.runtime.answers import NewTokens

    lengths, sample = work.lengths(), engine._sample

    def ending(logits: torch.Tensor, draws: Sequence[Draw]) -> NewTokens:
        token_ids = []
        for draw, token in zip(draws, sample(logits, draws).token_ids, strict=True):
            prompt, new = lengths[draw.row.request]
            is_last = draw.position - prompt + 1 >= new
            token_ids.append(end if is_last else min(token, end - 1))
        return NewTokens(token_ids=token_ids)

    engine._sample = ending  # type: ignore[method-assign]


def _requests(rows: Sequence[Sequence[int]], num_new: int, end: int | None) -> Iterator[Any]:
    from freight.runtime.request import Request, SamplingParams

    params = SamplingParams(max_tokens=num_new, stop_token_ids=() if end is None else (end,))
    return (Request(index=i, prompt_ids=ids, params=params) for i, ids in enumerate(rows))
