"""The rates that a rank plans with: its part of what its host can do.

Each host is measured by one of its ranks, while the others wait. Knows no model and no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from freight.distributed.ranks import Ranks
from freight.entrypoints.own_machine import own_machine
from freight.hardware.machine import Machine
from freight.runtime.options import EngineOptions

__all__ = ["rank_machine"]


def rank_machine(
    ranks: Ranks,
    options: EngineOptions,
    model_dir: Path,
    work_s: float,
    say: Callable[[str], None],
) -> Machine | None:
    """This rank's part of its host, as measured, where ``work_s`` of work lie ahead of each: its
    threads, and of the disk as much as each of the host's other ranks. None for all ranks where one
    of them knows no rates: plans by different measures could not be compared. Called on all ranks
    at once."""
    size, is_first = ranks.place.local_size, ranks.place.local_rank == 0
    find = partial(own_machine, options, model_dir, say=say, is_part=size > 1)
    found = find(work_s) if is_first else None
    ranks.exchange("hosts measured", None)
    if not is_first:
        found = find(0.0)  # what the first one has measured
    if not all(ranks.exchange("rates", found is not None)) or found is None:
        return None
    if size == 1:
        return found
    threads = int(found.host.get("threads", torch.get_num_threads()))
    return found.scaled(
        {
            "compute": min(1.0, torch.get_num_threads() / threads),
            "disk read": 1 / size,
            "disk write": 1 / size,
        }
    )
