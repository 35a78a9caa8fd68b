"""Where the rows of a micro-batch keep what layers without keys know of them: on the compute tier,
or in a slot that they pass through.

Knows rows and pages; what lies in one is another file's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freight.kernels.row_states import RowStates
from freight.memory.kv_cache import KVCache
from freight.memory.passage import Passage, plan_state_passage
from freight.model.batch import RowKey, RowSpan

__all__ = ["BatchStates", "ChunkStates", "StatePlace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlace:
    """A page: in a slot, or of those on the compute tier."""

    is_in_slot: bool
    page: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStates:
    """Those of the rows of some tokens, on the compute tier and in a slot; and (from, to) of
    siblings, which get the same."""

    near: RowStates | None
    slot: RowStates | None
    copies: tuple[tuple[StatePlace, StatePlace], ...]


class BatchStates:
    """All rows of a micro-batch in one sweep, and how those that are elsewhere pass."""

    def __init__(self, states: KVCache, spans: Sequence[RowSpan]) -> None:
        rows = [(key, span) for span in spans for key in span.keys]
        far = [(key, span) for key, span in rows if not states.rows[key].is_near]
        self.passage: Passage = plan_state_passage(
            [states.rows[key] for key, _ in far], [span.kv_len > 0 for _, span in far]
        )
        self._places: dict[RowKey, StatePlace] = {
            key: StatePlace(is_in_slot=False, page=states.rows[key].pages[0]) for key, _ in rows
        }
        for (key, _), (page,) in zip(far, self.passage.tables, strict=True):
            self._places[key] = StatePlace(is_in_slot=True, page=page)

    def of_chunk(self, spans: Sequence[RowSpan], start: int) -> ChunkStates:
        """Of rows whose tokens begin at ``start``."""
        places = [(span, self._places[span.row]) for span in spans]
        return ChunkStates(
            near=_index([own for own in places if not own[1].is_in_slot], start),
            slot=_index([own for own in places if own[1].is_in_slot], start),
            copies=tuple(
                (place, self._places[sibling])
                for span, place in places
                for sibling in span.siblings
            ),
        )


def _index(rows: Sequence[tuple[RowSpan, StatePlace]], start: int) -> RowStates | None:
    if not rows:
        return None
    return RowStates(
        starts=np.array([span.start - start for span, _ in rows], np.int64),
        counts=np.array([span.num_new for span, _ in rows], np.int64),
        seats=np.array([place.page for _, place in rows], np.int64),
        is_new=np.array([span.kv_len == 0 for span, _ in rows], np.int64),
    )
