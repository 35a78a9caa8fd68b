"""Which mesh and which ways a model is computed in over ranks, and how many rows at once.

The planner's fastest at the ranks' rates, or the one layout that was named; as many rows, and as
many tokens in a call, as there is memory for. Where layers may lie on the ranks' disks, those rows
and layers in memory that take the least time. Every rank comes to the same plan. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from freight.distributed.tensor.fitting import (
    STORED,
    Chosen,
    Fits,
    Planned,
    TensorOptions,
    layers_s,
)
from freight.distributed.tensor.names import NAMES, SCHEMES, check_name, name_of
from freight.distributed.tensor.packed import mean_bytes
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
from freight.partition.planner import best_plan, candidates, cuts, meshes
from freight.plan.workload import Workload
from freight.quantities import align_up, format_bytes

__all__ = ["NOMINAL", "NOMINAL_DISK", "plan_ways"]

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
NOMINAL_DISK: Final = 1e9
"""Bytes per second."""


def plan_ways(
    config: ModelConfig,
    num_ranks: int,
    rates: Rates,
    workload: Workload,
    dtype: torch.dtype,
    options: TensorOptions,
    disk_bytes_per_s: float = NOMINAL_DISK,
) -> Planned:
    """The planner's choice on chips of these rates: for a prefill of as many prompts as are in a
    call and a step of decoding of all rows. BudgetError where nothing fits; InputError where
    nothing divides, or no layout of the name is there."""
    fits = Fits(config, workload, dtype, options)
    planned = _in_memory(fits, num_ranks, rates)
    if planned is None or planned.rows < max(_row_counts(workload, options)):
        if options.disk_dir is not None:
            planned = _offloaded(fits, num_ranks, rates, disk_bytes_per_s) or planned
    if planned is not None:
        return planned
    # What is fastest does not fit: what takes least might, in calls as small as there are.
    rows = min(_row_counts(workload, options))
    endless = _setting(rates, dtype, options, _ENDLESS)
    fastest = _choose(config, num_ranks, rows, workload, endless, options)
    found = [fastest]
    for chosen in _stationary(config, num_ranks) if options.pin is None else ():
        with suppress(InputError):  # a dim does not divide by what is to cut it
            fits.whole(chosen, rows, _LEAST_CALL)
            found.append(chosen)
    leanest = min(found, key=lambda own: fits.least(own, rows, _LEAST_CALL).total)
    least = fits.least(leanest, rows, _LEAST_CALL)
    if options.disk_dir is None and least.total <= options.memory_bytes:
        return fits.whole(leanest, rows, _LEAST_CALL)
    ways_out = ["raise --cpu-memory", "start more ranks", "shorten the rows"]
    if options.disk_dir is None:
        ways_out.append("name a directory on a fast disk for the layers (--disk-dir)")
    if options.rows is not None:
        ways_out.append("lower --micro-batch-size")
    if options.batch_tokens is not None and options.disk_dir is not None:
        ways_out.append("lower --batch-tokens")
    advice = f"{', '.join(ways_out[:-1])}, or {ways_out[-1]}."
    raise BudgetError(
        f"A {config.family} model was to be cut over {num_ranks} ranks, {rows} "
        f"row{'s' if rows > 1 else ''} of {workload.max_total_tokens} tokens at once.",
        f"Each rank needs {format_bytes(int(least.total))} at least ({least}) and has "
        f"{format_bytes(options.memory_bytes)} beside what the process takes for itself.",
        advice[0].upper() + advice[1:],
    )


def _in_memory(fits: Fits, num_ranks: int, rates: Rates) -> Planned | None:
    """The fastest of those with most rows; None where nothing that is fastest fits."""
    config, workload, options = fits.config, fits.workload, fits.options
    setting = _setting(rates, fits.dtype, options, options.memory_bytes)
    for rows in _row_counts(workload, options):
        try:
            cut = _choose(config, num_ranks, rows, workload, setting, options)
        except BudgetError:
            continue
        fast = [cut]
        if options.pin is None:
            fast = [*_schemes(config, num_ranks, rows, workload, setting, rates, cut), cut]
        for chosen in fast:
            for call_tokens in _call_sizes(options, rows):
                planned = fits.whole(chosen, rows, call_tokens)
                if planned.footprint.total <= options.memory_bytes:
                    return planned
    return None


def _offloaded(fits: Fits, num_ranks: int, rates: Rates, disk_bytes_per_s: float) -> Planned | None:
    """The rows and the layers in memory that take a row least time: in the ways that are fastest
    where memory is no matter, else in those that move no weights."""
    config, workload, options = fits.config, fits.workload, fits.options
    endless = _setting(rates, fits.dtype, options, _ENDLESS)
    found: list[tuple[float, Planned]] = []

    def look(chosen: Chosen, rows: int, least_call: int) -> None:
        steps = {step.phase: step for step, _ in _steps(num_ranks, rows, workload)}
        for call_tokens in _call_sizes(options, rows, least_call):
            found.extend(fits.spread(chosen, rows, call_tokens, steps, rates, disk_bytes_per_s))

    for rows in _row_counts(workload, options):
        cut = _choose(config, num_ranks, rows, workload, endless, options)
        fast = [cut]
        if options.pin is None:
            fast = [*_schemes(config, num_ranks, rows, workload, endless, rates, cut), cut]
        for chosen in fast:
            look(chosen, rows, _GOOD_CALL)
    if not found:
        rows = min(_row_counts(workload, options))
        for chosen in (cut, *(_stationary(config, num_ranks) if options.pin is None else ())):
            with suppress(InputError):  # a dim does not divide by what is to cut it
                look(chosen, rows, _LEAST_CALL)
    return min(found, key=lambda own: own[0])[1] if found else None


def _stationary(config: ModelConfig, num_ranks: int) -> Iterator[Chosen]:
    """All ways that move no weights: a rank then holds its own alone."""
    for mesh in meshes(num_ranks):
        for cut in cuts(mesh, config):
            if not cut.gathered:
                yield Chosen(mesh, cut, cut)


def _row_counts(workload: Workload, options: TensorOptions) -> Iterator[int]:
    rows = min(_MOST_ROWS, -(-workload.num_rows // options.batches))
    if options.rows is not None:
        yield min(options.rows, workload.num_rows)
        return
    while rows:
        yield rows
        rows //= 2


def _call_sizes(options: TensorOptions, rows: int, least: int = _LEAST_CALL) -> Iterator[int]:
    """The largest first; small ones only where there are no fewer rows to be had."""
    size = _MOST_CALL if options.batch_tokens is None else min(_MOST_CALL, options.batch_tokens)
    can_shrink = rows > 1 and options.rows is None
    yield size
    while size > (_GOOD_CALL if can_shrink else least):
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
        weight_bytes=mean_bytes(options.sources or {}, dtype.itemsize),
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
) -> Chosen:
    steps = _steps(num_ranks, rows, workload)
    if options.pin is None:
        return _fewest(_alike(best_plan(config, num_ranks, steps, setting), steps))
    check_name(options.pin)
    if options.pin in SCHEMES:
        scheme = SCHEMES[options.pin]
        return Chosen(Mesh.of(x=num_ranks), scheme, scheme)
    mesh, cut = _pinned(options.pin, config, num_ranks, steps, setting)
    return Chosen(mesh, cut, cut)


def _steps(num_ranks: int, rows: int, workload: Workload) -> list[tuple[Step, float]]:
    """A prefill and a step of decoding, each with how often it comes."""
    longest = workload.max_total_tokens
    prompt = min(workload.max_prompt_tokens, _MOST_CALL)
    together = min(rows, max(1, _MOST_CALL // prompt))
    return [
        # Rows are padded to what cuts them.
        (Step(phase="prefill", rows=align_up(together, num_ranks), new_tokens=prompt), 1.0),
        (
            Step(phase="decode", rows=align_up(rows, num_ranks), new_tokens=1, past=longest - 1),
            workload.mean_new_tokens,
        ),
    ]


def _schemes(
    config: ModelConfig,
    num_ranks: int,
    rows: int,
    workload: Workload,
    setting: Setting,
    rates: Rates,
    cut: Chosen,
) -> Iterator[Chosen]:
    """The schemes of Ong & Kwon that are fastest for each phase, where all layers take clearly less
    time than by the planner's cuts; both by the counts that borders are reckoned from."""
    mesh = Mesh.of(x=num_ranks)
    steps = _steps(num_ranks, rows, workload)

    def seconds(ways: Ways, way: Way, step: Step) -> float:
        return layers_s(ways, way, step, rates, setting.weight_bytes, setting.activation_bytes)

    try:
        ways = Ways(pad(config, mesh, STORED).config, mesh, [*SCHEMES.values()])
        times = [{way: seconds(ways, way, step) for way in ways.ways} for step, _ in steps]
        first = cut.decode if isinstance(cut.decode, Cut) else STORED
        others = Ways(pad(config, cut.mesh, first).config, cut.mesh, (cut.decode, cut.prefill))
        cuts_s = [
            seconds(others, way, step)
            for way, (step, _) in zip((cut.prefill, cut.decode), steps, strict=True)
        ]
    except InputError:  # of a model that schemes are not for, or that does not divide
        return
    prefill, decode = (min(own, key=own.__getitem__) for own in times)
    least = times[0][prefill] * steps[0][1] + times[1][decode] * steps[1][1]
    by_cuts = sum(own * count for own, (_, count) in zip(cuts_s, steps, strict=True))
    if least < (1 - _LEAST_GAIN) * by_cuts:
        yield Chosen(mesh, prefill, decode)


def _alike(found: list[Cost], steps: Sequence[tuple[Step, float]]) -> list[tuple[Cost, float]]:
    """The best ways of some steps, with how often each comes: on the same mesh, and of one layout
    of the experts, which are stored once."""
    times = [count for _, count in steps]
    if len({own.cut.experts for own in found}) > 1:
        mesh, setting, config = found[0].mesh, found[0].setting, found[0].config
        pairs = []
        for experts in sorted({own.cut.experts for own in found}):
            least = [
                min(
                    (
                        own
                        for own in candidates(config, [mesh], step, setting)
                        if own.cut.experts == experts
                    ),
                    key=lambda own: own.even_seconds,
                    default=None,
                )
                for step, _ in steps
            ]
            whole = [own for own in least if own is not None]
            if len(whole) == len(steps):
                pairs.append(whole)
        if not pairs:
            raise BudgetError(
                "Experts were to be cut alike for prompts and for single tokens.",
                "No one way of cutting them fits into memory for both.",
                "Raise --cpu-memory, or start more ranks.",
            )
        found = min(pairs, key=lambda own: _seconds([*zip(own, times, strict=True)]))
    return [*zip(found, times, strict=True)]


def _seconds(costs: Sequence[tuple[Cost, float]]) -> float:
    return sum(own.even_seconds * count for own, count in costs)


def _fewest(found: Sequence[tuple[Cost, float]]) -> Chosen:
    """The best ways of both phases; one for both where that is hardly slower, for then keys never
    move, and rows may enter at any time."""
    least = _seconds(found)
    alone = []
    for cut in dict.fromkeys(own.cut for own, _ in found):
        both = [(replace(own, cut=cut), count) for own, count in found]
        try:
            if all(own.memory_bytes <= own.room_bytes for own, _ in both):
                alone.append((_seconds(both), cut))
        except InputError:  # rows of one phase do not divide by what cuts those of the other
            continue
    (prefill, _), (decode, _) = found
    if alone:
        one, cut = min(alone, key=lambda own: own[0])
        if one <= (1 + _LEAST_GAIN) * least:
            return Chosen(prefill.mesh, cut, cut)
    return Chosen(prefill.mesh, prefill.cut, decode.cut)


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
