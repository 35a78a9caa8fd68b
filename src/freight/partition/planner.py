"""The fastest way of cutting a model over so many chips: every mesh, every cut, priced.

A cut is what weights are gathered over and what attention is cut by; a mesh is a box of chips, for
both phases the same where weights stay. Knows no chart and no command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from freight.errors import BudgetError, FreightError, InputError
from freight.model.switches import ModelConfig
from freight.partition.block_route import best_block
from freight.partition.cost import Cost, Setting, Step
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.padding import next_divisor, pad
from freight.partition.shortest import Prices
from freight.quantities import format_bytes

__all__ = ["best_plan", "candidates", "cuts", "meshes", "prices_of", "with_shortest_layers"]

_GATHERED = ("", "x", "y", "xy", "zy", "xyz")
_EXPERTS = ("", "z", "zy")


def meshes(num_chips: int) -> Iterator[Mesh]:
    """All boxes X Y Z of so many chips; of those that differ in an axis of one chip only, one."""
    if num_chips < 1:
        raise InputError(
            f"{num_chips} chips were asked for.", "A mesh has one at least.", "Raise --chips."
        )
    for x in _divisors(num_chips):
        for y in _divisors(num_chips // x):
            z = num_chips // x // y
            if y > 1 or z == 1:
                yield Mesh.of(x=x, y=y, z=z)


def cuts(mesh: Mesh, config: ModelConfig) -> Iterator[Cut]:
    """All cuts that differ on this mesh."""
    for gathered in _GATHERED:
        if any(mesh.size(axis) == 1 for axis in gathered):
            continue
        used = Cut(gathered=gathered).used_axes
        for first in range(len(used) + 1):
            batch = used[first:]
            if batch and mesh.size(batch[0]) == 1:
                continue
            for experts in _EXPERTS if config.experts is not None else ("",):
                if 0 < len(set(experts) & set(gathered)) < len(experts):
                    continue
                if not experts or mesh.size(experts[-1]) > 1:
                    yield Cut(gathered=gathered, batch=batch, experts=experts)


def candidates(
    config: ModelConfig, boxes: Iterable[Mesh], step: Step, setting: Setting
) -> Iterator[Cost]:
    """All that can be cut and that fits into memory."""
    for mesh in boxes:
        for cut in cuts(mesh, config):
            cost = Cost(config, mesh, cut, step, setting)
            try:
                if cost.memory_bytes <= cost.room_bytes:
                    yield cost
            except FreightError:  # a dim does not divide by what is to cut it
                continue


def best_plan(
    config: ModelConfig,
    num_chips: int,
    steps: Sequence[tuple[Step, float]],
    setting: Setting,
    mesh: Mesh | None = None,
) -> list[Cost]:
    """For each step the fastest cut, all on the mesh on which these steps, each so many times, take
    least. InputError where nothing divides, BudgetError where nothing fits; both say what would do.
    """
    if mesh is None and num_chips > 0:
        pad(config, Mesh.of(x=1, y=num_chips, z=1), Cut())  # a width divides by all boxes or none
    best: list[Cost] = []
    least = float("inf")
    for box in [mesh] if mesh is not None else meshes(num_chips):
        found = [
            min(candidates(config, [box], step, setting), key=_seconds, default=None)
            for step, _ in steps
        ]
        whole = [own for own in found if own is not None]
        if len(whole) < len(steps):
            continue
        total = sum(own.even_seconds * times for own, (_, times) in zip(whole, steps, strict=True))
        if total < least:
            best, least = whole, total
    if not best:
        boxes = [mesh] if mesh is not None else [*meshes(num_chips)]
        raise _refusal(config, boxes, steps, setting)
    return best


def prices_of(own: Cost) -> Prices:
    """What a search of single layers has to reckon with, to find what the cost would be."""
    rates, setting = own.efficiency, own.setting
    return Prices(
        fabric=own.fabric.scaled(rates.link),
        flops=setting.chip.dense_flops * rates.compute,
        memory_bytes_per_s=setting.chip.memory_bytes_per_s * rates.memory,
        activation_bytes=setting.activation_bytes,
        weight_bytes=setting.weight_bytes,
        kv_bytes=setting.kv_bytes,
    )


def with_shortest_layers(own: Cost) -> Cost:
    """The same step with the layers that the shortest path over all layouts finds, from the same
    stored weights; moves that are overlapped are not looked for. InputError for experts."""
    prices = prices_of(own)
    found = (best_block(own.config, own.sizes(window), prices) for _, window in own.forms)
    return replace(own, ways=tuple(route.layer for route in found))


def _seconds(cost: Cost) -> float:
    return cost.even_seconds


def _refusal(
    config: ModelConfig,
    boxes: Sequence[Mesh],
    steps: Sequence[tuple[Step, float]],
    setting: Setting,
) -> FreightError:
    """Why there is no plan: the problem of a cut that cannot be, or the least that does not fit."""
    problem: FreightError | None = None
    tight: Cost | None = None
    for box in boxes:
        for step, _ in steps:
            for cut in cuts(box, config):
                cost = Cost(config, box, cut, step, setting)
                try:
                    needed = cost.memory_bytes  # refuses what does not divide
                    if tight is None or needed < tight.memory_bytes:
                        tight = cost
                except FreightError as error:
                    problem = problem or error
    if tight is None:
        assert problem is not None
        return problem
    chips, room = tight.mesh.num_chips, tight.room_bytes
    parts = {
        "weights": tight.weight_bytes,
        "keys and values": tight.kv_bytes,
        "what a step needs besides": tight.working_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    step = tight.step
    wanted = ceil(chips * tight.memory_bytes / room)
    wanted = next_divisor(config.hidden_size, wanted) or wanted
    advice = f"Take about {wanted} chips"
    if tight.weight_bytes < room:
        context = tight.max_context()
        advice += f", or at most {context} tokens of context for {step.rows} rows"
    return BudgetError(
        f"A {config.family} model on {chips} {setting.chip.name} was to {step.phase} {step.rows} "
        f"rows of {step.past + step.new_tokens} tokens.",
        f"Each chip needs {format_bytes(tight.memory_bytes)} at least ({listed}) and has room for "
        f"{format_bytes(room)}.",
        f"{advice}, fewer rows, or weights of fewer bits.",
    )


def _divisors(number: int) -> list[int]:
    return [own for own in range(1, number + 1) if number % own == 0]
