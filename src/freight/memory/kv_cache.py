"""Keys and values in pages, each row's on the tier that the policy gave it.

A page holds some tokens of one row and layer, keys and values. Rows on the compute tier are used in
place. Other rows' pages are brought to a slot and the pages that new tokens touched go back; of a
row on disk the page that is not yet full stays in RAM. A row that moves to another tier passes
through a slot too, and all its pages go to where it will be. KV moves in whole pages. Pages of a
micro-batch whose rows enter together are given out page by page across them, so that what is read
together lies together; where rows enter at any time a row on disk has its pages in one extent.
Knows pages, tiers and rows, but no model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from freight.memory.disk import DirectFile, DiskRequest
from freight.memory.passage import Home, PageRun, Passage, RowPages
from freight.memory.transfer import copy_bytes, copy_pages, host_view

__all__ = ["KVCache"]

_Places = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class _FreeList:
    """Free page ids, a heap: the lowest are handed out first, so that neighbours stay together."""

    free: list[int]

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free), f"{count} pages wanted, {len(self.free)} are free"
        return [heappop(self.free) for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        for page in pages:
            heappush(self.free, page)


class KVCache:
    """All pages of all layers on all tiers.

    ``pools`` are, by layer, uint8 tensors [P, page bytes] for the homes "compute" and "cpu";
    ``tails`` are such too. A layer's pages are of one size off the compute tier, ``far_page_bytes``
    of it. The disk's are in ``file``, layer after layer, ``num_disk_pages`` each; a row there gets
    ``disk_extent_pages`` that lie together, or where that is 0 as many as it asks for.
    With ``row_pages`` rows have so many on every tier, however long they are.
    Without ``is_kept`` pages are used within one computation only: after each ``begin_batch`` the
    same ones are given out. What rows keep in layers without keys is in ``states``, a page for
    each, and in layers with a window in ``windows``, an extent that is used in turn; both on the
    tier of their row: they are admitted and released with it. ``holds_beginnings``: there
    is room on the compute tier for what rows share, beside their own.
    """

    def __init__(
        self,
        *,
        pools: Mapping[Home, Sequence[torch.Tensor]],
        tails: Sequence[torch.Tensor],
        file: DirectFile | None,
        num_disk_pages: int,
        page_tokens: int,
        far_page_bytes: Sequence[int],
        disk_extent_pages: int = 0,
        row_pages: int = 0,
        is_kept: bool = True,
        states: KVCache | None = None,
        windows: KVCache | None = None,
        holds_beginnings: bool = True,
    ) -> None:
        self.is_kept = is_kept
        self.states = states
        self.windows = windows
        self._beside = [own for own in (states, windows) if own is not None]
        room: bool = holds_beginnings and all(own.holds_beginnings for own in self._beside)
        self.holds_beginnings: bool = room
        self._row_pages = row_pages
        self._disk_extent_pages = disk_extent_pages
        self.pools = pools
        self.page_tokens = page_tokens
        self._far_page_bytes = far_page_bytes
        self._disk_offsets = [0, *accumulate(num_disk_pages * size for size in far_page_bytes)]
        self._tails = tails
        self._file = file
        counts = {home: len(pool[0]) for home, pool in pools.items()}
        counts["disk"] = num_disk_pages
        self._counts = counts
        self._free = {home: _FreeList(free=list(range(n))) for home, n in counts.items()}
        self._free_tails = _FreeList(free=list(range(len(tails[0]))))
        self.rows: dict[Hashable, RowPages] = {}

    def begin_batch(self) -> None:
        """The next micro-batch is admitted. Where pages are not kept all are free for it; rows of
        those before it are known until they are released."""
        for own in self._beside:
            own.begin_batch()
        if not self.is_kept:
            for home, count in self._counts.items():
                self._free[home] = _FreeList(free=list(range(count)))

    @property
    def has_extents(self) -> bool:
        """Whether rows on disk have all their pages from the begin."""
        return self._disk_extent_pages > 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def num_free_pages(self, home: Home) -> int:
        return len(self._free[home].free) if home in self._free else 0

    def has_free(self, pages: Mapping[Home, int], rows: Mapping[Home, int]) -> bool:
        """Whether so many pages on each tier are free, and what so many more rows keep in layers
        without keys, or with a window, has room."""
        return all(count <= self.num_free_pages(home) for home, count in pages.items()) and all(
            count * max(1, own._row_pages) <= own.num_free_pages(home)
            for own in self._beside
            for home, count in rows.items()
        )

    def admit(
        self,
        home: Home,
        rows: Sequence[tuple[Hashable, int]],
        *,
        is_delegated: bool = False,
        shared: Hashable | None = None,
    ) -> None:
        """Reserve pages on one tier for rows (row, most tokens), page by page across them; all
        pages of ``shared``, which stays for as long as they do, are their first, wherever it is."""
        for own in self._beside:
            own.admit(home, rows, is_delegated=is_delegated)
        self._admit(home, rows, is_delegated=is_delegated, shared=shared)

    def _admit(
        self,
        home: Home,
        rows: Sequence[tuple[Hashable, int]],
        *,
        is_delegated: bool,
        shared: Hashable | None,
    ) -> None:
        first = () if shared is None else self.rows[shared].pages
        is_here = shared is None or self.rows[shared].home == home
        num_elsewhere = 0 if is_here else len(first)
        if home == "disk" and self._disk_extent_pages:
            self._admit_together(rows, num_elsewhere, is_delegated=is_delegated)
            return
        wanted = [
            self._row_pages or self.pages_for(num_tokens) - len(first) for _, num_tokens in rows
        ]
        pages = iter(self._free[home].take(sum(wanted)))
        tables: list[list[int]] = [[] for _ in rows]
        for turn in range(max(wanted, default=0)):
            for table, count in zip(tables, wanted, strict=True):
                if turn < count:
                    table.append(next(pages))
        for (row, _), table in zip(rows, tables, strict=True):
            tail = self._free_tails.take(1)[0] if home == "disk" else -1
            self.rows[row] = RowPages(
                home=home,
                pages=(*first, *table) if is_here else tuple(table),
                num_shared=len(first) if is_here else 0,
                num_elsewhere=num_elsewhere,
                tail=tail,
                is_delegated=is_delegated,
            )

    def _admit_together(
        self, rows: Sequence[tuple[Hashable, int]], num_elsewhere: int, *, is_delegated: bool
    ) -> None:
        """An extent for each row: all are of one size, so that those that are free are whole."""
        for row, num_tokens in rows:
            count = self._row_pages or self.pages_for(num_tokens) - num_elsewhere
            assert count <= self._disk_extent_pages, (row, num_tokens)
            self.rows[row] = RowPages(
                home="disk",
                pages=tuple(self._free["disk"].take(self._disk_extent_pages)),
                num_elsewhere=num_elsewhere,
                tail=self._free_tails.take(1)[0],
                is_delegated=is_delegated,
            )

    def pages_to_grow(self, row: Hashable, num_tokens: int) -> int:
        """How many more pages a row needs for so many tokens."""
        own = self.rows[row]
        return max(0, self.pages_for(num_tokens) - own.num_elsewhere - len(own.pages))

    def grow(self, row: Hashable, num_tokens: int) -> bool:
        """Pages for so many tokens of a row, at the end of those it has; False, and nothing is
        done, where its tier has too few."""
        own = self.rows[row]
        count = self.pages_to_grow(row, num_tokens)
        if count > self.num_free_pages(own.home):
            return False
        if count > 0:
            pages = (*own.pages, *self._free[own.home].take(count))
            self.rows[row] = replace(own, pages=pages)
        return True

    def has_room(self, home: Home, num_tokens: int) -> bool:
        """Whether a row with so many tokens of its own can be admitted to a tier."""
        assert self.states is None, "rows with a state stay where they are"
        if self.windows is not None and not self.windows.has_room(home, num_tokens):
            return False
        is_disk = home == "disk"
        extent = self._disk_extent_pages if is_disk else 0
        count = extent or self._row_pages or self.pages_for(num_tokens)
        return count <= self.num_free_pages(home) and not (is_disk and not self._free_tails.free)

    def move(
        self,
        row: Hashable,
        home: Home,
        num_tokens: int,
        *,
        is_delegated: bool = False,
        shared: Hashable | None = None,
    ) -> None:
        """Give a row with so many tokens pages on another tier, to which the next sweep brings what
        it has; ``shared`` as in :meth:`admit`. Those where it is are its own until it is settled.
        """
        if self.windows is not None:
            self.windows.move(row, home, num_tokens, is_delegated=is_delegated)
        origin = self.rows[row]
        named = [(row, num_tokens)]
        self._admit(home, named, is_delegated=is_delegated, shared=shared)
        self.rows[row] = replace(self.rows[row], origin=origin)

    def settle(self, row: Hashable) -> None:
        """A sweep has brought a row that moved to its new place: its old one is free."""
        if self.windows is not None:
            self.windows.settle(row)
        own = self.rows[row]
        assert own.origin is not None
        self._give(own.origin)
        self.rows[row] = replace(own, origin=None)

    def release(self, row: Hashable) -> None:
        """Free a row's own pages, at once."""
        for beside in self._beside:
            beside.release(row)
        own = self.rows.pop(row)
        if not self.is_kept:
            return
        self._give(own)
        if own.origin is not None:
            self._give(own.origin)

    def _give(self, own: RowPages) -> None:
        self._free[own.home].give(own.own)
        if own.tail >= 0:
            self._free_tails.give([own.tail])

    def release_all(self) -> None:
        """Free the pages of all rows."""
        for row in list(self.rows):
            self.release(row)

    # -- moving pages; ``slot`` is a uint8 tensor that they fit into ------------------------------

    def pages_in(self, layer: int, slot: torch.Tensor) -> torch.Tensor:
        """A slot as pages of a layer: as many as it takes."""
        size = self._far_page_bytes[layer]
        count = slot.numel() // max(1, size)
        return slot.view(-1)[: count * size].view(count, size)

    def read_disk(self, layer: int, passage: Passage, slot: torch.Tensor) -> None:
        """Full pages from the file, the page in progress from RAM."""
        if passage.disk_in:
            assert self._file is not None
            requests = self._disk_requests(layer, passage.disk_in)
            self._file.read_all(requests, host_view(self.pages_in(layer, slot)))
        if passage.tails_in:
            homes, places = _each_page(passage.tails_in)
            copy_pages(self._tails[layer], homes, self.pages_in(layer, slot), places)

    def write_disk(self, layer: int, passage: Passage, slot: torch.Tensor) -> None:
        """Pages that are full now to the file, those in progress to RAM."""
        if passage.disk_out:
            assert self._file is not None
            requests = self._disk_requests(layer, passage.disk_out)
            self._file.write_all(requests, host_view(self.pages_in(layer, slot)))
        if passage.tails_out:
            homes, places = _each_page(passage.tails_out)
            copy_pages(self.pages_in(layer, slot), places, self._tails[layer], homes)

    def fetch_near(self, layer: int, passage: Passage, slot: torch.Tensor) -> None:
        """What rows have that move away from the compute tier, into a slot on it."""
        pool, pages = self.pools["compute"][layer], self.pages_in(layer, slot)
        for run in passage.near_in:
            copy_bytes(pool[run.home : run.home + run.count], _pages(pages, run))

    def keep_near(self, layer: int, passage: Passage, slot: torch.Tensor) -> None:
        """All that rows have that move to the compute tier."""
        pool, pages = self.pools["compute"][layer], self.pages_in(layer, slot)
        for run in passage.near_out:
            copy_bytes(_pages(pages, run), pool[run.home : run.home + run.count])

    def pairs_in(
        self, layer: int, passage: Passage, slot: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy for rows on the cpu tier: (home, place in the slot)."""
        pool, pages = self.pools["cpu"][layer], self.pages_in(layer, slot)
        for run in passage.cpu_in:
            yield pool[run.home : run.home + run.count], _pages(pages, run)

    def pairs_out(
        self, layer: int, passage: Passage, slot: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy back: (place in the slot, home) of touched pages."""
        pool, pages = self.pools["cpu"][layer], self.pages_in(layer, slot)
        for run in passage.cpu_out:
            yield _pages(pages, run), pool[run.home : run.home + run.count]

    def staged_pairs(
        self, layer: int, runs: Sequence[PageRun], source: torch.Tensor, target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The slot pages of ``runs`` in one slot and in another."""
        for run in runs:
            yield (
                _pages(self.pages_in(layer, source), run),
                _pages(self.pages_in(layer, target), run),
            )

    def _disk_requests(self, layer: int, runs: Sequence[PageRun]) -> list[DiskRequest]:
        first, size = self._disk_offsets[layer], self._far_page_bytes[layer]
        return [
            DiskRequest(
                offset=first + run.home * size, place=run.slot * size, num_bytes=run.count * size
            )
            for run in runs
        ]


def _each_page(runs: Sequence[PageRun]) -> tuple[_Places, _Places]:
    """The places of all their pages at home and in the slot."""
    homes, places, counts = np.array([(run.home, run.slot, run.count) for run in runs], np.int64).T
    begins = np.repeat(counts.cumsum() - counts, counts)
    turns = np.arange(counts.sum()) - begins
    return np.repeat(homes, counts) + turns, np.repeat(places, counts) + turns


def _pages(slot: torch.Tensor, run: PageRun) -> torch.Tensor:
    return slot[run.slot : run.slot + run.count]
