"""A micro-batch made ready for one sweep: where its tokens and keys lie, indexed once.

Also counts what it moves, for the schedule. Knows tiers and pages; the layers see only views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from freight.memory.activations import Activations, TokenCut, slot_bytes
from freight.memory.disk import BLOCK
from freight.memory.kv_cache import KVCache
from freight.memory.passage import Passage, RowPages, plan_passage
from freight.model.batch import LEAST_SHARERS, MicroBatch, RowKey, RowSpan, chunk_rows
from freight.model.config import ModelConfig
from freight.model.frame import Angles
from freight.model.passing import handed_columns
from freight.model.programme import Programme
from freight.model.rope_config import RopeConfig
from freight.plan.policy import Policy
from freight.plan.sweep import BatchWork, Delegated, Moved, Passed
from freight.plan.windows import Windows
from freight.quantities import align_up
from freight.runtime.angles import RotaryAngles
from freight.runtime.passed_bytes import passed
from freight.runtime.picked_queries import PickedQueries, behind_stem, index_picked
from freight.runtime.recompute import LoadedPages, loaded_pages
from freight.runtime.row_states import BatchStates, ChunkStates
from freight.runtime.row_views import RowIndexer, Views
from freight.runtime.row_windows import BatchWindows, WindowRows, pass_windows, rolled
from freight.runtime.weights import EmbeddingTable

__all__ = ["BatchPreparer", "Chunk", "PreparedBatch"]

_HOST: Final = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Whole rows that go through an attention unit together: tokens ``start`` to ``end``.

    ``near`` indexes the rows whose pages are on the compute tier, ``slot`` those in a slot. Tokens
    from ``first_delegated`` on are attended by the CPU, as its rows from ``delegated_place`` on.
    ``states`` say where rows keep what layers without keys know of them, ``windows`` where layers
    have rows' keys that keep the last ones alone.
    """

    start: int
    end: int
    near: Views
    slot: Views
    first_delegated: int
    delegated_place: int
    states: ChunkStates | None = None
    windows: tuple[tuple[WindowRows, Views], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DelegatedRows:
    """The last ``num_rows`` of a micro-batch, which the CPU attends: those in RAM and those that
    come from disk through a slot. ``windows`` are both where layers keep the last window."""

    num_rows: int
    on_cpu: Views
    on_disk: Views
    passage: Passage
    windows: tuple[Views, Views]
    window_passage: Passage | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """``angles`` [T, rotary/2] are those of each way to rotate, ``positions`` [T] count from 0 in
    each row; ``far_places`` are, for each table, the tokens whose rows come through a buffer, all
    where another stage sends them; ``logit_places`` those after which a token is sampled;
    ``scored_targets`` the tokens of the prompts that are scored; ``state_passage`` is how states of
    rows elsewhere pass, ``window_passage`` how the pages do that windows reach; ``loaded`` the
    pages of a slot whose keys are made again, ``queries`` what attends others' keys, if any."""

    batch: MicroBatch
    token_ids: np.ndarray
    far_places: tuple[np.ndarray, ...]
    cut: TokenCut
    angles: Mapping[RopeConfig, Angles]
    positions: torch.Tensor
    chunks: tuple[Chunk, ...]
    passage: Passage
    state_passage: Passage | None
    window_passage: Passage | None
    loaded: LoadedPages | None
    delegated: DelegatedRows | None
    logit_places: torch.Tensor
    scored_targets: torch.Tensor
    queries: PickedQueries | None = None

    def angles_of(self, tokens: slice) -> dict[RopeConfig, Angles]:
        """Those of some tokens."""
        return {rope: own.of(tokens) for rope, own in self.angles.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Homes:
    """Where the rows of a micro-batch are: for each span's rows, siblings behind their first, the
    pages in the pool or, from row ``num_near`` on, in a slot; of rows whose beginning is in the
    pool those behind it, and so are their spans. ``first_rows`` are the spans' own. Rows that the
    CPU attends are not among them."""

    spans: tuple[RowSpan, ...]
    tables: Sequence[Sequence[int]]
    num_near: int
    first_rows: Sequence[int]

    def num_near_spans(self) -> int:
        return sum(row < self.num_near for row in self.first_rows)


class BatchPreparer:
    """Prepares micro-batches, and keeps those whose stores may still be under way. ``page_bytes``
    are those of a page of keys and values, of one of what they may be made of, and of a state."""

    def __init__(
        self,
        config: ModelConfig,
        policy: Policy,
        *,
        kv_cache: KVCache,
        page_bytes: tuple[int, int, int],
        windows: Windows,
        activations: Activations,
        tables: Sequence[EmbeddingTable],
        device: torch.device,
        dtype: torch.dtype,
        programme: Programme,
    ) -> None:
        self._config = config
        self._policy = policy
        self._kv = kv_cache
        self._page_bytes, self._input_page_bytes, self._state_bytes = page_bytes
        self._windows = windows
        self._indexer = RowIndexer(config, kv_cache, dtype=dtype, page_tokens=policy.page_tokens)
        self._activations = activations
        self._tables = tables
        self._device = device
        self._dtype = dtype
        self._angles = RotaryAngles(config, dtype, device)
        self._prepared: dict[tuple[int, int], PreparedBatch] = {}
        self._receives = programme.receives
        self._looks_back = any(unit.kind == "queries" for unit in programme.units)
        columns = [handed_columns(config)] if self._receives else [own.columns for own in tables]
        self._row_bytes = [own * dtype.itemsize for own in columns]
        self._departing_bytes = handed_columns(config) * programme.sends * dtype.itemsize

    def get(self, sweep: int, k: int) -> PreparedBatch:
        return self._prepared[sweep, k]

    def describe(self, sweep: int, batch: MicroBatch, continues: bool) -> BatchWork:
        """Prepare ``batch`` for ``sweep`` and say what it moves."""
        prepared = self._prepare(batch)
        recent = {key: own for key, own in self._prepared.items() if key[0] >= sweep - 1}
        self._prepared = {**recent, (sweep, batch.index): prepared}
        passage, page_bytes = prepared.passage, self._page_bytes
        num_delegated = 0 if prepared.delegated is None else prepared.delegated.num_rows
        own = batch.rows[: len(batch.rows) - num_delegated]
        delegates = any(self._kv.rows[key].is_delegated for span in own for key in span.keys)
        cut, row_bytes = prepared.cut, self._activations.row_bytes
        return BatchWork(
            batch=batch,
            continues=continues,
            embedding_bytes=sum(
                len(places) * size
                for places, size in zip(prepared.far_places, self._row_bytes, strict=True)
            ),
            kv=passed(passage, page_bytes),
            inputs=passed(passage, self._input_page_bytes),
            states=(
                Passed()
                if prepared.state_passage is None
                else passed(prepared.state_passage, self._state_bytes)
            ),
            windows=(
                Passed()
                if prepared.window_passage is None
                else passed(prepared.window_passage, page_bytes)
            ),
            activations=Moved(cpu=cut.cpu * row_bytes, disk=align_up(cut.disk * row_bytes, BLOCK)),
            activation_slot_bytes=slot_bytes(cut, row_bytes),
            delegated=self._work_of(prepared.delegated),
            delegates_later=delegates,
            departing_bytes=batch.num_tokens * self._departing_bytes,
        )

    def _work_of(self, rows: DelegatedRows | None) -> Delegated | None:
        if rows is None:
            return None
        size, page_bytes = self._dtype.itemsize, self._page_bytes
        attended = rows.num_rows * self._config.attended_bytes_per_token(size)
        keys = rows.num_rows * self._config.kv_bytes_per_token_per_layer(size)
        return Delegated(
            num_rows=rows.num_rows,
            query_bytes=attended + keys,
            attended_bytes=attended,
            kv=passed(rows.passage, page_bytes),
            windows=passed(rows.window_passage, page_bytes) if rows.window_passage else Passed(),
        )

    def _prepare(self, batch: MicroBatch) -> PreparedBatch:
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        spans, delegated = self._part(batch)
        homes, passage, far = self._find_rows(spans)
        cache = self._kv.states
        states = None if cache is None else BatchStates(cache, batch.rows)
        windows = None
        if self._kv.windows is not None:
            page = self._policy.page_tokens
            windows = BatchWindows(self._kv.windows, spans, self._windows, page)
        ranges = [np.arange(span.kv_len, span.total_len) for span in batch.rows]
        positions = torch.from_numpy(np.concatenate(ranges))
        angles = {rope: self._angles.of(batch, positions, rope) for rope in self._config.rotations}
        return PreparedBatch(
            batch=batch,
            token_ids=token_ids,
            far_places=(
                (np.arange(len(token_ids)),)
                if self._receives
                else tuple(own.far_places(token_ids) for own in self._tables)
            ),
            cut=self._cut(batch.num_tokens),
            angles=angles,
            positions=positions.to(self._device),
            chunks=tuple(self._chunks(batch, homes, states, windows)),
            state_passage=None if states is None else states.passage,
            window_passage=None if windows is None else windows.passage,
            passage=passage,
            loaded=(
                loaded_pages(passage, far, self._policy.page_tokens, self._device)
                if self._policy.recomputed
                else None
            ),
            delegated=self._delegate(delegated) if delegated else None,
            logit_places=self._ids(batch.logit_indices()),
            scored_targets=self._ids(batch.scored_targets()),
            queries=self._look_back(batch, homes, angles) if self._looks_back else None,
        )

    def _ids(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _part(self, batch: MicroBatch) -> tuple[Sequence[RowSpan], Sequence[RowSpan]]:
        """Rows that are attended where all is computed, and those that the CPU attends: single
        tokens of one row each, whose keys are there already."""
        pages = [self._kv.rows[span.row] for span in batch.rows]
        own = [
            row.is_delegated and row.origin is None and span.is_single
            for row, span in zip(pages, batch.rows, strict=True)
        ]
        count = sum(own)
        assert not any(own[: len(own) - count]), "rows that the CPU attends come last"
        return batch.rows[: len(own) - count], batch.rows[len(own) - count :]

    def _delegate(self, spans: Sequence[RowSpan]) -> DelegatedRows:
        pages = [self._kv.rows[span.row] for span in spans]
        num_on_cpu = sum(row.home == "cpu" for row in pages)
        on_disk = spans[num_on_cpu:]
        passage = plan_passage(
            pages[num_on_cpu:],
            [span.kv_len for span in on_disk],
            [span.total_len for span in on_disk],
            self._policy.page_tokens,
            [span.written_len for span in on_disk],
        )
        tables = [row.pages for row in pages[:num_on_cpu]]
        index, heads = self._indexer.index, self._indexer.whole_heads
        windows, window_passage = self._delegate_windows(spans, num_on_cpu)
        return DelegatedRows(
            num_rows=len(spans),
            on_cpu=index(spans[:num_on_cpu], tables, heads, start=0, device=_HOST),
            on_disk=index(on_disk, passage.tables, heads, start=num_on_cpu, device=_HOST),
            passage=passage,
            windows=windows,
            window_passage=window_passage,
        )

    def _delegate_windows(
        self, spans: Sequence[RowSpan], num_on_cpu: int
    ) -> tuple[tuple[Views, Views], Passage | None]:
        cache, page = self._kv.windows, self._policy.page_tokens
        if cache is None:
            return ({}, {}), None
        on_disk = [(span.row, span) for span in spans[num_on_cpu:]]
        passage = pass_windows(cache, on_disk, self._windows, page)
        own = [rolled(span, page, self._windows.tokens) for span in spans]
        shifted = [span for span, _ in own]
        tables = [
            [cache.rows[span.row].page_of(turn) for turn in turns]
            for span, (_, turns) in zip(spans[:num_on_cpu], own, strict=False)
        ]
        index, heads = self._indexer.index, self._indexer.window_heads
        near = index(shifted[:num_on_cpu], tables, heads, start=0, device=_HOST)
        far = shifted[num_on_cpu:]
        return (
            near,
            index(far, passage.tables, heads, start=num_on_cpu, device=_HOST),
        ), passage

    def _find_rows(
        self, spans: Sequence[RowSpan]
    ) -> tuple[_Homes, Passage, list[tuple[RowPages, RowSpan]]]:
        """Where all rows are, siblings too, and how those that are elsewhere pass through."""
        rows = [(key, span) for span in spans for key in span.keys]
        # Spans come by the tier of their own rows, but siblings may be on any.
        rows.sort(key=lambda row: not self._kv.rows[row[0]].is_near)
        pages = [self._kv.rows[key] for key, _ in rows]
        rows = [
            (key, span.behind_prefix() if own.num_apart else span)
            for (key, span), own in zip(rows, pages, strict=True)
        ]
        num_near = sum(row.is_near for row in pages)
        far = [span for _, span in rows[num_near:]]
        passage = plan_passage(
            pages[num_near:],
            [span.kv_len for span in far],
            [span.total_len for span in far],
            self._policy.page_tokens,
            [span.written_len for span in far],
        )
        homes = _Homes(
            spans=tuple(span for _, span in rows),
            tables=[row.pages for row in pages[:num_near]] + list(passage.tables),
            num_near=num_near,
            first_rows=[row for row, (key, span) in enumerate(rows) if key == span.row],
        )
        return homes, passage, [*zip(pages[num_near:], far, strict=True)]

    def _cut(self, num_tokens: int) -> TokenCut:
        cut = self._policy.activations.cut(num_tokens)
        if self._policy.compute_tier == "gpu":
            return TokenCut(resident=cut["gpu"], cpu=cut["cpu"], disk=cut["disk"])
        return TokenCut(resident=cut["cpu"], cpu=0, disk=cut["disk"])

    def _chunks(
        self,
        batch: MicroBatch,
        homes: _Homes,
        states: BatchStates | None,
        windows: BatchWindows | None,
    ) -> list[Chunk]:
        chunks = []
        num_near, num_own = homes.num_near_spans(), len(homes.first_rows)
        delegated_at = batch.rows[num_own].start if num_own < len(batch.rows) else batch.num_tokens
        for first, last in chunk_rows(batch.rows, self._policy.chunk_tokens):
            border = min(max(num_near, first), last)
            behind = min(max(num_own, first), last)
            start, end = batch.rows[first].start, batch.rows[last - 1].end
            near = range(homes.num_near)
            slot = range(homes.num_near, len(homes.tables))
            stems, tokens = self._stems(batch.rows[first:behind]), range(start, end)
            chunks.append(
                Chunk(
                    start=start,
                    end=end,
                    near=self._view(homes, slice(first, border), tokens, near, stems),
                    slot=self._view(homes, slice(border, behind), tokens, slot),
                    first_delegated=min(max(delegated_at, start), end) - start,
                    delegated_place=max(start, delegated_at) - delegated_at,
                    states=(
                        None if states is None else states.of_chunk(batch.rows[first:last], start)
                    ),
                    windows=tuple(
                        (rows, self._window_view(rows, start))
                        for rows in (
                            [] if windows is None else windows.of_chunk(batch.rows[first:behind])
                        )
                    ),
                )
            )
        return chunks

    def _look_back(
        self, batch: MicroBatch, homes: _Homes, angles: Mapping[RopeConfig, Angles]
    ) -> PickedQueries:
        tables = [homes.tables[row] for row in homes.first_rows]
        return index_picked(
            batch,
            dict(zip((span.row for span in batch.rows), tables, strict=True)),
            angles,
            self._indexer,
            self._stems,
            policy=self._policy,
            device=self._device,
        )

    def _window_view(self, rows: WindowRows, start: int) -> Views:
        return self._indexer.index(
            rows.spans,
            rows.tables,
            self._indexer.window_heads,
            start=rows.spans[0].start - start,
            device=self._device,
        )

    def _view(
        self,
        homes: _Homes,
        spans: slice,
        tokens: range,
        rows: range,
        stems: Mapping[RowKey, Sequence[RowSpan]] = MappingProxyType({}),
    ) -> Views:
        """What lies in one pool of a chunk of ``tokens``: the given spans, of ``rows`` the chunk's
        siblings, and ``stems``, which its rows are attended without."""
        own_spans, tables, page = [], [], self._policy.page_tokens
        for row in homes.first_rows[spans]:
            span, table = behind_stem(homes.spans[row], homes.tables[row], stems, page)
            own_spans.append(span)
            tables.append(table)
        own = set(homes.first_rows)
        copies = [
            (homes.spans[row].start - tokens.start, homes.spans[row], homes.tables[row])
            for row in rows
            if row not in own and homes.spans[row].start in tokens
        ]
        return self._indexer.index(
            own_spans,
            tables,
            self._indexer.whole_heads,
            start=own_spans[0].start - tokens.start if own_spans else 0,
            device=self._device,
            copies=copies,
            stems=stems,
            stems_start=tokens.start,
        )

    def _stems(self, spans: Sequence[RowSpan]) -> dict[RowKey, list[RowSpan]]:
        """The rows by what they begin with, where enough do with the same and attend all keys, or
        where some have their own keys elsewhere, without it."""
        stems: dict[RowKey, list[RowSpan]] = {}
        for span in spans:
            if span.prefix is not None:
                stems.setdefault(span.prefix, []).append(span)
        least = LEAST_SHARERS[self._policy.compute_tier]
        least = least if self._config.attended_share == 1 else len(spans) + 1
        apart = {span.prefix for span in spans if self._kv.rows[span.row].num_apart}
        return {key: own for key, own in stems.items() if len(own) >= least or key in apart}
