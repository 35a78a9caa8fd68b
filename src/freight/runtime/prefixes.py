"""Beginnings of prompts that many rows have: their keys and values are computed once and shared.

A beginning is a row of its own that makes no tokens and stays for as long as rows come that need
it. Whole pages are shared, and lie on the compute tier wherever the rows' own are. Knows rows and
pages, no micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freight.memory.kv_cache import KVCache
from freight.memory.passage import Home
from freight.model.batch import RowKey
from freight.runtime.answers import Answer, Row
from freight.runtime.params import SamplingParams
from freight.runtime.request import Request

__all__ = ["Prefixes"]


@dataclass(kw_only=True, slots=True)
class _Held:
    """A beginning that has pages, and how many rows share them."""

    row: Row
    num_sharers: int = 0


@dataclass(kw_only=True, slots=True)
class Prefixes:
    """The beginnings that are there, by key. Rows share them whose own pages are on the compute
    tier too, and those ``elsewhere`` where pages for the beginnings were planned beside theirs.
    Where pages are not kept a beginning is there for the rows of one micro-batch; ``passed`` are
    those of the block's micro-batches before."""

    kv: KVCache
    is_on: bool
    elsewhere: bool = False
    held: dict[int, _Held] = field(default_factory=dict)
    passed: list[RowKey] = field(default_factory=list)
    num_held: int = 0

    def begin_block(self) -> None:
        """No row is left of the block before."""
        if not self.kv.is_kept:
            self.begin_batch()
            for key in self.passed:
                self.kv.release(key)
            self.passed = []

    def begin_batch(self) -> None:
        """The next micro-batch is admitted."""
        if not self.kv.is_kept:
            self.passed += [held.row.key for held in self.held.values()]
            self.held = {}

    def num_tokens(self, request: Request, home: Home = "compute") -> int:
        """How many of the request's first tokens can be shared by a row that is there: those of
        whole pages, and none where they are to be scored."""
        if not self.is_on or request.prefix is None or not (home == "compute" or self.elsewhere):
            return 0
        page = self.kv.page_tokens
        count = request.prefix.num_tokens // page * page
        is_scored = request.params.prompt_logprobs is not None and request.score_from <= count
        return 0 if is_scored or count >= request.num_computed else count

    def may_part(self, new: Row | Answer) -> bool:
        """Whether samples of a request may come one by one: hardly any of their prompt is then
        computed more than once."""
        if not isinstance(new, Answer) or not (shared := self.num_tokens(new.request)):
            return False
        return new.request.num_computed - shared <= 2 * self.kv.page_tokens

    def find(self, request: Request) -> Row | None:
        """The row of the request's beginning, if it has pages."""
        if not self.num_tokens(request):
            return None
        assert request.prefix is not None
        held = self.held.get(request.prefix.key)
        return None if held is None else held.row

    def hold(self, request: Request, entry: int) -> Row:
        """Reserve pages for the beginning of ``request``; the row that is to compute it."""
        assert request.prefix is not None
        key, count = request.prefix.key, self.num_tokens(request)
        answer = Answer(
            Request(
                index=-1 - key,
                prompt_ids=request.prompt_ids[:count],
                params=SamplingParams(max_tokens=1),
            ),
            tokenizer=None,
        )
        (row,) = answer.start(1)
        row.key = RowKey(request=-1 - key, sample=self.num_held)
        self.num_held += 1
        row.entry, row.is_prefix = entry, True
        self.kv.admit("compute", [(row.key, count)])
        self.held[key] = _Held(row=row)
        return row

    def admit(self, rows: Sequence[tuple[Row, int]], prefix: Row, home: Home = "compute") -> None:
        """Pages for (row, tokens) that share those of ``prefix``: their own for the tokens behind
        them."""
        self.kv.admit(home, [(row.key, count) for row, count in rows], shared=prefix.key)
        for row, _ in rows:
            row.prefix = prefix
        self._of(prefix).num_sharers += len(rows)

    def leave(self, row: Row) -> None:
        """A row that may share a beginning gives its pages up."""
        if row.prefix is not None:
            held = self.held.get(-1 - row.prefix.key.request)
            if held is not None and held.row is row.prefix:
                held.num_sharers -= 1
            row.prefix = None

    def forget_others(self, request: Request | None) -> list[RowKey]:
        """Free the pages of beginnings that no row has and the next one cannot use."""
        wanted = None
        if request is not None and request.prefix is not None and self.num_tokens(request):
            wanted = request.prefix.key
        idle = [k for k, held in self.held.items() if not held.num_sharers and k != wanted]
        keys = [self.held.pop(key).row.key for key in idle]
        for key in keys:
            self.kv.release(key)
        return keys

    def num_pages(self) -> int:
        """Pages of all beginnings that are there."""
        return sum(len(self.kv.rows[held.row.key].pages) for held in self.held.values())

    def _of(self, prefix: Row) -> _Held:
        return self.held[-1 - prefix.key.request]
