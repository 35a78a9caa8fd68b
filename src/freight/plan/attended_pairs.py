"""(query, key) pairs that rows attend: of keys of their own, and of those that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from freight.model.batch import RowSpan
from freight.model.programme import Attend

__all__ = ["Part", "own_parts", "pairs_of", "seen_keys"]


class Part(NamedTuple):
    """What of a row's keys is attended for itself: many of them, made again and again."""

    num_new: int
    kv_len: int
    total_len: int


def own_parts(
    step: Attend, spans: Sequence[RowSpan], least: int
) -> tuple[Sequence[RowSpan] | Sequence[Part], float]:
    """The rows without the keys that at least so many of them share, and the (query, key) pairs of
    those."""
    counts = Counter(span.prefix for span in spans if span.prefix is not None)
    if step.share < 1 or not counts:
        return spans, 0.0
    own: list[Part] = []
    pairs = 0.0
    for span in spans:
        part = Part(span.num_new, span.kv_len, span.total_len)
        if span.prefix is not None and counts[span.prefix] >= least:
            pairs += pairs_of(part, step.window)
            shared = span.shared_len
            part = Part(span.num_new, span.kv_len - shared, part.total_len - shared)
            pairs -= pairs_of(part, step.window)
        own.append(part)
    return own, pairs


def seen_keys(step: Attend, spans: Sequence[RowSpan] | Sequence[Part]) -> float:
    """Keys that rows with one query each attend."""
    lengths = (span.total_len for span in spans if span.num_new == 1)
    return sum(min(length, step.window or length) for length in lengths)


def pairs_of(span: RowSpan | Part, window: int | None) -> float:
    """(query, key) pairs of a row: causal, within the window."""
    first, last = span.kv_len + 1, span.total_len
    if window is None or last <= window:
        return (first + last) * span.num_new / 2
    if first >= window:
        return window * span.num_new
    growing = window - first + 1
    return (first + window) * growing / 2 + window * (span.num_new - growing)
