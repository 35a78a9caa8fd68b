"""Which row of a batch a row of the job is, and in which calls the rows of a micro-batch come.

A call is a rectangle, so rows that bring about as many tokens come together: those that bring less
than half of the widest are in another call, and what is longer than a call may be comes in pieces.
Ranks that cut rows have as many rows each, so a call has as many of each part; who is missing is
made up by rows that bring nothing. Knows tokens, no tensors and no layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from freight.memory.kv_cache import KVCache
from freight.model.batch import MicroBatch, RowKey

__all__ = ["Call", "ScoredRow", "Seats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRow:
    """Of the ``row`` of a call those of its tokens from ``first`` on whose next ones, ``targets``,
    are scored; ``place`` is that of the first of these among all of the micro-batch."""

    row: int
    first: int
    targets: Sequence[int]
    place: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Rows of a batch that are computed at once: their ``seats`` in order, how many tokens each has
    and which it brings. Of ``wanted`` logits each is (row of the call, place in the micro-batch).
    ``scored`` are its rows' tokens whose next ones are scored.
    """

    seats: tuple[int, ...]
    kv_lens: tuple[int, ...]
    tokens: tuple[Sequence[int], ...]
    wanted: tuple[tuple[int, int], ...]
    scored: tuple[ScoredRow, ...] = ()

    @property
    def width(self) -> int:
        return max(map(len, self.tokens))

    @property
    def num_padded(self) -> int:
        """Tokens with their padding."""
        return len(self.seats) * self.width

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a row brings: its tokens behind ``kv_len`` others; ``place`` of the logits after the
    last of them, -1: none. From token ``first`` on ``targets`` are scored, which are from
    ``scored_place`` on among all of the micro-batch."""

    seat: int
    kv_len: int
    tokens: Sequence[int]
    place: int
    first: int = 0
    targets: Sequence[int] = ()
    scored_place: int = 0

    def cut(self, count: int) -> tuple[_Piece, _Piece]:
        """The first ``count`` tokens, and the rest."""
        here = min(max(0, count - self.first), len(self.targets))
        first = replace(self, tokens=self.tokens[:count], place=-1, targets=self.targets[:here])
        rest = replace(
            self,
            kv_len=self.kv_len + count,
            tokens=self.tokens[count:],
            first=max(0, self.first - count),
            targets=self.targets[here:],
            scored_place=self.scored_place + here,
        )
        return first, rest


class Seats:
    """``count`` of them in ``parts`` equal parts, for the rows that have ``pages``. A call has up
    to ``most_tokens``, or a token of each part."""

    def __init__(self, count: int, parts: int, pages: KVCache, most_tokens: int) -> None:
        self._size = count // parts
        self._pages = pages
        self._free = [list(range(p * self._size, (p + 1) * self._size)) for p in range(parts)]
        self._taken: dict[RowKey, int] = {}
        self._most_tokens = max(most_tokens, parts)

    def calls(self, work: MicroBatch) -> tuple[list[Call], list[int]]:
        """The calls for a micro-batch in order, and the seats that nobody has."""
        for key in [key for key in self._taken if key not in self._pages.rows]:
            seat = self._taken.pop(key)
            self._free[seat // self._size].append(seat)
        pieces: list[_Piece] = []
        place, targets, num_scored = -1, work.scored_targets(), 0
        for span in work.rows:
            place += bool(span.logit_positions)
            own = work.token_ids[span.start : span.end]
            for key in span.keys:
                wanted = place if span.logit_positions and key == span.row else -1
                piece = _Piece(self._seat(key), span.kv_len, own, wanted)
                if key == span.row:
                    mine = targets[num_scored : num_scored + len(span.scored)]
                    first = span.scored.start
                    piece = replace(piece, first=first, targets=mine, scored_place=num_scored)
                pieces.append(piece)
            num_scored += len(span.scored)
        found: list[Call] = []
        while pieces:
            turn, pieces = self._turn(pieces)
            found += self._grouped(turn)
        return found, [seat for part in self._free for seat in part]

    def _seat(self, key: RowKey) -> int:
        """Of the part with most room, the first one."""
        if key not in self._taken:
            part = max(self._free, key=len)
            part.sort()
            self._taken[key] = part.pop(0)
        return self._taken[key]

    def _turn(self, pieces: Sequence[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
        """Of all rows what a call takes, and what is left for later."""
        widest = self._most_tokens // len(self._free)
        turn, left = [], []
        for piece in pieces:
            if len(piece.tokens) > widest:
                piece, rest = piece.cut(widest)
                left.append(rest)
            turn.append(piece)
        return turn, left

    def _grouped(self, pieces: list[_Piece]) -> Iterator[Call]:
        together: list[_Piece] = []
        for piece in sorted(pieces, key=lambda own: -len(own.tokens)):
            if together:
                width = len(together[0].tokens)
                is_narrow = 2 * len(piece.tokens) < width
                if is_narrow or self._rows([*together, piece]) * width > self._most_tokens:
                    yield self._call(together)
                    together = []
            together.append(piece)
        yield self._call(together)

    def _rows(self, pieces: Sequence[_Piece]) -> int:
        """Of a call: as many of each part as of that which has most."""
        counts = [0] * len(self._free)
        for piece in pieces:
            counts[piece.seat // self._size] += 1
        return max(counts) * len(counts)

    def _call(self, pieces: Sequence[_Piece]) -> Call:
        own = {piece.seat: piece for piece in pieces}
        rows = self._rows(pieces) // len(self._free)
        if max(len(piece.tokens) for piece in pieces) == 1:
            # Programmes are written for each number of rows, and keys of some are copied: single
            # tokens come with a power of two of them, or with all.
            rows = 1 << (rows - 1).bit_length()
            rows = rows if 2 * rows <= self._size else self._size
        seats: list[int] = []
        for part in range(len(self._free)):
            here = range(part * self._size, (part + 1) * self._size)
            chosen = [seat for seat in here if seat in own]
            idle = [seat for seat in here if seat not in own]
            seats += sorted([*chosen, *idle[: rows - len(chosen)]])
        return Call(
            seats=tuple(seats),
            kv_lens=tuple(own[seat].kv_len if seat in own else 0 for seat in seats),
            tokens=tuple(own[seat].tokens if seat in own else () for seat in seats),
            wanted=tuple(
                (row, own[seat].place)
                for row, seat in enumerate(seats)
                if seat in own and own[seat].place >= 0
            ),
            scored=tuple(
                ScoredRow(
                    row=row,
                    first=own[seat].first,
                    targets=own[seat].targets,
                    place=own[seat].scored_place,
                )
                for row, seat in enumerate(seats)
                if seat in own and own[seat].targets
            ),
        )
