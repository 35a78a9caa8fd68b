"""How many layers of a model that is cut lie on the ranks' disks, and how many tokens a sweep has.

What is kept of weights is not there for keys, and the other way round: of some numbers of rows each
leaves room for so many layers, and the rest come once in every sweep. Knows numbers, no layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from freight.distributed.tensor.footprint import Footprint, WeightSizes
from freight.plan.workload import Workload

__all__ = ["Pace", "Spread", "spreads", "sweep_lengths"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds that all layers take: of a token of a prompt, and of one token of each of the rows
    that are computed together; and what a rank reads from its disk in a second."""

    prompt_token_s: float
    decode_s: float
    disk_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Layers that are ``kept`` in memory, the most tokens of a sweep (None: they are all kept, and
    calls are computed one by one), and how long a row takes."""

    kept: int
    tokens: int | None
    footprint: Footprint
    row_s: float


def sweep_lengths(
    rows: int, call_tokens: int, sweep_tokens: int | None, workload: Workload
) -> list[int]:
    """The most tokens that a sweep may have: so many where that is asked for, else those of a call
    and twice as many, until all prompts of the rows are in one. Never more than these."""
    most = rows * workload.max_prompt_tokens
    if sweep_tokens is not None:
        return [min(most, sweep_tokens)]
    found = [min(most, max(call_tokens, rows))]
    while found[-1] < most:
        found.append(min(most, 2 * found[-1]))
    return found


def spreads(
    held: Footprint,
    sizes: WeightSizes,
    pace: Pace,
    *,
    rows: int,
    slots: int,
    call_tokens: int,
    sweep_tokens: int | None,
    memory_bytes: int,
    workload: Workload,
) -> Iterator[Spread]:
    """Those that fit: ``held`` is what a rank has of so many rows where nothing is on the disk."""
    count = len(sizes.layers)
    if held.total <= memory_bytes:
        row_s = _row_s(pace, 0.0, rows, rows * workload.max_prompt_tokens, workload)
        yield Spread(kept=count, tokens=None, footprint=held, row_s=row_s)
    for tokens in sweep_lengths(rows, call_tokens, sweep_tokens, workload):
        empty = held.offloaded(sizes, kept=0, slots=slots, tokens=tokens)
        kept = min(count - 1, int((memory_bytes - empty.total) // max(sizes.layers)))
        if kept >= 0:
            read_s = (count - kept) / count * sum(sizes.layers) / pace.disk_bytes_per_s
            yield Spread(
                kept=kept,
                tokens=tokens,
                footprint=held.offloaded(sizes, kept=kept, slots=slots, tokens=tokens),
                row_s=_row_s(pace, read_s, rows, tokens, workload),
            )


def _row_s(pace: Pace, read_s: float, rows: int, tokens: int, workload: Workload) -> float:
    """A row's part of a block's time: of sweeps that bring its prompts, and of those that make a
    token of each row; none is faster than what it reads."""
    prompts = rows * workload.total_prompt_tokens / workload.num_rows
    entering = ceil(prompts / tokens)
    entering_s = max(entering * read_s, prompts * pace.prompt_token_s)
    decoding_s = workload.mean_new_tokens * max(read_s, pace.decode_s)
    return (entering_s + decoding_s) / rows
