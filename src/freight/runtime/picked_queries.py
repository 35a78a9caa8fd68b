"""Queries of tokens that the head needs, in layers that attend the keys of others: of a prompt's
tokens these alone are computed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from freight.model.batch import MicroBatch, RowKey, RowSpan
from freight.model.frame import Angles
from freight.model.rope_config import RopeConfig
from freight.plan.policy import Policy
from freight.runtime.row_views import RowIndexer, Views

__all__ = ["PickedQueries", "behind_stem", "index_picked"]

Stems = Mapping[RowKey, Sequence[RowSpan]]
"""Rows by what they begin with, which is attended for all of them together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedQueries:
    """``angles`` are those of all that was picked, by way to rotate; ``chunks`` [first, last) of it
    go through a unit together, with what indexes their keys."""

    angles: Mapping[RopeConfig, Angles]
    chunks: tuple[tuple[int, int, Views], ...]

    def angles_of(self, tokens: slice) -> dict[RopeConfig, Angles]:
        return {rope: own.of(tokens) for rope, own in self.angles.items()}


def index_picked(
    batch: MicroBatch,
    tables: Mapping[RowKey, Sequence[int]],
    angles: Mapping[RopeConfig, Angles],
    indexer: RowIndexer,
    find_stems: Callable[[Sequence[RowSpan]], Stems],
    *,
    policy: Policy,
    device: torch.device,
) -> PickedQueries:
    """What the head picks of a micro-batch whose tokens have these ``angles``, and whose rows these
    pages, all of which are on the compute tier."""
    chunks = []
    for spans in _cut(batch.picked_spans(), policy.chunk_tokens):
        start, stems = spans[0].start, find_stems(spans)
        own = [behind_stem(span, tables[span.row], stems, policy.page_tokens) for span in spans]
        views = indexer.index(
            [span for span, _ in own],
            [table for _, table in own],
            indexer.whole_heads,
            start=0,
            device=device,
            stems=stems,
            stems_start=start,
        )
        chunks.append((start, spans[-1].end, views))
    places = torch.tensor(batch.picked_indices(), dtype=torch.long, device=device)
    picked = {rope: own.of(places) for rope, own in angles.items()}
    return PickedQueries(angles=picked, chunks=tuple(chunks))


def behind_stem(
    span: RowSpan, table: Sequence[int], stems: Stems, page_tokens: int
) -> tuple[RowSpan, Sequence[int]]:
    """A row without what ``stems`` have of it, and its pages behind that."""
    if span.prefix not in stems:
        return span, table
    return span.behind_prefix(), table[span.shared_len // page_tokens :]


def _cut(spans: Sequence[RowSpan], max_tokens: int) -> Iterator[list[RowSpan]]:
    """Spans in lists of at most ``max_tokens`` tokens each, all but the last of just so many: the
    keys of each token's row are there, so spans may be cut anywhere."""
    own, room = list[RowSpan](), max_tokens
    for span in spans:
        done = 0
        while done < span.num_new:
            count = min(room, span.num_new - done)
            start, kv_len = span.start + done, span.kv_len + done
            own.append(span._replace(start=start, num_new=count, kv_len=kv_len))
            done, room = done + count, room - count
            if not room:
                yield own
                own, room = [], max_tokens
    if own:
        yield own
