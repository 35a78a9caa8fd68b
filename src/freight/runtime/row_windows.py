"""Where the rows of a micro-batch have their keys in layers that keep the last window of them.

A row's pages there are used in turn. What it brings goes straight into them where all that its new
tokens see has room at once; else they are attended in scratch, and the last pages stay. Rows that
are elsewhere have what the window reaches in a slot. Knows rows and pages, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from freight.memory.kv_cache import KVCache
from freight.memory.passage import Passage, plan_passage
from freight.model.batch import RowKey, RowSpan, first_page
from freight.plan.windows import Windows
from freight.runtime.row_states import is_entering

__all__ = ["BatchWindows", "PageMove", "WindowRows", "pass_windows", "rolled"]

Place = Literal["near", "scratch", "slot"]
"""The compute tier's own pages, those that are used within one computation, or a slot's."""

_Page = tuple[Place, int]


class PageMove(NamedTuple):
    """``num_pages`` that lie one after the other in both places."""

    source: _Page
    target: _Page
    num_pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRows:
    """Rows with successive tokens whose pages, ``tables``, are in one place. ``spans`` count from
    the first token in them. Pages are copied ``before`` the rows are attended and ``after``."""

    place: Place
    spans: tuple[RowSpan, ...]
    tables: tuple[Sequence[int], ...]
    before: tuple[PageMove, ...]
    after: tuple[PageMove, ...]


def rolled(span: RowSpan, page_tokens: int, window: int) -> tuple[RowSpan, range]:
    """The same tokens, counted from the first page that they see; and the pages from there on."""
    first = first_page(span.kv_len, page_tokens, window)
    left = first * page_tokens
    own = span._replace(
        kv_len=span.kv_len - left,
        prompt_len=span.prompt_len - left,
        written_len=max(0, span.written_len - left),
        prefix=None,
        shared_len=0,
    )
    return own, range(first, -(-span.total_len // page_tokens))


def pass_windows(
    cache: KVCache, rows: Sequence[tuple[RowKey, RowSpan]], windows: Windows, page_tokens: int
) -> Passage:
    """How rows pass through a slot that are not where they are attended."""
    return plan_passage(
        [cache.rows[key] for key, _ in rows],
        [span.kv_len for _, span in rows],
        [span.total_len for _, span in rows],
        page_tokens,
        [span.written_len for _, span in rows],
        firsts=[first_page(span.kv_len, page_tokens, windows.tokens) for _, span in rows],
        enter={number for number, (_, span) in enumerate(rows) if is_entering(span)},
    )


@dataclass(kw_only=True, slots=True)
class _Moves:
    """Pages being collected; neighbours go together."""

    pages: list[tuple[_Page, _Page]] = field(default_factory=list)

    def runs(self) -> Iterator[PageMove]:
        last: PageMove | None = None
        for source, target in self.pages:
            if last is not None and (source, target) == (
                (last.source[0], last.source[1] + last.num_pages),
                (last.target[0], last.target[1] + last.num_pages),
            ):
                last = last._replace(num_pages=last.num_pages + 1)
                continue
            if last is not None:
                yield last
            last = PageMove(source, target, 1)
        if last is not None:
            yield last


class BatchWindows:
    """All rows of a micro-batch in one sweep that the CPU does not attend, and how those that are
    elsewhere pass."""

    def __init__(
        self, cache: KVCache, spans: Sequence[RowSpan], windows: Windows, page_tokens: int
    ) -> None:
        self._cache = cache
        self._windows = windows
        self._page_tokens = page_tokens
        rows = [(key, span) for span in spans for key in span.keys]
        far = [(key, span) for key, span in rows if not cache.rows[key].is_near]
        self.passage: Passage = pass_windows(cache, far, windows, page_tokens)
        self._tables: dict[RowKey, Sequence[int]] = {
            key: table for (key, _), table in zip(far, self.passage.tables, strict=True)
        }

    def of_chunk(self, spans: Sequence[RowSpan]) -> list[WindowRows]:
        """Of some rows, those last that begin with what others of them leave."""
        return [
            self._rows(place, own)
            for entering in (False, True)
            for place, own in self._together(spans, entering)
        ]

    def _together(
        self, spans: Iterable[RowSpan], entering: bool
    ) -> Iterator[tuple[Place, list[RowSpan]]]:
        """Rows one behind the other that are in one place, as many as scratch has pages for."""
        own: list[RowSpan] = []
        last_place: Place = "near"
        num_pages = 0
        for span in spans:
            if is_entering(span) != entering:
                continue
            place, count = self._place(span), len(self._pages(span))
            is_next = bool(own) and place == last_place and own[-1].end == span.start
            fits = place != "scratch" or num_pages + count <= self._windows.scratch_pages
            if own and not (is_next and fits):
                yield last_place, own
                own, num_pages = [], 0
            own.append(span)
            last_place = place
            num_pages += count
        if own:
            yield last_place, own

    def _pages(self, span: RowSpan) -> range:
        return rolled(span, self._page_tokens, self._windows.tokens)[1]

    def _place(self, span: RowSpan) -> Place:
        if span.row in self._tables:
            return "slot"
        return "near" if len(self._pages(span)) <= self._windows.pages else "scratch"

    def _page(self, key: RowKey, turn: int, first: int) -> _Page:
        """A row's page of that number, where its slot's begin with ``first``."""
        if key in self._tables:
            return "slot", self._tables[key][turn - first]
        return "near", self._cache.rows[key].page_of(turn)

    def _rows(self, place: Place, spans: Sequence[RowSpan]) -> WindowRows:
        own, tables = [], []
        before, after = _Moves(), _Moves()
        num_pages = 0
        for span in spans:
            shifted, turns = rolled(span, self._page_tokens, self._windows.tokens)
            first, is_new = turns.start, is_entering(span)
            pages = [self._page(span.row, turn, first) for turn in turns]
            if place == "scratch":
                pages = [("scratch", num_pages + number) for number in range(len(turns))]
                num_pages += len(turns)
                assert num_pages <= self._windows.scratch_pages, (span, self._windows)
            own.append(shifted)
            tables.append([page for _, page in pages])
            if is_new or place == "scratch":
                source = span.prefix if is_new else span.row
                assert source is not None
                there = range(first, -(-span.kv_len // self._page_tokens))
                before.pages += [
                    (("near", self._cache.rows[source].page_of(turn)), pages[turn - first])
                    for turn in there
                ]
            touched = first if is_new else span.kv_len // self._page_tokens
            stay = range(max(touched, turns.stop - self._windows.pages), turns.stop)
            for key in span.keys[place != "scratch" :]:
                after.pages += [
                    (pages[turn - first], self._page(key, turn, first)) for turn in stay
                ]
        return WindowRows(
            place=place,
            spans=tuple(own),
            tables=tuple(tables),
            before=tuple(before.runs()),
            after=tuple(after.runs()),
        )
