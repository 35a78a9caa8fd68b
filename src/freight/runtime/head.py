"""The output head of a micro-batch, chunk by chunk: what it is computed on, and what it leaves.

Positions that a token is sampled after leave whole rows of logits; positions that are scored leave
running sums. Both are picked from the residual stream as soon as no other token needs it. Knows no
operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from freight.memory.activations import gather
from freight.model.batch import MicroBatch
from freight.model.frame import Frame, WeightParts
from freight.model.layers import run_unit
from freight.model.programme import Unit
from freight.model.workspace import Workspace
from freight.plan.policy import Policy
from freight.plan.scratch import scored_chunk
from freight.runtime.batches import PreparedBatch
from freight.runtime.buffers import Buffers
from freight.runtime.residual import Parts, by_name
from freight.runtime.scores import RunningScores, Scores

__all__ = ["Head"]


class Head:
    """Picks, computes and hands over; ``buffers`` hold what it leaves between chunks. What it picks
    are rows of all that is ``carried``, the residual stream and what goes beside it. What
    ``is_read`` itself, in place of a token that is chosen by it, is computed in float32."""

    def __init__(
        self,
        policy: Policy,
        carried: Sequence[tuple[str, int]],
        *,
        is_read: bool,
        buffers: Buffers,
        workspace: Workspace,
    ) -> None:
        self._policy = policy
        self._carried = carried
        self._is_read = is_read
        self._buffers = buffers
        self._workspace = workspace

    def pick(self, prepared: PreparedBatch, parts: Parts) -> None:
        """Keep what the head needs of the residual stream's ``parts``: the positions that are
        sampled after, then those that are scored."""
        batch = prepared.batch
        kept = self._buffers.picked[batch.index]
        _select(parts, prepared.logit_places, kept[: batch.num_logits])
        place = batch.num_logits
        for span in batch.rows:
            if span.scored:
                end = place + len(span.scored)
                gather(parts, span.start + span.scored.start, kept[place:end])
                place = end
        if batch.num_scored:
            self._scores(batch).clear()

    def picked(self, batch: MicroBatch) -> Parts:
        """What it has picked, for those units that are left to work on it."""
        return [(0, self._buffers.picked[batch.index, : batch.num_picked])]

    def compute(
        self, prepared: PreparedBatch, unit: Unit, weights: Mapping[str, WeightParts]
    ) -> None:
        """One chunk of the vocabulary for all that was picked."""
        if prepared.batch.num_logits:
            self._sampled(prepared.batch, unit, weights)
        if prepared.batch.num_scored:
            self._scored(prepared, unit, weights)

    def result(self, batch: MicroBatch) -> tuple[torch.Tensor, Scores | None]:
        """After the last chunk: rows of logits [R, V], and the scores of prompts if any."""
        logits = self._buffers.logits[batch.index, : batch.num_logits]
        return logits, self._scores(batch).result() if batch.num_scored else None

    def _scores(self, batch: MicroBatch) -> RunningScores:
        return RunningScores(self._buffers.scores[batch.index, : batch.num_scored])

    def _sampled(self, batch: MicroBatch, unit: Unit, weights: Mapping[str, WeightParts]) -> None:
        k, count, columns = batch.index, batch.num_logits, unit.columns
        with self._workspace.frame():
            found = self._logits(unit, weights, self._buffers.picked[k, :count])
            self._buffers.logits[k, :count, columns.start : columns.stop].copy_(found)

    def _scored(
        self, prepared: PreparedBatch, unit: Unit, weights: Mapping[str, WeightParts]
    ) -> None:
        batch, rows = prepared.batch, unit.columns
        first, count = batch.num_logits, batch.num_scored
        picked = self._buffers.picked[batch.index, first : first + count]
        scores = self._scores(batch)
        step = scored_chunk(self._policy, len(rows))
        for start in range(0, count, step):
            with self._workspace.frame():
                columns = self._logits(unit, weights, picked[start : start + step])
                wide = columns
                if columns.dtype != torch.float32:
                    wide = self._workspace.take(*columns.shape, dtype=torch.float32)
                    wide.copy_(columns)
                targets = prepared.scored_targets[start : start + step]
                scores.merge(start, wide, rows.start, targets)

    def _logits(
        self, unit: Unit, weights: Mapping[str, WeightParts], x: torch.Tensor
    ) -> torch.Tensor:
        """The unit's logits [n, c] of rows of the residual stream, in the workspace's present
        frame."""
        if self._is_read and x.dtype != torch.float32:
            x = self._workspace.take(*x.shape, dtype=torch.float32).copy_(x)
        columns = self._workspace.take(x.shape[0], len(unit.columns), dtype=x.dtype)
        values = {**by_name(self._carried, x), "logits": columns}
        run_unit(unit, Frame(weights=weights, workspace=self._workspace, values=values))
        return columns


def _select(parts: Parts, places: torch.Tensor, out: torch.Tensor) -> None:
    """Rows at ``places`` [n], on the device of the parts, to ``out`` [n, columns]."""
    if len(parts) == 1:  # a mask of places would be waited for on a device
        torch.index_select(parts[0][1], 0, places, out=out)
        return
    for first, rows in parts:
        inside = (places >= first) & (places < first + rows.shape[0])
        out[inside] = rows[places[inside] - first]
