"""From a model and as many ranks to an engine: rates measured, mesh and ways planned, borders set:
by the formula, or for work that is long enough by measuring the ways themselves.

Every rank calls this with the same arguments and comes to the same plan. Knows no command line and
does not start processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from freight.distributed.tensor.choice import NOMINAL, NOMINAL_DISK, plan_ways
from freight.distributed.tensor.fitting import Planned, TensorOptions
from freight.distributed.tensor.layers import OnDisk
from freight.distributed.tensor.model import TensorModel, load_model
from freight.distributed.tensor.ranks import Ranks
from freight.distributed.tensor.rates import Rates, measure_disk, measure_rates
from freight.distributed.tensor.stages import Passage, largest_part
from freight.distributed.tensor.switch import Switch, calibrated, pinned, reckoned
from freight.distributed.tensor.tracing import Timeline
from freight.model.config import read_config
from freight.model.decoder import count_parameters
from freight.partition.layout import Mesh
from freight.plan.workload import Workload

__all__ = ["Measured", "launch"]

Measured = tuple[Rates, float]
"""What ranks reach, and bytes per second of their disks."""

_WORTH_MEASURING_S: Final = 60.0


def launch(
    model_dir: Path,
    num_ranks: int,
    make_ranks: Callable[[Mesh], Ranks],
    *,
    workload: Workload,
    dtype: torch.dtype,
    options: TensorOptions,
    passage: Passage | None = None,
    agree: Callable[[Measured], Measured] = lambda own: own,
    timeline: Timeline | None = None,
) -> tuple[TensorModel, Switch, Planned]:
    """Read this process's parts of the model, and find out when which way is faster.

    ``make_ranks`` gives the back end for a mesh: of a stage, where the model is in stages, which
    ``agree`` on the rates that they plan with. ``timeline`` is told of computations. BudgetError
    where no cut fits, InputError where none divides.
    """
    config = read_config(model_dir).for_rows(workload.max_total_tokens)
    rates, disk = NOMINAL, NOMINAL_DISK
    if options.pin is None:
        every = make_ranks(Mesh.of(x=num_ranks))
        rates = measure_rates(every, dtype)
        if options.disk_dir is not None:
            disk = measure_disk(every, options.disk_dir)
        rates, disk = agree((rates, disk))
    passage = passage or Passage.whole(config.num_layers)
    part = largest_part(config, passage.stage.count)
    planned = plan_ways(part, num_ranks, rates, workload, dtype, options, disk)
    ranks = make_ranks(planned.mesh)
    on_disk = None
    if planned.kept is not None and options.disk_dir is not None:
        kept = min(planned.kept, len(passage.stage.layers))
        on_disk = OnDisk(directory=options.disk_dir, kept=kept, slots=planned.slots)
    model = load_model(
        model_dir,
        ranks,
        planned.ways,
        config=config,
        dtype=dtype,
        sources=options.sources,
        compiles=options.compiles,
        dummy_seed=options.dummy_seed,
        passage=passage,
        on_disk=on_disk,
        timeline=timeline,
    )
    switch = pinned(planned.decode)
    if len(planned.ways) > 1:
        most = max(2, min(planned.call_tokens, planned.rows * workload.max_prompt_tokens))
        tokens = workload.total_prompt_tokens + workload.expected_new_tokens
        arithmetic_s = 2 * count_parameters(part) * tokens / (num_ranks * rates.flops)
        if arithmetic_s < _WORTH_MEASURING_S:
            switch = reckoned(model, rates, most)
        else:
            switch = calibrated(
                model, most, options.cache_dir, network=options.network, rates=rates
            )
    model.executor.moved.clear()  # of what was measured
    return model, switch, planned
