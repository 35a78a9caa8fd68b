"""Which mesh and which ways a model is computed in over ranks, and how many rows at once.

The planner's fastest at the ranks' rates, or the one layout that was named; as many rows, and as
many tokens in a call, as there is memory for. Every rank comes to the same plan. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from freight.distributed.tensor.footprint import Footprint, footprint
from freight.distributed.tensor.names import NAMES, SCHEMES, check_name, name_of
from freight.distributed.tensor.rates import Rates
from freight.distributed.tensor.ways import Way, Ways
from freight.errors import BudgetError, InputError
from freight.hardware.chip import Chip
from freight.model.config import ModelConfig
from freight.partition.cost import Cost, Setting, Step
from freight.partition.efficiency import Efficiency, Phase
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.padding import pad
from freight.partition.planner import best_plan, cuts, meshes
from freight.plan.workload import Workload
from freight.quantities import align_up, format_bytes

__all__ = ["NOMINAL", "Planned", "TensorOptions", "plan_ways"]

_MOST_ROWS: Final = 256
_MOST_CALL: Final = 4096
_LEAST_CALL: Final = 32
_GOOD_CALL: Final = 512
_PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
_LEAST_GAIN: Final = 0.05
"""Of two ways over one, as a share of all time."""
_ENDLESS: Final = 1 << 60

NOMINAL: Final = Rates(flops=1e11, memory_bytes_per_s=1e10, link_bytes_per_s=1e9, collective_s=1e-4)
"""Of no ranks in particular: what is pinned must not follow from a measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorOptions:
    """``memory_bytes`` is what each rank may hold of weights, keys and what a call takes. ``bits``
    8 keeps matrices as integers. ``pin`` names the layout that all calls are computed in: their
    sums are made in one order. ``rows`` are computed together, of which up to ``batch_tokens`` are
    in a call; None: as many as there is memory for. ``cache_dir`` keeps what calibration has
    measured, of ranks connected by ``network``. ``dummy_seed`` asks for random weights.
    ``compiles``: with ``torch.compile``."""

    memory_bytes: int
    bits: int | None = None
    pin: str | None = None
    rows: int | None = None
    batch_tokens: int | None = None
    batches: int = 1
    cache_dir: Path | None = None
    network: str = ""
    dummy_seed: int | None = None
    compiles: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A mesh of all ranks, how prompts and how single tokens are computed on it, how many rows
    together, and the most tokens of a call. ``footprint`` is what a rank then holds."""

    mesh: Mesh
    prefill: Way
    decode: Way
    rows: int
    call_tokens: int
    footprint: Footprint

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(dict.fromkeys((self.decode, self.prefill)))


@dataclass(frozen=True, slots=True)
class _Chosen:
    mesh: Mesh
    prefill: Way
    decode: Way


def plan_ways(
    config: ModelConfig,
    num_ranks: int,
    rates: Rates,
    workload: Workload,
    dtype: torch.dtype,
    options: TensorOptions,
) -> Planned:
    """The planner's choice on chips of these rates: for a prefill of as many prompts as are in a
    call and a step of decoding of all rows. BudgetError where nothing fits; InputError where
    nothing divides, or no layout of the name is there."""

    def fit(chosen: _Chosen, rows: int, call_tokens: int) -> Planned:
        held = _footprint(config, chosen, rows, call_tokens, workload, dtype, options)
        return Planned(
            mesh=chosen.mesh,
            prefill=chosen.prefill,
            decode=chosen.decode,
            rows=rows,
            call_tokens=call_tokens,
            footprint=held,
        )

    setting = _setting(rates, dtype, options, options.memory_bytes)
    for rows in _row_counts(workload, options):
        try:
            chosen = _choose(config, num_ranks, rows, workload, setting, options)
        except BudgetError:
            continue
        for call_tokens in _call_sizes(options, rows):
            planned = fit(chosen, rows, call_tokens)
            if planned.footprint.total <= options.memory_bytes:
                return planned
    # What is fastest does not fit: what takes least might, in calls as small as there are.
    rows = min(_row_counts(workload, options))
    endless = _setting(rates, dtype, options, _ENDLESS)
    fastest = _choose(config, num_ranks, rows, workload, endless, options)
    found = [fit(fastest, rows, _LEAST_CALL)]
    for chosen in _stationary(config, num_ranks) if options.pin is None else ():
        with suppress(InputError):  # a dim does not divide by what is to cut it
            found.append(fit(chosen, rows, _LEAST_CALL))
    leanest = min(found, key=lambda planned: planned.footprint.total)
    least = leanest.footprint
    if least.total <= options.memory_bytes:
        return leanest
    raise BudgetError(
        f"A {config.family} model was to be cut over {num_ranks} ranks, {rows} "
        f"row{'s' if rows > 1 else ''} of {workload.max_total_tokens} tokens at once.",
        f"Each rank needs {format_bytes(int(least.total))} at least ({least}) and has "
        f"{format_bytes(options.memory_bytes)} beside what the process takes for itself.",
        "Raise --cpu-memory, start more ranks, or shorten the rows"
        f"{'' if options.rows is None else '; or lower --micro-batch-size'}.",
    )


def _stationary(config: ModelConfig, num_ranks: int) -> Iterator[_Chosen]:
    """All ways that move no weights: a rank then holds its own alone."""
    for mesh in meshes(num_ranks):
        for cut in cuts(mesh, config):
            if not cut.gathered:
                yield _Chosen(mesh, cut, cut)


def _row_counts(workload: Workload, options: TensorOptions) -> Iterator[int]:
    rows = min(_MOST_ROWS, -(-workload.num_rows // options.batches))
    if options.rows is not None:
        yield min(options.rows, workload.num_rows)
        return
    while rows:
        yield rows
        rows //= 2


def _call_sizes(options: TensorOptions, rows: int) -> Iterator[int]:
    """The largest first; small ones only where there are no fewer rows to be had."""
    size = _MOST_CALL if options.batch_tokens is None else min(_MOST_CALL, options.batch_tokens)
    can_shrink = rows > 1 and options.rows is None
    yield size
    while size > (_GOOD_CALL if can_shrink else _LEAST_CALL):
        size //= 2
        yield size


def _setting(rates: Rates, dtype: torch.dtype, options: TensorOptions, memory: int) -> Setting:
    even = Efficiency(source="measured here")
    return Setting(
        chip=Chip(
            name="ranks",
            description="as measured",
            flops={str(dtype).removeprefix("torch."): rates.flops},
            memory_bytes=memory,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            link_bytes_per_s=rates.link_bytes_per_s,
            link_latency_s=rates.collective_s,
        ),
        weight_bytes=dtype.itemsize if options.bits is None else options.bits / 8,
        activation_bytes=dtype.itemsize,
        kv_bytes=dtype.itemsize,
        usable=1.0,
        efficiencies={(gathers, phase): even for gathers in (False, True) for phase in _PHASES},
    )


def _choose(
    config: ModelConfig,
    num_ranks: int,
    rows: int,
    workload: Workload,
    setting: Setting,
    options: TensorOptions,
) -> _Chosen:
    longest = workload.max_total_tokens
    prompt = min(workload.max_prompt_tokens, _MOST_CALL)
    together = min(rows, max(1, _MOST_CALL // prompt))
    steps = [
        # Rows are padded to what cuts them.
        (Step(phase="prefill", rows=align_up(together, num_ranks), new_tokens=prompt), 1.0),
        (
            Step(phase="decode", rows=align_up(rows, num_ranks), new_tokens=1, past=longest - 1),
            workload.mean_new_tokens,
        ),
    ]
    if options.pin is None:
        return _fewest(best_plan(config, num_ranks, steps, setting), [own for _, own in steps])
    check_name(options.pin)
    if options.pin in SCHEMES:
        scheme = SCHEMES[options.pin]
        return _Chosen(Mesh.of(x=num_ranks), scheme, scheme)
    mesh, cut = _pinned(options.pin, config, num_ranks, steps, setting)
    return _Chosen(mesh, cut, cut)


def _fewest(found: Sequence[Cost], times: Sequence[float]) -> _Chosen:
    """The best ways of both phases; one for both where that is hardly slower, for then keys never
    move, and rows may enter at any time."""

    def seconds(costs: Sequence[Cost]) -> float:
        return sum(own.even_seconds * count for own, count in zip(costs, times, strict=True))

    least = seconds(found)
    alone = []
    for cut in dict.fromkeys(own.cut for own in found):
        both = [replace(own, cut=cut) for own in found]
        try:
            if all(own.memory_bytes <= own.room_bytes for own in both):
                alone.append((seconds(both), cut))
        except InputError:  # rows of one phase do not divide by what cuts those of the other
            continue
    if alone:
        one, cut = min(alone, key=lambda own: own[0])
        if one <= (1 + _LEAST_GAIN) * least:
            return _Chosen(found[0].mesh, cut, cut)
    prefill, decode = found
    return _Chosen(prefill.mesh, prefill.cut, decode.cut)


def _pinned(
    name: str,
    config: ModelConfig,
    num_ranks: int,
    steps: Sequence[tuple[Step, float]],
    setting: Setting,
) -> tuple[Mesh, Cut]:
    """The fastest of that name for all steps together, of those that fit if any does."""
    found: list[tuple[bool, float, Mesh, Cut]] = []
    problem: InputError | None = None
    names = {*SCHEMES}
    for mesh in meshes(num_ranks):
        for cut in cuts(mesh, config):
            names.add(name_of(cut, mesh))
            if name_of(cut, mesh) != name:
                continue
            costs = [(Cost(config, mesh, cut, step, setting), times) for step, times in steps]
            try:
                is_tight = any(cost.memory_bytes > cost.room_bytes for cost, _ in costs)
                seconds = sum(cost.even_seconds * times for cost, times in costs)
            except InputError as error:  # a dim does not divide by what is to cut it
                problem = problem or error
                continue
            found.append((is_tight, seconds, mesh, cut))
    if found:
        _, _, mesh, cut = min(found, key=lambda own: own[:2])
        return mesh, cut
    raise problem or InputError(
        f"--pin-layout {name} was given for {num_ranks} ranks.",
        "So many are not cut that way.",
        f"Use one of {', '.join(own for own in NAMES if own in names)}.",
    )


def _footprint(
    config: ModelConfig,
    chosen: _Chosen,
    rows: int,
    call_tokens: int,
    workload: Workload,
    dtype: torch.dtype,
    options: TensorOptions,
) -> Footprint:
    first = chosen.decode if isinstance(chosen.decode, Cut) else Cut(width="", inner="x")
    padded = pad(config, chosen.mesh, first).config
    ways = Ways(padded, chosen.mesh, tuple(dict.fromkeys((chosen.decode, chosen.prefill))))
    held = footprint(
        ways,
        rows=rows,
        longest=workload.max_total_tokens,
        call_tokens=call_tokens,
        prompt=workload.max_prompt_tokens,
        dtype_bytes=dtype.itemsize,
    )
    held = replace(held, keys=held.keys * options.batches)
    if options.bits is None:
        return held
    return replace(held, weights=held.weights * options.bits / 8 / dtype.itemsize)
