"""Where a row's pages are, and how those of rows elsewhere pass through a slot in one sweep: in
runs between their homes and the slot.

Knows rows by their pages and lengths; moves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "Home",
    "PageRun",
    "Passage",
    "RowPages",
    "num_pages_of",
    "plan_passage",
    "plan_state_passage",
]

Home = Literal["compute", "cpu", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRun:
    """``count`` pages that lie one after the other in both places."""

    home: int
    slot: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPages:
    """A row's pages, in order, on one tier; on disk also its place among the tails in RAM.
    ``is_delegated``: the CPU attends them where they are. The first ``num_shared`` are another
    row's; where that one is on another tier its ``num_elsewhere`` come before these. Of a row that
    moves what it has is still at its ``origin``, until a sweep has brought it here."""

    home: Home
    pages: tuple[int, ...]
    num_shared: int = 0
    num_elsewhere: int = 0
    tail: int = -1
    is_delegated: bool = False
    origin: RowPages | None = None

    @property
    def is_near(self) -> bool:
        """Whether a sweep finds it on the compute tier, and leaves it there."""
        return self.home == "compute" and self.origin is None

    @property
    def own(self) -> tuple[int, ...]:
        """The pages that are no other row's."""
        return self.pages[self.num_shared :]

    def page_of(self, turn: int) -> int:
        """Its own page of that number; where it has fewer they are used in turn."""
        return self.pages[self.num_shared + turn % (len(self.pages) - self.num_shared)]

    @property
    def num_apart(self) -> int:
        """Pages of another row that come before those that pass through a slot."""
        return self.num_elsewhere + (0 if self.origin is None else self.num_shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """How the offloaded rows of a micro-batch pass through a slot in one sweep.

    ``tables`` gives each row's pages in the slot. ``cpu_in``, ``disk_in`` and ``tails_in`` are what
    is there already, ``cpu_out``, ``disk_out`` and ``tails_out`` what new tokens touch, or of a row
    that moves all: runs between home (or tail) and slot. ``near_in`` and ``near_out`` are those of
    rows that move from and to the compute tier.
    """

    num_pages: int
    tables: tuple[tuple[int, ...], ...]
    cpu_in: tuple[PageRun, ...]
    disk_in: tuple[PageRun, ...]
    tails_in: tuple[PageRun, ...]
    cpu_out: tuple[PageRun, ...]
    disk_out: tuple[PageRun, ...]
    tails_out: tuple[PageRun, ...]
    near_in: tuple[PageRun, ...] = ()
    near_out: tuple[PageRun, ...] = ()


def num_pages_of(runs: Sequence[PageRun]) -> int:
    return sum(run.count for run in runs)


@dataclass(kw_only=True, slots=True)
class _Pairs:
    """(home, slot) pairs being collected; neighbours become one run."""

    pairs: list[tuple[int, int]] = field(default_factory=list)

    def runs(self) -> tuple[PageRun, ...]:
        runs: list[PageRun] = []
        for home, slot in sorted(self.pairs):
            last = runs[-1] if runs else None
            if last and (home, slot) == (last.home + last.count, last.slot + last.count):
                runs[-1] = PageRun(home=last.home, slot=last.slot, count=last.count + 1)
            else:
                runs.append(PageRun(home=home, slot=slot, count=1))
        return tuple(runs)


def plan_passage(
    rows: Sequence[RowPages],
    kv_lens: Sequence[int],
    total_lens: Sequence[int],
    page_tokens: int,
    written_lens: Sequence[int] = (),
    *,
    firsts: Sequence[int] = (),
    enter: Collection[int] = (),
) -> Passage:
    """Plan for ``rows``, with so many tokens before and after the sweep. Where the last one wrote
    more than are left of it, ``written_lens`` say how many: a page that it filled is on disk. Pages
    lie in the slot in the order in which they lie at home, so that neighbours stay together.

    Where ``firsts`` are given, rows use their pages in turn, and those pass from these numbers on,
    with which their tables begin; as many as a row has are kept. Of rows that ``enter``, by number,
    nothing is there yet: what they had is put into the slot from elsewhere.
    """
    sources = [row.origin or row for row in rows]
    rolls, firsts = bool(firsts), firsts or [0] * len(rows)
    lasts = [-(-total // page_tokens) for total in total_lens]
    used = [
        (source.home, source.page_of(turn), number, turn)
        for number, source in enumerate(sources)
        for turn in range(firsts[number], lasts[number])
    ]
    tables = [[0] * (last - first) for first, last in zip(firsts, lasts, strict=True)]
    for place, (_, _, number, turn) in enumerate(sorted(used)):
        tables[number][turn - firsts[number]] = place
    runs_in, runs_out = _Runs(page_tokens), _Runs(page_tokens)
    for number, (row, source, table, kv_len, total, written) in enumerate(
        zip(rows, sources, tables, kv_lens, total_lens, written_lens or kv_lens, strict=True)
    ):
        first, last = firsts[number], lasts[number]
        there = range(first, first if number in enter else -(-kv_len // page_tokens))
        runs_in.add(source, table, first, there, max(kv_len, written))
        is_new = row.origin is not None or number in enter
        touched = first if is_new else kv_len // page_tokens
        if rolls:
            touched = max(touched, last - len(row.pages))
        runs_out.add(row, table, first, range(touched, last), total)
    return Passage(
        num_pages=len(used),
        tables=tuple(tuple(table) for table in tables),
        cpu_in=runs_in.cpu.runs(),
        disk_in=runs_in.disk.runs(),
        tails_in=runs_in.tails.runs(),
        cpu_out=runs_out.cpu.runs(),
        disk_out=runs_out.disk.runs(),
        tails_out=runs_out.tails.runs(),
        near_in=runs_in.near.runs(),
        near_out=runs_out.near.runs(),
    )


def plan_state_passage(rows: Sequence[RowPages], have_one: Sequence[bool]) -> Passage:
    """Of states, which are a page for each row: it comes where the row has one, and goes whatever
    it brings."""
    order = sorted(range(len(rows)), key=lambda number: (rows[number].home, rows[number].pages))
    places = {number: place for place, number in enumerate(order)}

    def runs(home: Home, numbers: Sequence[int]) -> tuple[PageRun, ...]:
        own = [number for number in numbers if rows[number].home == home]
        return _Pairs(pairs=[(rows[n].pages[0], places[n]) for n in own]).runs()

    old = [number for number, has_one in enumerate(have_one) if has_one]
    return Passage(
        num_pages=len(rows),
        tables=tuple((places[number],) for number in range(len(rows))),
        cpu_in=runs("cpu", old),
        disk_in=runs("disk", old),
        tails_in=(),
        cpu_out=runs("cpu", range(len(rows))),
        disk_out=runs("disk", range(len(rows))),
        tails_out=(),
    )


class _Runs:
    """Pages by what they come from or go to."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.near, self.cpu, self.disk, self.tails = _Pairs(), _Pairs(), _Pairs(), _Pairs()

    def add(
        self, row: RowPages, table: Sequence[int], first: int, turns: range, num_tokens: int
    ) -> None:
        """Pages ``turns`` of a row that has so many tokens, and in a slot a table from page
        ``first`` on: on disk those that they fill, the last one else is its tail."""
        for turn in turns:
            page, slot = row.page_of(turn), table[turn - first]
            if row.home == "compute":
                self.near.pairs.append((page, slot))
            elif row.home == "cpu":
                self.cpu.pairs.append((page, slot))
            elif (turn + 1) * self._page_tokens <= num_tokens:
                self.disk.pairs.append((page, slot))
            else:
                self.tails.pairs.append((row.tail, slot))
