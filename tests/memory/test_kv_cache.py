"""The KV cache against a model that keeps each row's tokens in a list.

Rows enter with pages on any tier, get tokens over sweeps by way of slots, and leave, at random.
Every sweep each row's slot pages must hold exactly the tokens that it got before; at the end so
must its homes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.memory.disk import Traffic, create_scratch
from freight.memory.kv_cache import KVCache
from freight.memory.passage import Home, PageRun, Passage, RowPages, num_pages_of, plan_passage
from freight.memory.tier import host_arena
from freight.memory.transfer import copy_bytes

PAGE_TOKENS, TOKEN_BYTES, NUM_LAYERS = 4, 1024, 2
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES
FAR_TOKEN_BYTES = (TOKEN_BYTES, 2 * TOKEN_BYTES)
FAR_PAGE_BYTES = tuple(PAGE_TOKENS * size for size in FAR_TOKEN_BYTES)
"""Of each layer; where rows are used in place pages are alike. Rows move only where all are."""
LARGEST = max(FAR_PAGE_BYTES)
NUM_PAGES, NUM_TAILS, SLOT_PAGES = 24, 6, 40
HOMES: tuple[Home, ...] = ("compute", "cpu", "disk")


@dataclass(kw_only=True, slots=True)
class Row:
    """What the cache should hold: one mark per token and layer."""

    home: Home
    most_tokens: int
    marks: list[int] = field(default_factory=list)


class Block:
    """A cache and its slot, beside the rows as they should be."""

    def __init__(
        self,
        directory: Path,
        extent_pages: int = 0,
        far_page_bytes: tuple[int, ...] = FAR_PAGE_BYTES,
    ) -> None:
        self.traffic = Traffic()
        arena = host_arena((2 * NUM_PAGES + NUM_TAILS) * sum(FAR_PAGE_BYTES) + SLOT_PAGES * LARGEST)
        self.slot = arena.take(SLOT_PAGES * LARGEST, "slot").view(SLOT_PAGES, LARGEST)

        def pool(pages: int, sizes: tuple[int, ...] = far_page_bytes) -> list[torch.Tensor]:
            return [arena.take(pages * size, "pool").view(pages, size) for size in sizes]

        self.file = create_scratch(directory, NUM_PAGES * sum(FAR_PAGE_BYTES), self.traffic)
        self.cache = KVCache(
            pools={
                "compute": pool(NUM_PAGES, (PAGE_BYTES,) * NUM_LAYERS),
                "cpu": pool(NUM_PAGES),
            },
            tails=pool(NUM_TAILS),
            file=self.file,
            num_disk_pages=NUM_PAGES,
            page_tokens=PAGE_TOKENS,
            far_page_bytes=far_page_bytes,
            disk_extent_pages=extent_pages,
        )
        self.rows: dict[int, Row] = {}
        self.num_admitted = 0

    def admit(self, home: Home, sizes: list[int]) -> None:
        members = []
        for size in sizes:
            used = sum(-(-most // PAGE_TOKENS) for _, most in members)
            tails = len(members) + sum(row.home == "disk" for row in self.rows.values())
            fits = used - (-size // PAGE_TOKENS) <= self.cache.num_free_pages(home)
            if fits and (home != "disk" or tails < NUM_TAILS):
                members.append((self.num_admitted, size))
                self.num_admitted += 1
        self.cache.admit(home, members)
        for row, size in members:
            self.rows[row] = Row(home=home, most_tokens=size)

    def release(self, row: int) -> None:
        self.cache.release(row)
        del self.rows[row]

    def move(self, row: int, home: Home) -> None:
        own = self.rows[row]
        if self.cache.rows[row].origin is None and self.cache.has_room(home, own.most_tokens):
            self.cache.move(row, home, own.most_tokens)
            own.home = home

    # -- a sweep: bring the offloaded rows, write new tokens, take back what they touched ----------

    def sweep(self, growth: list[int]) -> None:
        """Each row gets the next of ``growth`` new tokens, or as many as it may."""
        far: list[tuple[int, Row]] = []
        new: dict[int, int] = {}
        pages = 0
        for (number, row), count in zip(sorted(self.rows.items()), growth, strict=False):
            count = min(count, row.most_tokens - len(row.marks))
            needed = -(-(len(row.marks) + count) // PAGE_TOKENS)
            is_near = self.cache.rows[number].is_near
            is_moving = self.cache.rows[number].origin is not None
            if (count == 0 and not is_moving) or (not is_near and pages + needed > SLOT_PAGES):
                continue
            new[number] = count
            if not is_near:
                far.append((number, row))
                pages += needed
        passage = plan_passage(
            [self.cache.rows[number] for number, _ in far],
            [len(row.marks) for _, row in far],
            [len(row.marks) + new[number] for number, row in far],
            PAGE_TOKENS,
        )
        for layer in range(NUM_LAYERS):
            self._pass(layer, passage, far, new)
        for number, count in new.items():
            row = self.rows[number]
            if self.cache.rows[number].is_near:
                for layer in range(NUM_LAYERS):
                    self._append(self._own_pages(layer, number), layer, number, row, count)
            row.marks += [_mark(number, len(row.marks) + i, 0) for i in range(count)]
            if self.cache.rows[number].origin is not None:
                self.cache.settle(number)

    def _pass(
        self, layer: int, passage: Passage, far: list[tuple[int, Row]], new: dict[int, int]
    ) -> None:
        self.slot.fill_(255)
        for source, target in self.cache.pairs_in(layer, passage, self.slot):
            copy_bytes(source, target)
        self.cache.read_disk(layer, passage, self.slot)
        self.cache.fetch_near(layer, passage, self.slot)
        for (number, row), table in zip(far, passage.tables, strict=True):
            slot = self.cache.pages_in(layer, self.slot)
            pages = [slot[page] for page in table]
            check(pages, layer, number, len(row.marks))
            self._append(pages, layer, number, row, new[number])
        self.cache.keep_near(layer, passage, self.slot)
        for source, target in self.cache.pairs_out(layer, passage, self.slot):
            copy_bytes(source, target)
        self.cache.write_disk(layer, passage, self.slot)

    def _append(
        self, pages: list[torch.Tensor], layer: int, number: int, row: Row, count: int
    ) -> None:
        for place in range(len(row.marks), len(row.marks) + count):
            page = pages[place // PAGE_TOKENS].view(PAGE_TOKENS, -1)
            page[place % PAGE_TOKENS] = _mark(number, place, layer)

    def _own_pages(self, layer: int, number: int) -> list[torch.Tensor]:
        pool = self.cache.pools["compute"][layer]
        return [pool[page] for page in self.cache.rows[number].pages]

    def check_compute_tier(self) -> None:
        for number, row in self.rows.items():
            if self.cache.rows[number].is_near:
                for layer in range(NUM_LAYERS):
                    check(self._own_pages(layer, number), layer, number, len(row.marks))


def _mark(number: int, place: int, layer: int) -> int:
    return (number * 37 + place * 5 + layer * 101) % 251


def check(pages: list[torch.Tensor], layer: int, number: int, num_tokens: int) -> None:
    for place in range(num_tokens):
        token = pages[place // PAGE_TOKENS].view(PAGE_TOKENS, -1)[place % PAGE_TOKENS]
        assert (token == _mark(number, place, layer)).all(), (number, place, layer)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("scratch")


steps = st.one_of(
    st.tuples(
        st.just("admit"),
        st.sampled_from(HOMES),
        st.lists(st.integers(1, 17), min_size=1, max_size=4),
    ),
    st.tuples(st.just("sweep"), st.lists(st.integers(0, 6), min_size=12, max_size=12)),
    st.tuples(st.just("release"), st.integers(0, 100)),
)


@settings(deadline=None, max_examples=40)
@given(script=st.lists(steps, max_size=14))
def test_rows_come_back_as_they_were(script: list[tuple], directory: Path) -> None:
    block = Block(directory)
    try:
        for step in [*script, ("sweep", [1] * 100)]:
            if step[0] == "admit":
                block.admit(step[1], step[2])
            elif step[0] == "sweep":
                block.sweep(step[1])
            elif block.rows:
                block.release(sorted(block.rows)[step[1] % len(block.rows)])
            block.check_compute_tier()
        for row in [*block.rows]:
            block.release(row)
        assert all(block.cache.num_free_pages(home) == NUM_PAGES for home in HOMES)
    finally:
        block.file.close()


moving_steps = st.one_of(
    steps, steps, st.tuples(st.just("move"), st.integers(0, 100), st.sampled_from(HOMES))
)


@settings(deadline=None, max_examples=120)
@given(script=st.lists(moving_steps, max_size=20), extent_pages=st.sampled_from([0, 5]))
def test_rows_that_move_come_back_as_they_were(
    script: list[tuple], extent_pages: int, directory: Path
) -> None:
    """From any tier to any, between any sweeps, and some leave while they are on the way."""
    block = Block(directory, extent_pages, (PAGE_BYTES,) * NUM_LAYERS)
    try:
        for step in [*script, ("sweep", [1] * 100), ("sweep", [1] * 100)]:
            numbers = sorted(block.rows)
            if step[0] == "admit" and step[1] == "disk":
                for size in step[2]:
                    if block.cache.has_room("disk", size):
                        block.admit("disk", [size])
            elif step[0] == "admit":
                block.admit(step[1], step[2])
            elif step[0] == "sweep":
                block.sweep(step[1])
            elif step[0] == "move" and numbers:
                block.move(numbers[step[1] % len(numbers)], step[2])
            elif step[0] == "release" and numbers:
                block.release(numbers[step[1] % len(numbers)])
            block.check_compute_tier()
        for row in [*block.rows]:
            block.release(row)
        assert all(block.cache.num_free_pages(home) == NUM_PAGES for home in HOMES)
        assert block.cache.has_room("disk", 1)
    finally:
        block.file.close()


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["cpu", "disk"]), st.integers(0, 20), st.integers(1, 9)),
        max_size=7,
    )
)
def test_passage_by_brute_force(rows: list[tuple[Home, int, int]]) -> None:
    """Page by page: what a row has is brought, what new tokens touch goes back, no place twice."""
    homes = {"cpu": iter(range(1000)), "disk": iter(range(1000))}
    own = []
    for number, (home, kv_len, num_new) in enumerate(rows):
        count = -(-(kv_len + num_new) // PAGE_TOKENS)
        pages = tuple(next(homes[home]) for _ in range(count))
        own.append(RowPages(home=home, pages=pages, tail=number if home == "disk" else -1))
    kv_lens = [kv_len for _, kv_len, _ in rows]
    totals = [kv_len + num_new for _, kv_len, num_new in rows]
    passage = plan_passage(own, kv_lens, totals, PAGE_TOKENS)
    slots = [slot for table in passage.tables for slot in table]
    assert sorted(slots) == [*range(passage.num_pages)]
    expected: dict[str, set[tuple[int, int]]] = {
        name: set()
        for name in ("cpu_in", "cpu_out", "disk_in", "disk_out", "tails_in", "tails_out")
    }
    for row, table, kv_len, total in zip(own, passage.tables, kv_lens, totals, strict=True):
        for place, slot in enumerate(table):
            tokens = range(place * PAGE_TOKENS, (place + 1) * PAGE_TOKENS)
            for length, way, is_wanted in (
                (kv_len, "in", tokens[0] < kv_len),
                (total, "out", any(kv_len <= token < total for token in tokens)),
            ):
                kind, home = row.home, row.pages[place]
                if row.home == "disk" and tokens[-1] >= length:
                    kind, home = "tails", row.tail
                if is_wanted:
                    expected[f"{kind}_{way}"].add((home, slot))
    for name, pairs in expected.items():
        runs = getattr(passage, name)
        assert {pair for run in runs for pair in _pairs(run)} == pairs, name
        assert num_pages_of(runs) == len(pairs)


def _pairs(run: PageRun) -> list[tuple[int, int]]:
    return [(run.home + i, run.slot + i) for i in range(run.count)]


def test_rows_that_grow_together_lie_together(directory: Path) -> None:
    """Equal rows of a micro-batch: what they brought so far is one run, and so is what is new."""
    block = Block(directory)
    try:
        block.admit("cpu", [16] * 4)
        block.admit("disk", [16] * 4)
        rows = [block.cache.rows[number] for number in range(8)]
        passage = plan_passage(rows, [8] * 8, [12] * 8, PAGE_TOKENS)
        lengths = {
            name: [run.count for run in getattr(passage, name)]
            for name in ("cpu_in", "disk_in", "cpu_out", "disk_out")
        }
        assert lengths == {"cpu_in": [8], "disk_in": [8], "cpu_out": [4], "disk_out": [4]}
        alone = plan_passage(rows[:4], [8] * 4, [12] * 4, PAGE_TOKENS)
        assert [run.count for run in alone.cpu_in] == [8]
    finally:
        block.file.close()


@settings(deadline=None, max_examples=40)
@given(script=st.lists(steps, max_size=14))
def test_rows_with_extents_lie_together(script: list[tuple], directory: Path) -> None:
    """Whatever rows came and went before: what a row has on disk is one request."""
    block = Block(directory, extent_pages=5)
    try:
        for step in [*script, ("sweep", [1] * 100)]:
            if step[0] == "admit" and step[1] == "disk":
                for size in step[2]:
                    if block.cache.num_free_pages("disk") >= 5:
                        block.admit("disk", [size])
            elif step[0] == "admit":
                block.admit(step[1], step[2])
            elif step[0] == "sweep":
                block.sweep(step[1])
            elif step[0] == "release" and block.rows:
                block.release(sorted(block.rows)[step[1] % len(block.rows)])
            for number, row in block.rows.items():
                own = block.cache.rows[number]
                used = -(-len(row.marks) // PAGE_TOKENS)
                if own.home == "disk" and used:
                    passage = plan_passage([own], [len(row.marks)], [len(row.marks)], PAGE_TOKENS)
                    assert len(passage.disk_in) <= 1
        for row in [*block.rows]:
            block.release(row)
        assert block.cache.num_free_pages("disk") == NUM_PAGES
    finally:
        block.file.close()


def test_only_whole_disk_pages_cross_the_disk(directory: Path) -> None:
    block = Block(directory)
    try:
        block.admit("disk", [14])
        block.sweep([6])  # one page and a half
        written = block.traffic.moved["disk write"]
        assert written == sum(FAR_PAGE_BYTES)
        block.sweep([1])  # read the full page, the other is in RAM
        assert block.traffic.moved["disk read"] == sum(FAR_PAGE_BYTES)
        assert block.traffic.moved["disk write"] == written
        block.sweep([1])  # now the second page is full
        assert block.traffic.moved["disk write"] == 2 * sum(FAR_PAGE_BYTES)
    finally:
        block.file.close()


def test_pages_beyond_those_there_are_a_bug(directory: Path) -> None:
    block = Block(directory)
    try:
        with pytest.raises(AssertionError, match="25 pages wanted, 24 are free"):
            block.cache.admit("cpu", [(0, 25 * PAGE_TOKENS)])
    finally:
        block.file.close()
