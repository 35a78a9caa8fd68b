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

__all__ = ["BatchStates", "ChunkStates", "PoolRows", "StatePlace", "is_entering"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlace:
    """A page: in a slot, or of those on the compute tier."""

    is_in_slot: bool
    page: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRows:
    """Rows whose states are in one pool; (from, to) of those that begin with what another row, on
    the compute tier, has left there."""

    is_in_slot: bool
    rows: RowStates
    beginnings: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStates:
    """Those of the rows of some tokens, one pool after the other: rows that begin with what others
    of them leave come behind these. And (from, to) of siblings, which get the same."""

    pools: tuple[PoolRows, ...]
    copies: tuple[tuple[StatePlace, StatePlace], ...]


class BatchStates:
    """All rows of a micro-batch in one sweep, and how those that are elsewhere pass."""

    def __init__(self, states: KVCache, spans: Sequence[RowSpan]) -> None:
        self._states = states
        rows = [(key, span) for span in spans for key in span.keys]
        far = [(key, span) for key, span in rows if not states.rows[key].is_near]
        self.passage: Passage = plan_state_passage(
            [states.rows[key] for key, _ in far],
            [span.kv_len > span.shared_len for _, span in far],
        )
        self._places: dict[RowKey, StatePlace] = {
            key: StatePlace(is_in_slot=False, page=states.rows[key].pages[0]) for key, _ in rows
        }
        for (key, _), (page,) in zip(far, self.passage.tables, strict=True):
            self._places[key] = StatePlace(is_in_slot=True, page=page)

    def of_chunk(self, spans: Sequence[RowSpan], start: int) -> ChunkStates:
        """Of rows whose tokens begin at ``start``."""
        pools = (
            self._pool(spans, start, is_in_slot=is_in_slot, enters=enters)
            for enters in (False, True)
            for is_in_slot in (False, True)
        )
        return ChunkStates(
            pools=tuple(pool for pool in pools if pool is not None),
            copies=tuple(
                (self._places[span.row], self._places[sibling])
                for span in spans
                for sibling in span.siblings
            ),
        )

    def _pool(
        self, spans: Sequence[RowSpan], start: int, *, is_in_slot: bool, enters: bool
    ) -> PoolRows | None:
        """Rows that ``enters`` behind a beginning, or all others."""
        own = [
            span
            for span in spans
            if self._places[span.row].is_in_slot == is_in_slot and is_entering(span) == enters
        ]
        if not own:
            return None
        seats = [self._places[span.row].page for span in own]
        return PoolRows(
            is_in_slot=is_in_slot,
            rows=RowStates(
                starts=np.array([span.start - start for span in own], np.int64),
                counts=np.array([span.num_new for span in own], np.int64),
                seats=np.array(seats, np.int64),
                is_new=np.array([span.kv_len == 0 for span in own], np.int64),
                lengths=np.array([span.kv_len for span in own], np.int64),
            ),
            beginnings=tuple(
                (self._states.rows[span.prefix].pages[0], seat)
                for span, seat in zip(own, seats, strict=True)
                if enters
            ),
        )


def is_entering(span: RowSpan) -> bool:
    """Whether its first tokens are another row's, and it brings the next."""
    return span.prefix is not None and span.kv_len == span.shared_len
