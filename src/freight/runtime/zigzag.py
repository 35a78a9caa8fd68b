"""Zig-zag: a block is filled, and runs until the last of its rows has ended.

Knows tokens and pages, no weights and no sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from freight.memory.passage import Home
from freight.runtime.admission import Admission, by_key
from freight.runtime.answers import Row
from freight.runtime.request import Request

__all__ = ["ZigZag"]


class ZigZag(Admission):
    """A block at a time, with pages for the rows' whole lives."""

    def admit(self) -> None:
        if self.has_rows():
            return
        self._prefixes.begin_block()
        answer = self._waiting.peek()
        has_pages = self._policy.kv.share(self._policy.compute_tier) == 1
        has_pages |= self._prefixes.elsewhere
        self._forget(answer.request if answer is not None and has_pages else None)
        for k in range(self._policy.num_micro_batches):
            if self._waiting.is_empty():
                return
            self._prefixes.begin_batch()
            self._kv.begin_batch()
            self.block[k] = by_key(self._fill())

    def lend(self, k: int, row: Row, most: int) -> int:
        return most

    def _fill(self) -> list[Row]:
        """As many of the next rows as the micro-batch takes.

        Samples of one request stay together unless there are more than a micro-batch takes.
        """
        size = self._policy.micro_batch_size
        rows: list[Row] = []
        tokens = 0
        begun: set[int] = set()
        while len(rows) < size and (answer := self._waiting.peek()):
            tokens += self._brought(answer.request, begun)
            count = min(answer.num_waiting, size)
            is_full = tokens > self._policy.max_batch_tokens or len(rows) + count > size
            if rows and is_full:
                break
            rows += self._waiting.take(count)
        return self._reserve(rows)

    def _brought(self, request: Request, begun: set[int]) -> int:
        """Tokens that a request brings to its micro-batch; where no keys are kept, the beginning
        that it shares too, unless it is among those that have ``begun``."""
        tokens, shared = len(request.prompt_ids), self._prefixes.num_tokens(request)
        if self._kv.is_kept or not shared:
            return tokens - shared
        assert request.prefix is not None
        is_known = request.prefix.key in begun
        begun.add(request.prefix.key)
        return tokens - shared * is_known

    def _reserve(self, rows: Sequence[Row]) -> list[Row]:
        """Pages for the rows' whole lives, on the tiers by the policy's shares; the rows, and
        before them those that compute what they share."""
        first = 0
        beginnings: list[Row] = []
        for seat, (tier, is_delegated, count) in enumerate(self._policy.homes(len(rows))):
            if not count:
                continue
            members, home = rows[first : first + count], self._home(tier)
            for row in members:
                row.seat = seat
            if not is_delegated:
                members = [row for row in members if not self._share(row, home, beginnings)]
            wanted = [(row.key, row.most_tokens) for row in members]
            if wanted:
                self._kv.admit(home, wanted, is_delegated=is_delegated)
            first += count
        return [*beginnings, *rows]

    def _share(self, row: Row, home: Home, beginnings: list[Row]) -> bool:
        """Let a row share the beginning of its prompt; False if it has none to share."""
        request = row.answer.request
        if not self._prefixes.num_tokens(request, home):
            return False
        prefix = self._prefixes.find(request)
        if prefix is None:
            self._forget(request)
            prefix = self._prefixes.hold(request, row.entry)
            prefix.seat = row.seat
            beginnings.append(prefix)
        self._prefixes.admit([(row, row.most_tokens)], prefix, home)
        return True
