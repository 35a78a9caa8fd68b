"""Which way a call is computed, by the number of tokens in it (Ong & Kwon).

First reckoned from rates and the planner's counts, then measured: each way at growing numbers of
tokens on one layer of the model, once for a machine, as the reckoned border is off where moves are
overlapped or arithmetic is slow for few tokens. Every rank comes to the same borders.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Final

import torch

from freight.distributed.tensor.model import TensorModel
from freight.distributed.tensor.rates import Rates, predicted_s, slowest
from freight.distributed.tensor.ways import Way

__all__ = ["Switch", "calibrated", "pinned", "reckoned"]

_TIMES: Final = 5
_LEAST_GAIN: Final = 0.05
"""A way is left for one that is faster by this share: less is what measurements differ by."""
_MOST_S: Final = 20.0
"""Beyond so much measuring, larger numbers of tokens are taken to be as the largest measured."""
_Table = list[list[float]]
"""Seconds by number of tokens and way."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Up to ``borders[i]`` tokens a call is computed in ``ways[i]``, beyond all in the last."""

    borders: tuple[int, ...]
    ways: tuple[Way, ...]

    def __post_init__(self) -> None:
        assert len(self.ways) == len(self.borders) + 1 and sorted(self.borders) == [*self.borders]

    def way(self, num_tokens: int) -> Way:
        places = (i for i, border in enumerate(self.borders) if num_tokens <= border)
        return self.ways[next(places, len(self.borders))]


def pinned(way: Way) -> Switch:
    """One way whatever is asked: sums are always made in the same order."""
    return Switch((), (way,))


def reckoned(model: TensorModel, rates: Rates, most_tokens: int) -> Switch:
    """By the planner's counts at these rates, to a token."""

    @cache
    def best(num_tokens: int) -> int:
        times = [
            sum(
                predicted_s(
                    own, rates, weight_bytes=model.weight_bytes, value_bytes=model.value_bytes
                )
                for own in model.layers_of(way, num_tokens)
            )
            for way in model.ways
        ]
        return times.index(min(times))

    changes: list[tuple[int, int]] = []

    def look(low: int, high: int) -> None:
        if best(low) == best(high):
            return
        if high - low == 1:
            changes.append((low, best(high)))
            return
        middle = (low + high) // 2
        look(low, middle)
        look(middle, high)

    for low, high in pairwise(_sizes(most_tokens)):
        look(low, high)
    return _switch(model.ways, best(1), changes)


def calibrated(
    model: TensorModel,
    most_tokens: int,
    cache_dir: Path | None = None,
    *,
    network: str = "",
    rates: Rates | None = None,
) -> Switch:
    """By measuring one layer. What was measured is kept in ``cache_dir`` for the next time that
    ranks are connected by this ``network`` and reach about these ``rates``."""
    sizes = _sizes(most_tokens)
    path = None
    if cache_dir is not None:
        path = cache_dir / f"switch-{_key(model, sizes, network, rates)}.json"
    table = _kept(model, path, sizes)
    if table is None:
        table = _table(model, sizes)
        if path is not None and 0 in model.executor.ranks.own:
            with suppress(OSError):  # it is measured again then
                path.parent.mkdir(parents=True, exist_ok=True)
                whole = path.with_suffix(f".{os.getpid()}")  # others may read it meanwhile
                whole.write_text(json.dumps(table), encoding="utf-8")
                whole.replace(path)
    first = own = table[0].index(min(table[0]))
    changes = []
    for place, (low, high) in enumerate(pairwise(sizes[: len(table)])):
        other = table[place + 1].index(min(table[place + 1]))
        if table[place + 1][other] < (1 - _LEAST_GAIN) * table[place + 1][own]:
            # Where lines through what was measured cross.
            before, after = (table[place + i][other] - table[place + i][own] for i in (0, 1))
            share = max(0.0, before / (before - after))
            changes.append((int(low + (high - low) * share), other))
            own = other
    return _switch(model.ways, first, changes)


def _switch(ways: Sequence[Way], first: int, changes: Sequence[tuple[int, int]]) -> Switch:
    """From the way for one token and (border, number of the way beyond it)."""
    numbers = [first, *(number for _, number in changes)]
    return Switch(tuple(border for border, _ in changes), tuple(ways[own] for own in numbers))


def _sizes(most_tokens: int) -> list[int]:
    """Powers of two, and the most."""
    powers = [1 << place for place in range((most_tokens - 1).bit_length())]
    return [*powers, most_tokens]


def _table(model: TensorModel, sizes: Sequence[int]) -> _Table:
    """For the first of some sizes, as many as there is time for; compiling takes none of it."""
    table: _Table = []
    for size in sizes:
        table.append([_measured(model, way, size) for way in model.ways])
        if (1 + _TIMES) * sum(map(sum, table)) > _MOST_S:
            break
    return table


def _measured(model: TensorModel, way: Way, num_tokens: int) -> float:
    """Seconds of a layer, of the slowest rank, the least of some calls after one that does not
    count: other work on the machine makes them longer only."""
    work = model.trial(way, num_tokens)
    work()
    times = []
    for _ in range(_TIMES):
        slowest(model.executor.ranks, [0.0])  # all begin together
        start = time.perf_counter()
        work()
        if model.executor.ranks.device.type == "cuda":
            torch.cuda.synchronize(model.executor.ranks.device)
        times.append(time.perf_counter() - start)
    return min(slowest(model.executor.ranks, times))


def _kept(model: TensorModel, path: Path | None, sizes: Sequence[int]) -> _Table | None:
    """What rank 0 has measured before: the others' disks are not asked."""
    ranks = model.executor.ranks
    width = len(model.ways)
    own = torch.full((len(sizes) * width,), -1.0, dtype=torch.float64)
    if path is not None and 0 in ranks.own:
        known = torch.tensor(_read(path, len(sizes), width), dtype=torch.float64).flatten()
        own[: known.numel()] = known
    parts = [own.to(ranks.device) for _ in ranks.own]
    first: list[float] = ranks.all_gather(parts, ranks.mesh.names)[0][0].tolist()
    rows = [first[place : place + width] for place in range(0, len(first), width)]
    return [row for row in rows if min(row) >= 0] or None


def _read(path: Path, most_sizes: int, num_ways: int) -> _Table:
    """What is kept; nothing where it is not there, or damaged: it is measured again then."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        rows = [[float(time_s) for time_s in row] for row in kept]
    except (OSError, ValueError, TypeError):
        return []
    is_whole = len(rows) <= most_sizes and all(len(row) == num_ways for row in rows)
    return rows if is_whole and all(time_s > 0 for row in rows for time_s in row) else []


def _key(model: TensorModel, sizes: Sequence[int], network: str, rates: Rates | None) -> str:
    """Of all that the times depend on; rates to a factor of two, for they are never twice alike."""
    ranks = model.executor.ranks
    on_cuda = ranks.device.type == "cuda"
    parts = (
        network,
        None if rates is None else [round(log2(rate)) for rate in astuple(rates)],
        torch.cuda.get_device_name(ranks.device) if on_cuda else "",
        platform.node(),
        platform.processor(),
        torch.__version__,
        torch.get_num_threads(),
        type(ranks).__name__,
        ranks.device,
        ranks.mesh,
        model.padding.config,
        model.weight_bytes,
        model.value_bytes,
        model.ways,
        model.executor.compiles,
        sizes,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
