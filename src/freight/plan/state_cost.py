"""What it takes to change what rows keep beside keys and values in pages, and to attend it.

Knows spans of tokens and what a unit reaches, no tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from freight.hardware.machine import ComputeUnit
from freight.model.batch import RowSpan
from freight.model.kept_steps import AttendChosen, AttendKept
from freight.model.programme import Unit

__all__ = ["states_s"]

_PASSES: Final = 2.0
_PASSES_PER_TOKEN: Final = 0.2
"""A row's matrices are read and written once, however many tokens it brings; what each of them does
goes on in a cache."""
_SHARE_OF_RATE: Final = 0.3
"""Of that of attention in pages: keys that are kept as a state are attended by torch's steps."""
_CALLS: Final = 3.0
"""Of a unit's own, before any row is looked at: these are many steps."""
_PASSES_OF_KEYS: Final = 4.0
"""How often the keys of a row pass that brings one token: they are put together first."""


def states_s(
    unit: Unit, spans: Sequence[RowSpan], own: ComputeUnit, dtype: str, size: int
) -> float:
    """Seconds of a unit for all rows of a micro-batch: what they keep is read, changed by each
    token, and written; keys among it are attended by arithmetic, and where a row brings one token
    read for that alone."""
    plain, wide = unit.state_numbers()
    tokens = sum(span.num_new for span in spans)
    passes = _PASSES * len(spans) + _PASSES_PER_TOKEN * (tokens - len(spans))
    passed = 4 * wide * passes + _PASSES * len(spans) * plain * size
    seconds = 0.0
    rate = _SHARE_OF_RATE * own.attention_flops[own.nearest_dtype(dtype)]
    for step in unit.steps:
        if isinstance(step, AttendKept):
            pairs = [_pairs(step, span.kv_len, span.total_len) for span in spans]
            flops = 4.0 * step.num_heads * step.width * sum(pairs)
            if (own_choice := step.choose) is not None:
                every = own_choice.compress.rate
                seen = sum(_up_to(o.total_len, every) - _up_to(o.kv_len, every) for o in spans)
                flops += 2 * own_choice.num_heads * own_choice.width * seen
            seconds += flops / rate + _CALLS * own.call_s
            single = zip(pairs, spans, strict=True)
            read = sum(count for count, span in single if span.num_new == 1)
            passed += _PASSES_OF_KEYS * read * step.width * size
        elif isinstance(step, AttendChosen):
            made, taken = _chosen(step, spans)
            seconds += made / rate + _CALLS * own.call_s
            passed += _PASSES_OF_KEYS * taken * size
    return seconds + passed / own.memory_bytes_per_s


def _chosen(step: AttendChosen, spans: Sequence[RowSpan]) -> tuple[float, float]:
    """What is multiplied for all queries, the indexer's first; and the numbers of keys that rows of
    one token read."""
    flops = read = 0.0
    for span in spans:
        seen = (span.kv_len + 1 + span.total_len) / 2
        attended = min(seen, step.num_chosen) if span.num_new == 1 else seen
        per_key = 2 * step.index_heads * step.index_numbers * seen
        flops += span.num_new * (per_key + 4 * step.num_heads * step.width * attended)
        if span.num_new == 1:
            read += seen * step.index_numbers + attended * step.width
    return flops, read


def _pairs(step: AttendKept, first: int, last: int) -> int:
    """Of queries at positions ``first`` to ``last`` and the keys that each sees: of the window, and
    compressed ones."""
    within = min(max(step.window - first, 0), last - first)
    pairs = within * (2 * first + within + 1) // 2 + (last - first - within) * step.window
    if step.compress is not None:
        rate = step.compress.rate
        pairs += _up_to(last, rate) - _up_to(first, rate)
    return pairs


def _up_to(count: int, rate: int) -> int:
    """The sum of (p + 1) // rate over positions p below ``count``."""
    whole, rest = divmod(count + 1, rate)
    return rate * whole * (whole - 1) // 2 + whole * rest
