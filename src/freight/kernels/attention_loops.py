"""Attention of single queries over keys and values in pages, as loops that numba compiles.

For each row and each head of keys: all queries that share the head meet a page, first for scores,
then, once these are weights, for values. Numbers are taken as they lie; what is compressed, or is
not whole vectors, is made plain in the nearest cache first. No row is padded. Threads are the
caller's business.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.attention_steps import (
    PageShape,
    cap,
    head_at,
    inverse,
    make_plain,
    stretch_at,
    weigh,
)
from freight.kernels.cache_lines import whole_lines, zero_lines
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.open_mp import share_ranges
from freight.kernels.page_loops import meet_page
from freight.kernels.vectors import (
    WIDTH,
    add,
    is_above,
    load,
    multiply,
    of_bits,
    splat,
    store,
    total,
)

__all__ = ["PageShape", "attend_heads", "heads_together"]

U = np.uintp
F = np.float32
_WIDTH = U(WIDTH)


def _meet_stretch(
    raw: Any, halves: Any, shape: Any, stretch: Any, are_values: Any, room: Any, own: Any
) -> None:
    """What ``meet_page`` does, with the tokens of a stretch as ``stretch_at`` has it, however they
    lie; ``own`` is what it takes after the width."""
    raise NotImplementedError


@overload(_meet_stretch, jit_options=UNCOUNTED)
def _choose_meet_stretch(raw, halves, shape, stretch, are_values, room, own):  # type: ignore[no-untyped-def]
    return _meet_codes if raw.dtype.bitwidth == 8 else _meet_numbers


def _meet_numbers(raw, halves, shape, stretch, are_values, room, own):  # type: ignore[no-untyped-def]
    at, tokens, ahead = stretch
    if shape.token_stride == shape.padded:
        meet_page(are_values, raw, at, ahead, tokens, shape.padded, *own)
    else:
        make_plain(raw, halves, at, tokens, shape, room, ahead)
        meet_page(are_values, room, U(0), U(0), tokens, shape.padded, *own)


def _meet_codes(raw, halves, shape, stretch, are_values, room, own):  # type: ignore[no-untyped-def]
    at, tokens, ahead = stretch
    make_plain(raw, halves, at, tokens, shape, room, ahead)
    meet_page(are_values, room, U(0), U(0), tokens, shape.padded, *own)


@uncounted
def _meet_pages(raw, halves, shape, pages, seen, after, are_values, room, own):  # type: ignore[no-untyped-def]
    """The same with all tokens that are ``seen``, from one to before another; what comes ``after``
    is fetched at last. ``own`` are vectors, the first one's place, how many, and their numbers,
    where these begin and how far apart."""
    vectors, first, count, numbers, begin, stride = own
    start, end = seen
    position, offset = start, shape.to_values if are_values else U(0)
    while position < end:
        stretch = stretch_at(shape, pages, position, end, offset, after)
        place = begin + position - start
        rest = vectors, first, count, numbers, place, stride
        _meet_stretch(raw, halves, shape, stretch, are_values, room, rest)
        position += stretch[1]


@uncounted
def _count_above(scores, base, length, border):  # type: ignore[no-untyped-def]
    sums, border = splat(F(0.0)), splat(border)
    for place in range(0, length, WIDTH):
        sums = add(sums, is_above(load(scores, base + U(place)), border))
    return U(total(sums))


@uncounted
def _number_at(rank):  # type: ignore[no-untyped-def]
    """The float32 with this rank among all of them."""
    half = np.uint32(0x80000000)
    return of_bits(rank ^ half if rank >= half else ~rank)


@uncounted
def _choose(scores, base, count, length, keep, chosen):  # type: ignore[no-untyped-def]
    """The ``keep`` places with the highest of ``count`` scores, in order, into ``chosen``; the
    others become minus infinity. Up to ``length`` there are only such. What is no number counts as
    highest, and stays."""
    # Numbers are halved until just ``keep`` scores are above one, or, where some are equal, until
    # it is the smallest that fewer are above.
    low, high = np.uint32(0), np.uint32(0xFF800000)
    while low < high:
        middle = low + (high - low) // np.uint32(2)
        above = _count_above(scores, base, length, _number_at(middle))
        if above < keep:
            high = middle
        elif above > keep:
            low = middle + np.uint32(1)
        else:
            low = high = middle
    border = _number_at(low)
    equal = keep - _count_above(scores, base, length, border)
    found = U(0)
    for place in range(count):
        at = base + U(place)
        is_equal = scores[at] == border and equal > U(0)
        if is_equal:
            equal -= U(1)
        is_below = scores[at] <= border and not is_equal
        if is_below:
            scores[at] = F(-np.inf)
        elif found < keep:  # more than that only where scores are no numbers
            chosen[found] = U(place)
            found += U(1)


@uncounted
def _sum_chosen(raw, halves, shape, pages, start, chosen, count, room, sums, own, weights, base):  # type: ignore[no-untyped-def]
    """The values of the chosen places by their weights onto the sums of one query."""
    for number in range(count):
        position = start + chosen[number]
        turn, place = position // shape.page_tokens, position % shape.page_tokens
        at = head_at(shape, pages, turn, shape.to_values) + place * shape.token_stride
        rest = sums, own, U(1), weights, base + chosen[number], U(0)
        _meet_stretch(raw, halves, shape, (at, U(1), at), True, room, rest)


@njit(nogil=True, cache=True, boundscheck=False)
def attend_heads(  # type: ignore[no-untyped-def]
    first, last, raw, halves, shape, pages, starts, ends, queries, sums, lses, limit, share
):
    """The heads ``first`` to ``last`` of all rows' heads of keys.

    raw: the pool as a flat array of float32, of uint16 that are bfloat16, or of bytes, which
    ``halves`` has as uint16. pages [rows, heads, pages]: numbers of [page, head]. starts, ends
    [rows]: the keys that a row's queries see. queries [heads * queries * padded], scaled; sums, of
    the same shape, are zero and become what was attended; lses [heads * queries] become the
    log-sum-exps. limit: of capped scores, else 0. share: of a query's keys, those with the highest
    scores, that count.
    """
    num_heads = pages.shape[1]
    count = U(queries.shape[0]) // (U(pages.shape[0] * num_heads) * shape.padded)
    longest = U(0)
    for row in range(starts.shape[0]):
        longest = max(longest, U(ends[row] - starts[row]))
    stride = (longest + U(2 * WIDTH)) // _WIDTH * _WIDTH
    scores = whole_lines(count * stride)
    chosen = np.empty(longest if share < 1 else U(0), np.uintp)
    plain = zero_lines(shape.page_tokens * shape.padded)
    for job in range(first, last):
        row, head = job // num_heads, job % num_heads
        start, end = U(starts[row]), U(ends[row])
        own = U(job) * count * shape.padded
        table, seen = pages[row, head], end - start
        keep = max(U(1), U(np.ceil(share * np.float64(seen))))
        rest = queries, own, count, scores, U(0), stride
        after = head_at(shape, table, start // shape.page_tokens, shape.to_values)
        _meet_pages(raw, halves, shape, table, (start, end), after, False, plain, rest)
        length = (seen + _WIDTH - U(1)) // _WIDTH * _WIDTH
        for query in range(count):
            base = U(query) * stride
            if limit > 0:
                cap(scores, base, seen, limit)
            for place in range(seen, length):
                scores[base + U(place)] = F(-np.inf)
            if keep < seen:
                _choose(scores, base, seen, length, keep, chosen)
            weight, highest = weigh(scores, base, length)
            lses[U(job) * count + U(query)] = highest + np.log(weight)
            factor = inverse(weight)
            for place in range(0, length, WIDTH):
                at = base + U(place)
                store(scores, at, multiply(load(scores, at), splat(factor)))
            if keep < seen:
                at = own + U(query) * shape.padded
                _sum_chosen(
                    raw, halves, shape, table, start, chosen, keep, plain, sums, at, scores, base
                )
        if keep >= seen:
            rest = sums, own, count, scores, U(0), stride
            following = min(job + 1, last - 1)
            row, head = following // num_heads, following % num_heads
            after = head_at(shape, pages[row, head], U(starts[row]) // shape.page_tokens, U(0))
            _meet_pages(raw, halves, shape, table, (start, end), after, True, plain, rest)


@njit(nogil=True, cache=True)
def heads_together(threads, counters, borders, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(attend_heads, (counters, borders), (), others, threads)
