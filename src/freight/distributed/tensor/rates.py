"""What ranks reach here: arithmetic, memory, and what they send each other by their own back end.

A few short measurements, the slowest rank's for all. And what a programme takes at such rates by
the planner's counts: an estimate, from which calibration starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from freight.distributed.tensor.ranks import Ranks
from freight.memory.disk import Traffic, create_scratch
from freight.memory.tier import host_arena
from freight.memory.transfer import host_view
from freight.partition.sharded import Sharded

__all__ = ["Rates", "measure_disk", "measure_rates", "predicted_s", "slowest"]

_TIMES: Final = 5
_DISK_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The width of a product, bytes copied, bytes gathered from all ranks together."""

    width: int
    copied: int
    gathered: int


_SIZES: Final = {"cpu": _Sizes(512, 32 << 20, 4 << 20), "cuda": _Sizes(4096, 256 << 20, 64 << 20)}
"""A GPU's caches hold more than a CPU's, and starting an operation takes as long as a small one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of one rank while all others do the same: ``link_bytes_per_s`` is what leaves it,
    ``collective_s`` the time of a collective however little it moves."""

    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    collective_s: float


def measure_rates(ranks: Ranks, dtype: torch.dtype) -> Rates:
    """All ranks at once; the same values on each."""
    device, axes = ranks.device, ranks.mesh.names
    sizes = _SIZES.get(device.type, _SIZES["cpu"])
    a = torch.ones(sizes.width, sizes.width, dtype=dtype, device=device)
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    count = ranks.mesh.num_chips
    large = [
        torch.ones(sizes.gathered // count, dtype=torch.uint8, device=device) for _ in ranks.own
    ]
    small = [own[:8] for own in large]
    before = ranks.sent_bytes
    seconds = [
        _least(lambda: torch.mm(a, a), ranks),
        _least(lambda: target.copy_(source), ranks),
        _least(lambda: ranks.all_gather(small, axes), ranks),
        _least(lambda: ranks.all_gather(large, axes), ranks),
    ]
    ranks.sent_bytes = before
    product, copied, latency, gathered = slowest(ranks, seconds)
    sent = sizes.gathered * (count - 1) / count
    return Rates(
        flops=2.0 * sizes.width**3 / product,
        memory_bytes_per_s=2.0 * sizes.copied / copied,
        link_bytes_per_s=max(sent, 1.0) / max(gathered - latency, 1e-9),
        collective_s=latency,
    )


def measure_disk(ranks: Ranks, directory: Path) -> float:
    """Bytes per second that a rank reads past the page cache while all others do; the slowest's.
    BudgetError where nothing can be written there."""
    room = host_arena(_DISK_BYTES).take(_DISK_BYTES, "probe")
    room.random_()  # some disks make nothing of zeros
    file = create_scratch(directory, _DISK_BYTES, Traffic())
    try:
        file.write(0, host_view(room))
        seconds = _least(lambda: file.read(0, host_view(room)), ranks)
    finally:
        file.close()
    return _DISK_BYTES / slowest(ranks, [seconds])[0]


def predicted_s(
    own: Sharded, rates: Rates, *, weight_bytes: float, value_bytes: float, ahead: bool = False
) -> float:
    """Arithmetic or the reading of weights and keys, whichever takes longer, and all moves; those
    of weights beside all else where they come ``ahead``, as the last layer is computed."""
    kept = sum(
        step.layouts[1].elements({**own.sizes, "L": own.sizes["S"]}, own.mesh)
        for step in own.computes
        if step.kind == "attend"
    )
    read = own.used_elements * weight_bytes + kept * value_bytes
    computed_s = max(own.flops / rates.flops, read / rates.memory_bytes_per_s)

    def moved_s(weights: bool, size: float) -> float:
        calls = sum(step.elements > 0 for step in own.transfers if step.is_weight == weights)
        return own.moved(weights=weights) * size / rates.link_bytes_per_s + (
            calls * rates.collective_s
        )

    weights_s, rest_s = moved_s(True, weight_bytes), computed_s + moved_s(False, value_bytes)
    return max(weights_s, rest_s) if ahead else weights_s + rest_s


def slowest(ranks: Ranks, seconds: list[float]) -> list[float]:
    """Of each of some measurements the longest of all ranks, the same on each."""
    own = [torch.tensor(seconds, dtype=torch.float64, device=ranks.device) for _ in ranks.own]
    found: list[float] = torch.stack(ranks.all_gather(own, ranks.mesh.names)[0]).amax(0).tolist()
    return found


def _least(work: Callable[[], object], ranks: Ranks) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    work()
    found = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        work()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        found.append(time.perf_counter() - start)
    return min(found)
