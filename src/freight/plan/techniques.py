"""What each technique is worth: the best plan with all of them, and the best that is left without.

Row by row is what a program does that brings each layer's weights for one batch after the other,
keeps everything of its rows on the device, moves and computes in turn, and copies from memory that
is not pinned. Knows searches, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from freight.errors import BudgetError
from freight.plan.policy import Split
from freight.plan.recomputation import why_not_recomputed
from freight.plan.search import Choice, Search

__all__ = ["ALL", "ROW_BY_ROW", "price_techniques", "searches_without"]

ALL: Final = "everything"
ROW_BY_ROW: Final = "row by row"


def searches_without(search: Search) -> Iterator[tuple[str, Search]]:
    """Each technique by name, with a search that does not use it; row by row uses none."""
    planner = search.planner
    wishes, is_gpu = planner.wishes, planner.compute_tier == "gpu"
    if wishes.overlap:
        yield "overlap", _with(search, overlap=False)
    if is_gpu and wishes.cpu_attention is None:
        yield "attention on the CPU", _with(search, cpu_attention=0.0)
    if wishes.recomputed is None and why_not_recomputed(planner.config, planner.programme) is None:
        yield "keys computed again", _with(search, recomputed=0.0)
    window = planner.config.widest_window
    if wishes.rolls_windows and window and window < planner.workload.max_total_tokens:
        yield "windows that roll", _with(search, rolls_windows=False)
    if wishes.num_micro_batches is None:
        yield "several micro-batches per sweep", _with(search, num_micro_batches=1)
    if wishes.admission is None:
        yield "rows that enter at any time", _with(search, admission="zigzag")
    if search.uses_disk:
        yield "the disk", replace(search, uses_disk=False)
    near = Split(gpu=1.0) if is_gpu else Split(cpu=1.0)
    plain = _with(
        search,
        overlap=False,
        cpu_attention=0.0 if is_gpu else None,
        recomputed=0.0,
        rolls_windows=False,
        num_micro_batches=1,
        admission="zigzag",
        kv=near,
        activations=near,
    )
    if is_gpu:
        plain = replace(plain, machine=search.machine.with_pageable_links())
    yield ROW_BY_ROW, plain


def price_techniques(search: Search) -> Mapping[str, Choice | None]:
    """The best choice with all techniques, and without each; None where nothing fits then."""
    priced: dict[str, Choice | None] = {ALL: search.best()}
    for name, own in searches_without(search):
        priced[name] = _unless_refused(own.best)
    return priced


def _unless_refused(find: Callable[[], Choice]) -> Choice | None:
    try:
        return find()
    except BudgetError:
        return None


def _with(search: Search, **wishes: object) -> Search:
    planner = search.planner
    changed = replace(planner.wishes, **wishes)  # type: ignore[arg-type]
    return replace(search, planner=replace(planner, wishes=changed))
