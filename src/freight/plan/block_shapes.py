"""Which shapes of blocks a search looks at, and shares in whole rows of them.

Sizes of micro-batches are powers of two, and the largest that there is; what lies between is looked
at near the best of them. Knows no machine and no rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from freight.plan.default import Planner
from freight.plan.policy import Admission, Policy, Split
from freight.plan.workload import Workload

__all__ = ["block_shapes", "blocks_of", "in_rows", "moved_rows"]

_MOST_ROWS: Final = 512
_MOST_TOKENS: Final = 16384
_COUNTS: Final = (1, 2, 4, 8, 16)


def block_shapes(own: Planner, rule: Admission) -> Iterator[Policy]:
    """Those that a search looks at, with nothing yet said of where tensors are."""
    wishes, workload = own.wishes, own.workload
    rows = min(workload.num_rows, _MOST_ROWS)
    prompts = max(1, _MOST_TOKENS // workload.max_prompt_tokens)
    most = min(rows, prompts * workload.min_samples)
    if rule != "zigzag":  # prompts come in chunks
        most = rows
    sizes = {most, *(2**power for power in range(10) if 2**power < most)}
    if workload.max_samples > 1:
        sizes = {size - size % workload.max_samples or size for size in sizes}
    if wishes.micro_batch_size:
        sizes = {wishes.micro_batch_size}
    for size in sorted(sizes):
        for count in own.counts(size, _COUNTS):
            for shares in own.sharing():
                yield from own.with_chunks(own.shape(size, count, rule, shares=shares))


def blocks_of(workload: Workload, policy: Policy) -> tuple[tuple[float, float], ...]:
    """How many blocks a workload is, each with the share of its rows that it has: the last is
    smaller, and one whose rows enter at any time has half of them on average while it fills, and
    while it empties."""
    blocks = max(1.0, workload.num_rows / policy.block_rows)
    if policy.is_continuous:
        return (blocks - 1, 1.0), (2.0, 0.5)
    whole = math.floor(blocks)
    return (whole, 1.0), (1.0, blocks - whole)


def moved_rows(split: Split, rows: int, from_gpu: int, from_cpu: int) -> Split:
    """With some of so many rows of a micro-batch a tier further, as far as there are any."""
    cut = split.cut(rows)
    from_gpu = min(from_gpu, cut["gpu"])
    from_cpu = max(-cut["disk"], min(from_cpu, cut["cpu"] + from_gpu))
    gpu = (cut["gpu"] - from_gpu) / rows
    cpu = (cut["cpu"] + from_gpu - from_cpu) / rows
    return Split(gpu=gpu, cpu=cpu, disk=max(0.0, 1.0 - gpu - cpu))


def in_rows(split: Split, rows: int) -> Split:
    """The nearest split that whole rows of a micro-batch can have."""
    cut = split.cut(rows)
    gpu, cpu = cut["gpu"] / rows, cut["cpu"] / rows
    return Split(gpu=gpu, cpu=cpu, disk=max(0.0, 1.0 - gpu - cpu))
