"""The micro-batch: flat tokens of some rows, whatever phase each row is in.

Prefill, a chunk of it, decode, mixtures and scoring are all this value; there are no rectangles to
pad. Knows no tensors, no tier and no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = [
    "GROUP_BYTES",
    "LEAST_SHARERS",
    "LOOP_BYTES",
    "PROMPT_BYTES",
    "QUERY_BLOCK",
    "STATE_BLOCK",
    "STATE_BYTES",
    "STATE_PAIRS",
    "STEM_BYTES",
    "MicroBatch",
    "RowKey",
    "RowSpan",
    "chunk_rows",
    "first_page",
]

GROUP_BYTES: Final = 16 << 20
"""Rows attended together: their keys and values, and their scores, each stay under this (one row
may exceed it). Enough to keep the cores busy, and near the caches."""

LOOP_BYTES: Final = 4 << 20
"""Likewise of single queries, and what they find, which loops attend where the keys are."""

PROMPT_BYTES: Final = 64 << 20
"""Likewise of whole prompts, which a device attends without holding scores: it wants much at once.
"""

STATE_BYTES: Final = 2 << 20
"""Tokens of several rows whose states torch changes together, in float32, or these states, stay
under this (one row's may exceed it)."""

STATE_BLOCK: Final = 64
"""Tokens of a row that it takes at once."""

STATE_PAIRS: Final = 16
"""Likewise where each row of a matrix decays by a rate of its own: pairs of them then have numbers
as rows have."""

QUERY_BLOCK: Final = 256
"""Queries of one row attended at once."""

LEAST_SHARERS: Final = {"cpu": 64, "gpu": 8}
"""Rows from which on it is worth to attend together what they share, by the tier that computes: of
fewer each sees the keys sooner by itself, in place, than what is found can be merged."""

STEM_BYTES: Final = 1 << 20
"""Queries of several rows that are attended together over what they share stay under this (one
token's may exceed it)."""


class RowKey(NamedTuple):
    """Names a row for the whole job: a request, and which of its samples."""

    request: int
    sample: int = 0


class RowSpan(NamedTuple):
    """What one row brings to one sweep.

    ``row`` names the row for the whole job; ``start`` is its first token in the flat batch,
    ``num_new`` how many tokens it brings, ``kv_len`` how many keys it has already.
    ``logit_positions`` are the tokens, relative to ``start``, after which a token is sampled;
    ``scored`` those whose following token is scored, which for the last of them may be ``next_id``,
    the token after these. ``prompt_len`` counts the row's prompt, whose tokens are rotated alike
    whichever sweep brings them; those behind it as when they were made. ``siblings`` are rows that
    have brought and bring the same tokens: they are computed once, and all get the keys. The first
    ``shared_len`` keys are those of the row ``prefix``, which others have too. Of ``written_len``
    tokens, if that is more than ``kv_len``, keys were written, and the last of these do not count.
    """

    row: RowKey
    start: int
    num_new: int
    kv_len: int
    logit_positions: tuple[int, ...]
    scored: range = range(0)
    next_id: int = -1
    prompt_len: int = 0
    siblings: tuple[RowKey, ...] = ()
    prefix: RowKey | None = None
    shared_len: int = 0
    written_len: int = 0

    @property
    def keys(self) -> tuple[RowKey, ...]:
        return (self.row, *self.siblings)

    @property
    def end(self) -> int:
        return self.start + self.num_new

    @property
    def total_len(self) -> int:
        return self.kv_len + self.num_new

    @property
    def brings_made(self) -> bool:
        """Whether tokens behind the prompt are among those that it brings."""
        return self.total_len > self.prompt_len

    @property
    def is_single(self) -> bool:
        """One token of one row, behind others that have keys."""
        return self.num_new == 1 and self.kv_len > 0 and not self.siblings

    def behind_prefix(self) -> RowSpan:
        """The same tokens with the keys alone that no other row has. What is counted from one of
        the row's tokens to another, as a window is, stays right."""
        return self._replace(
            kv_len=self.kv_len - self.shared_len,
            prompt_len=self.prompt_len - self.shared_len,
            written_len=max(0, self.written_len - self.shared_len),
            prefix=None,
            shared_len=0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The rows computed together, with their tokens one after the other (T in all).

    ``index`` is the micro-batch's place in the block: its activations and KV slots go by it.
    ``num_picked`` are the tokens that the head needs, once for each thing that it needs them for.
    """

    index: int
    rows: tuple[RowSpan, ...]
    token_ids: Sequence[int]
    num_picked: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        start = num_picked = 0
        for span in self.rows:
            assert span.start == start and span.num_new > 0, span
            start += span.num_new
            num_picked += len(span.logit_positions) + len(span.scored)
        object.__setattr__(self, "num_picked", num_picked)
        assert start == len(self.token_ids), (start, len(self.token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        return sum(len(span.logit_positions) for span in self.rows)

    @property
    def num_scored(self) -> int:
        return sum(len(span.scored) for span in self.rows)

    def logit_indices(self) -> list[int]:
        """Places in the flat batch after which tokens are sampled, rows in order."""
        return [span.start + place for span in self.rows for place in span.logit_positions]

    def picked_indices(self) -> list[int]:
        """Places in the flat batch that the head needs: those sampled after, then those scored."""
        scored = [span.start + place for span in self.rows for place in span.scored]
        return self.logit_indices() + scored

    def picked_spans(self) -> list[RowSpan]:
        """What it needs as spans of their own, of tokens that follow each other, in that order."""
        runs = [(span, own) for span in self.rows for own in _runs(span.logit_positions)]
        runs += [(span, span.scored) for span in self.rows if span.scored]
        spans, start = list[RowSpan](), 0
        for span, own in runs:
            kv_len = span.kv_len + own.start
            found = span._replace(start=start, num_new=len(own), kv_len=kv_len, siblings=())
            spans.append(found._replace(logit_positions=(), scored=range(0)))
            start += len(own)
        return spans

    def scored_targets(self) -> list[int]:
        """The tokens that are scored, rows in order."""
        return [
            span.next_id if place + 1 == span.num_new else self.token_ids[span.start + place + 1]
            for span in self.rows
            for place in span.scored
        ]


def _runs(places: Sequence[int]) -> Iterator[range]:
    """Ascending places as ranges of those that follow each other."""
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield range(places[first], places[end - 1] + 1)
            first = end


def first_page(kv_len: int, page_tokens: int, window: int | None) -> int:
    """The first page of keys that the token behind so many sees: it attends the last ones, itself
    included, or all."""
    return 0 if window is None else max(0, kv_len + 1 - window) // page_tokens


def chunk_rows(rows: Sequence[RowSpan], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut rows into ranges [first, last) of at most ``max_tokens`` tokens, or of one longer row."""
    first, tokens = 0, 0
    for place, span in enumerate(rows):
        if place > first and tokens + span.num_new > max_tokens:
            yield first, place
            first, tokens = place, 0
        tokens += span.num_new
    if first < len(rows):
        yield first, len(rows)
