"""The computations of a sweep, in order: unit by unit, in each micro-batch by micro-batch.

Where the CPU attends some rows, an attention unit begins for all micro-batches before it is
finished for any, and the unit after it follows micro-batch by micro-batch where the ring holds
both: the CPU then has work for as long as there is any. Experts are chosen on the way, so steps are
asked for one by one. Knows units and micro-batches, nothing of what is moved for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple

from freight.plan.sweep import BatchWork, StreamModel, Sweep

__all__ = ["Step", "steps_of"]


class Step(NamedTuple):
    """A computation of a unit for one micro-batch, the whole of it or a part.

    ``num_turns`` are left, this one included, until loads can be issued that are not possible yet.
    ``is_first`` is a unit's first; units before ``oldest`` are not needed again. Experts behind the
    ``unit`` that are computed with it are ``others``; ``num_chosen`` of all of these the work has
    chosen.
    """

    unit: int
    work: BatchWork
    num_turns: int
    is_first: bool
    oldest: int
    part: Literal["whole", "begin", "finish"] = "whole"
    others: tuple[int, ...] = ()
    num_chosen: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        return (self.unit, *self.others)


def steps_of(
    sweep: Sweep,
    model: StreamModel,
    chosen: Callable[[int], Collection[int]],
    choose: Callable[[int, int, Collection[int]], Collection[int]],
) -> Iterator[Step]:
    """``chosen`` gives the experts of a micro-batch; ``choose`` is told of all of a layer, and says
    which come."""
    choices: dict[int, Collection[int]] = {}
    groups: dict[int, tuple[int, ...]] = {}
    is_done = False
    for unit, own in enumerate(model.units):
        works = sweep.works
        if is_done:
            is_done = False
            continue
        if own.expert is not None:
            if (group := groups.get(unit)) is not None:
                yield from _together(group, works, model, choices)
            continue
        if own.kind == "attention" and any(work.delegated for work in works):
            is_done = model.units[unit + 1].kind == "mlp" and model.fit_together(unit)
            yield from _delegated(unit, works, together=is_done)
            continue
        for turn, work in enumerate(works):
            left = len(works) - turn
            yield Step(unit=unit, work=work, num_turns=left, is_first=turn == 0, oldest=unit)
        if own.kind == "router":
            assert own.layer is not None
            choices = {w.batch.index: chosen(w.batch.index) for w in works}
            together = {expert for few in choices.values() for expert in few}
            coming = choose(sweep.index, own.layer, together)
            groups = {group[0]: group for group in model.groups(own.layer, coming)}


def _together(
    group: tuple[int, ...],
    works: tuple[BatchWork, ...],
    model: StreamModel,
    choices: Mapping[int, Collection[int]],
) -> Iterator[Step]:
    """Experts of a layer for the micro-batches that have chosen any of them; for the first one if
    none has, so that what came is waited for before anything else takes its place."""
    experts = [model.units[unit].expert for unit in group]
    counts = [sum(own in choices[work.batch.index] for own in experts) for work in works]
    wanted = [(work, count) for work, count in zip(works, counts, strict=True) if count]
    unit, *others = group
    step = partial(Step, unit=unit, oldest=unit, others=tuple(others))
    turns = wanted or [(work, 0) for work in works[:1]]
    for turn, (work, count) in enumerate(turns):
        left = len(turns) - turn
        yield step(work=work, num_turns=left, is_first=turn == 0, num_chosen=count)


def _delegated(unit: int, works: tuple[BatchWork, ...], *, together: bool) -> Iterator[Step]:
    """All micro-batches up to their queries; then each from what the CPU has attended."""
    count = len(works)
    step = partial(Step, oldest=unit)
    for turn, work in enumerate(works):
        part: Literal["whole", "begin"] = "begin" if work.delegated else "whole"
        left = 2 * count - turn
        yield step(unit=unit, work=work, num_turns=left, is_first=turn == 0, part=part)
    for turn, work in enumerate(works):
        left = (1 + together) * (count - turn)
        if work.delegated:
            yield step(unit=unit, work=work, num_turns=left, is_first=False, part="finish")
        if together:
            left = max(1, left - 1)
            yield step(unit=unit + 1, work=work, num_turns=left, is_first=turn == 0)
