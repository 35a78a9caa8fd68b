"""Scores of prompts' tokens where the vocabulary is cut over ranks.

Each rank takes its part of the vocabulary into a state of few numbers for each token that is
scored; states of all parts come to that of the whole, and logits are never put together. Knows
logits and layouts, no model and no rows of a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.groups import place
from freight.distributed.tensor.moves import own_range
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.partition.layout import Layout
from freight.partition.moves import Move
from freight.runtime.scores import STATE_COLUMNS, RunningScores, join_states

__all__ = ["MOST_SCORED", "Scored", "pick", "score_parts", "state_width"]

MOST_SCORED: Final = 64
"""Tokens whose logits are there at once, or one of each row of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Of a call the tokens from ``first`` [R] on of each row whose next ones, ``targets`` [R, C],
    are scored, with ``num_top`` alternatives; -1: there is none."""

    first: torch.Tensor
    targets: torch.Tensor
    num_top: int

    def in_turn(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Places [R, c] in the rows, some for all rows at a time, and their targets, of which the
        last ones may be fewer."""
        rows, count = self.targets.shape
        # A power of two of them: programmes are written for each number.
        together = max(1, min(MOST_SCORED // rows, 1 << (count - 1).bit_length()))
        steps = torch.arange(together, device=self.first.device)
        for begin in range(0, count, together):
            places = self.first[:, None] + begin + steps
            yield places, self.targets[:, begin : begin + together]


def pick(ranks: Ranks, x: Parts, layout: Layout, places: torch.Tensor) -> Parts:
    """[B, c, E] of a stream [B, L, E] that is laid out so: the tokens at ``places`` [R, c]; behind
    the last one any."""
    found = []
    for part, rank in zip(x, ranks.own, strict=True):
        mine = own_range(ranks.mesh, rank, len(places), layout.cut("B"))
        own = places[mine.start : mine.stop].clamp(max=part.shape[1] - 1)
        found.append(part[torch.arange(len(part), device=part.device)[:, None], own])
    return found


def state_width(num_top: int) -> int:
    """Numbers of a token's state."""
    return STATE_COLUMNS + 2 * num_top


def score_parts(
    executor: Executor,
    logits: Parts,
    layout: Layout,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    num_top: int,
) -> torch.Tensor:
    """States [B, C, state] on every rank of logits [B, C, V], laid out so, and of all ``targets``
    [B, C]; what is behind ``vocab_size`` is padding."""
    mesh, own = executor.ranks.mesh, executor.ranks.own
    states = []
    for rank, part in zip(own, logits, strict=True):
        rows = own_range(mesh, rank, len(targets), layout.cut("B"))
        first = part.shape[2] * place(mesh, rank, layout.cut("V"))
        mine = targets[rows.start : rows.stop].reshape(-1)
        state = torch.empty(len(mine), state_width(num_top), device=part.device)
        running = RunningScores(state)
        running.clear()
        count = min(part.shape[2], vocab_size - first)
        if count > 0:
            numbers = part[:, :, :count].reshape(len(mine), count).float()
            running.merge(0, numbers, first, mine)
        states.append(state.view(len(rows), -1, state.shape[1]))
    axes = layout.cut("V")
    if axes:
        pieces = executor.gather(states, axes, "between layers")
        states = [join_states(parts) for parts in pieces]
    if rows_cut := layout.cut("B"):
        whole = Layout(("B", "L", "J"), (rows_cut, "", ""))
        step = Move("all-gather", rows_cut, source="B")
        states = executor.move(states, whole, step, "between layers")
    return states[0]
