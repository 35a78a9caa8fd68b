"""From a model and as many ranks to an engine: rates measured, mesh and ways planned, borders set.

Every rank calls this with the same arguments and comes to the same plan. Knows no command line and
does not start processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from freight.distributed.tensor.model import TensorModel, load_model
from freight.distributed.tensor.ranks import Ranks
from freight.distributed.tensor.rates import Rates, measure_rates
from freight.distributed.tensor.switch import Switch, calibrated, pinned
from freight.distributed.tensor.ways import Way
from freight.errors import BudgetError
from freight.hardware.chip import Chip
from freight.model.config import ModelConfig, read_config
from freight.partition.cost import Setting, Step
from freight.partition.efficiency import Efficiency, Phase
from freight.partition.layout import Mesh
from freight.partition.planner import best_plan
from freight.plan.workload import Workload

__all__ = ["Planned", "TensorOptions", "launch", "plan_ways"]

_MOST_ROWS: Final = 64
_PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorOptions:
    """``memory_bytes`` is what each rank may hold of weights, keys and scratch. ``bits`` 8 keeps
    matrices as integers. With ``pin`` all calls are computed in the way of that phase: their sums
    are made in one order. ``cache_dir`` keeps what calibration has measured."""

    memory_bytes: int
    bits: int | None = None
    pin: Phase | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A mesh of all ranks, how prompts and how single tokens are computed on it, and how many rows
    together."""

    mesh: Mesh
    prefill: Way
    decode: Way
    rows: int


def launch(
    model_dir: Path,
    num_ranks: int,
    make_ranks: Callable[[Mesh], Ranks],
    *,
    workload: Workload,
    dtype: torch.dtype,
    options: TensorOptions,
) -> tuple[TensorModel, Switch, Planned]:
    """Read this process's parts of the model, and find out when which way is faster.

    ``make_ranks`` gives the back end for a mesh. BudgetError where no cut fits, InputError where
    none divides.
    """
    config = read_config(model_dir)
    rates = measure_rates(make_ranks(Mesh.of(x=num_ranks)), dtype)
    planned = plan_ways(config, num_ranks, rates, workload, dtype, options)
    ways: list[Way] = [planned.decode]
    if planned.prefill != planned.decode:
        ways.append(planned.prefill)
    ranks = make_ranks(planned.mesh)
    model = load_model(model_dir, ranks, ways, dtype=dtype, bits=options.bits)
    if options.pin is not None or len(ways) == 1:
        way = planned.prefill if options.pin == "prefill" else planned.decode
        return model, pinned(way), planned
    most = planned.rows * workload.max_prompt_tokens
    return model, calibrated(model, max(2, most), options.cache_dir), planned


def plan_ways(
    config: ModelConfig,
    num_ranks: int,
    rates: Rates,
    workload: Workload,
    dtype: torch.dtype,
    options: TensorOptions,
) -> Planned:
    """The planner's choice on chips of these rates: for a prefill of all rows that are computed
    together and a step of decoding of them, as many rows as there is memory for."""
    even = Efficiency(source="measured here")
    setting = Setting(
        chip=Chip(
            name="a rank",
            description="as measured",
            flops={str(dtype).removeprefix("torch."): rates.flops},
            memory_bytes=options.memory_bytes,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            link_bytes_per_s=rates.link_bytes_per_s,
            link_latency_s=rates.collective_s,
        ),
        weight_bytes=dtype.itemsize if options.bits is None else options.bits / 8,
        activation_bytes=dtype.itemsize,
        kv_bytes=dtype.itemsize,
        efficiencies={(gathers, phase): even for gathers in (False, True) for phase in _PHASES},
    )
    rows = min(_MOST_ROWS, workload.num_rows)
    while True:
        prompt, longest = workload.max_prompt_tokens, workload.max_total_tokens
        steps = [
            (Step(phase="prefill", rows=rows, new_tokens=prompt), 1.0),
            (
                Step(phase="decode", rows=rows, new_tokens=1, past=longest - 1),
                workload.mean_new_tokens,
            ),
        ]
        try:
            prefill, decode = best_plan(config, num_ranks, steps, setting)
        except BudgetError:
            if rows == 1:
                raise
            rows //= 2
            continue
        return Planned(mesh=prefill.mesh, prefill=prefill.cut, decode=decode.cut, rows=rows)
