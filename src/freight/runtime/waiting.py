"""Rows that are yet to enter, in their order. Knows requests and rows, no pages."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from freight.runtime.answers import Answer, Row
from freight.runtime.request import Request
from freight.runtime.tokenizer import Tokenizer

__all__ = ["Waiting"]


class Waiting:
    """Rows that are yet to enter: those that gave their pages up, then samples of the requests."""

    def __init__(self, requests: Iterator[Request], tokenizer: Tokenizer | None) -> None:
        self._requests = requests
        self._tokenizer = tokenizer
        self._held: Answer | None = None
        self._returned: list[Row] = []  # those first that came first
        self._num_entered = 0

    def peek(self) -> Answer | None:
        """The request at the head of the queue, of which samples are still to enter."""
        if self._held is None and (request := next(self._requests, None)) is not None:
            self._held = Answer(request, tokenizer=self._tokenizer)
        return self._held

    def has_at_hand(self) -> bool:
        """Whether there are rows, or a request that was drawn."""
        return bool(self._returned) or self._held is not None

    def is_empty(self) -> bool:
        return not self._returned and self.peek() is None

    def next_rows(self, most: int) -> tuple[Row | Answer, int]:
        """What enters next, a row that was here before or a request, and how many rows of it."""
        if self._returned:
            return self._returned[0], 1
        answer = self.peek()
        assert answer is not None
        return answer, min(answer.num_waiting, most)

    def take(self, count: int) -> list[Row]:
        """The next ``count`` rows, of one request."""
        if self._returned:
            return [self._returned.pop(0)]
        answer = self.peek()
        assert answer is not None
        rows = answer.start(count)
        for row in rows:
            row.entry = self._num_entered
            self._num_entered += 1
        if not answer.num_waiting:
            self._held = None
        return rows

    def put_back(self, row: Row) -> None:
        """A row that is to be computed again, before those that came after it."""
        insort(self._returned, row, key=lambda own: own.entry)
