"""Attention of single queries over keys and values in pages, as loops that numba compiles.

For each row and each head of keys: a page is made plain in the nearest cache, and all queries that
share the head use it, first for scores, then, once these are weights, for values. No row is padded.
Threads are the caller's business.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.attention_steps import PageShape, cap, exponential, head_at, make_plain
from freight.kernels.open_mp import share_ranges
from freight.kernels.vectors import (
    WIDTH,
    add,
    is_above,
    larger,
    largest,
    load,
    multiply,
    multiply_add,
    of_bits,
    put_totals,
    put_totals_of_pairs,
    splat,
    store,
    subtract,
    total,
)

__all__ = ["PageShape", "attend_heads", "heads_together"]

U = np.uintp
F = np.float32
_WIDTH = U(WIDTH)
_FEW = 4
"""Queries, or tokens, that are worked on at once."""


@njit(nogil=True, cache=True, boundscheck=False)
def _weigh(scores, start, count):  # type: ignore[no-untyped-def]
    """Scores to what their softmax would be but for the sum; returns it, and the highest score."""
    top = splat(F(-3e38))
    for place in range(0, count, WIDTH):
        top = larger(load(scores, start + U(place)), top)
    highest = splat(largest(top))
    sums = splat(F(0.0))
    for place in range(0, count, WIDTH):
        weight = exponential(subtract(load(scores, start + U(place)), highest))
        sums = add(sums, weight)
        store(scores, start + U(place), weight)
    return total(sums), largest(top)


@njit(nogil=True, cache=True, boundscheck=False)
def _score_four(queries, first, width, plain, count, scores, start, stride):  # type: ignore[no-untyped-def]
    """Four queries, side by side from ``first`` on, with two tokens at a time; what follows the
    last score of an odd count is overwritten."""
    two, three = width * U(2), width * U(3)
    for token in range(0, count, 2):
        at = U(token) * width
        a = b = c = d = e = f = g = h = splat(F(0.0))
        for column in range(0, width, WIDTH):
            place = U(column)
            one, other = load(plain, at + place), load(plain, at + width + place)
            query = load(queries, first + place)
            a, e = multiply_add(query, one, a), multiply_add(query, other, e)
            query = load(queries, first + width + place)
            b, f = multiply_add(query, one, b), multiply_add(query, other, f)
            query = load(queries, first + two + place)
            c, g = multiply_add(query, one, c), multiply_add(query, other, g)
            query = load(queries, first + three + place)
            d, h = multiply_add(query, one, d), multiply_add(query, other, h)
        put_totals_of_pairs(scores, start + U(token), stride, a, e, b, f, c, g, d, h)


@njit(nogil=True, cache=True, boundscheck=False)
def _score_one(queries, first, width, plain, count, scores, start):  # type: ignore[no-untyped-def]
    """One query with four tokens at a time."""
    two, three = width * U(2), width * U(3)
    for token in range(0, count, _FEW):
        at = U(token) * width
        a = b = c = d = splat(F(0.0))
        for column in range(0, width, WIDTH):
            place = U(column)
            query = load(queries, first + place)
            a = multiply_add(query, load(plain, at + place), a)
            b = multiply_add(query, load(plain, at + width + place), b)
            c = multiply_add(query, load(plain, at + two + place), c)
            d = multiply_add(query, load(plain, at + three + place), d)
        put_totals(scores, start + U(token), a, b, c, d)


@njit(nogil=True, cache=True, boundscheck=False)
def _sum_four(sums, first, width, plain, count, weights, start, stride):  # type: ignore[no-untyped-def]
    """Values by their weights onto the sums of four queries, 32 columns at a time."""
    two, three = width * U(2), width * U(3)
    for column in range(0, width, 2 * WIDTH):
        at = first + U(column)
        a, b = load(sums, at), load(sums, at + _WIDTH)
        c, d = load(sums, at + width), load(sums, at + width + _WIDTH)
        e, f = load(sums, at + two), load(sums, at + two + _WIDTH)
        g, h = load(sums, at + three), load(sums, at + three + _WIDTH)
        for token in range(count):
            place = U(token) * width + U(column)
            one, other = load(plain, place), load(plain, place + _WIDTH)
            place = start + U(token)
            weight = splat(weights[place])
            a, b = multiply_add(weight, one, a), multiply_add(weight, other, b)
            weight = splat(weights[place + stride])
            c, d = multiply_add(weight, one, c), multiply_add(weight, other, d)
            weight = splat(weights[place + stride * U(2)])
            e, f = multiply_add(weight, one, e), multiply_add(weight, other, f)
            weight = splat(weights[place + stride * U(3)])
            g, h = multiply_add(weight, one, g), multiply_add(weight, other, h)
        store(sums, at, a)
        store(sums, at + _WIDTH, b)
        store(sums, at + width, c)
        store(sums, at + width + _WIDTH, d)
        store(sums, at + two, e)
        store(sums, at + two + _WIDTH, f)
        store(sums, at + three, g)
        store(sums, at + three + _WIDTH, h)


@njit(nogil=True, cache=True, boundscheck=False)
def _sum_one(sums, first, width, plain, count, weights, start):  # type: ignore[no-untyped-def]
    """Likewise of one query; two sums of every second token, so that one need not wait for the
    other."""
    even = count // 2 * 2
    for column in range(0, width, 2 * WIDTH):
        at = first + U(column)
        a, b = load(sums, at), load(sums, at + _WIDTH)
        c = d = splat(F(0.0))
        for token in range(0, even, 2):
            place = U(token) * width + U(column)
            weight = splat(weights[start + U(token)])
            a = multiply_add(weight, load(plain, place), a)
            b = multiply_add(weight, load(plain, place + _WIDTH), b)
            place += width
            weight = splat(weights[start + U(token) + U(1)])
            c = multiply_add(weight, load(plain, place), c)
            d = multiply_add(weight, load(plain, place + _WIDTH), d)
        for token in range(even, count):
            place = U(token) * width + U(column)
            weight = splat(weights[start + U(token)])
            a = multiply_add(weight, load(plain, place), a)
            b = multiply_add(weight, load(plain, place + _WIDTH), b)
        store(sums, at, add(a, c))
        store(sums, at + _WIDTH, add(b, d))


@njit(nogil=True, cache=True, boundscheck=False)
def _score(raw, halves, shape, pages, start, end, queries, first, count, plain, scores, stride):  # type: ignore[no-untyped-def]
    """Scores of ``count`` queries from ``first`` on with the keys from ``start`` to ``end``."""
    fours = count // U(_FEW) * U(_FEW)
    position = start
    while position < end:
        turn, place = position // shape.page_tokens, position % shape.page_tokens
        tokens = min(end - position, shape.page_tokens - place)
        at = head_at(shape, pages, turn, U(0)) + place * shape.token_stride
        is_last = end - position == tokens
        ahead = at if is_last else head_at(shape, pages, turn + U(1), U(0))
        make_plain(raw, halves, at, tokens, shape, plain, ahead)
        for query in range(0, fours, _FEW):
            own, row = first + U(query) * shape.padded, U(query) * stride + position - start
            _score_four(queries, own, shape.padded, plain, tokens, scores, row, stride)
        for query in range(fours, count):
            own, row = first + U(query) * shape.padded, U(query) * stride + position - start
            _score_one(queries, own, shape.padded, plain, tokens, scores, row)
        position += tokens


@njit(nogil=True, cache=True, boundscheck=False)
def _sum(raw, halves, shape, pages, start, end, sums, first, count, plain, weights, stride):  # type: ignore[no-untyped-def]
    """The values of these tokens by their weights onto the sums of ``count`` queries."""
    fours = count // U(_FEW) * U(_FEW)
    position = start
    while position < end:
        turn, place = position // shape.page_tokens, position % shape.page_tokens
        tokens = min(end - position, shape.page_tokens - place)
        at = head_at(shape, pages, turn, shape.num_heads) + place * shape.token_stride
        is_last = end - position == tokens
        ahead = at if is_last else head_at(shape, pages, turn + U(1), shape.num_heads)
        make_plain(raw, halves, at, tokens, shape, plain, ahead)
        for query in range(0, fours, _FEW):
            own, row = first + U(query) * shape.padded, U(query) * stride + position - start
            _sum_four(sums, own, shape.padded, plain, tokens, weights, row, stride)
        for query in range(fours, count):
            own, row = first + U(query) * shape.padded, U(query) * stride + position - start
            _sum_one(sums, own, shape.padded, plain, tokens, weights, row)
        position += tokens


@njit(nogil=True, cache=True, boundscheck=False)
def _count_above(scores, base, length, border):  # type: ignore[no-untyped-def]
    sums, border = splat(F(0.0)), splat(border)
    for place in range(0, length, WIDTH):
        sums = add(sums, is_above(load(scores, base + U(place)), border))
    return U(total(sums))


@njit(nogil=True, cache=True, boundscheck=False)
def _number_at(rank):  # type: ignore[no-untyped-def]
    """The float32 with this rank among all of them."""
    half = np.uint32(0x80000000)
    return of_bits(rank ^ half if rank >= half else ~rank)


@njit(nogil=True, cache=True, boundscheck=False)
def _choose(scores, base, count, length, keep, chosen):  # type: ignore[no-untyped-def]
    """The ``keep`` places with the highest of ``count`` scores, in order, into ``chosen``; the
    others become minus infinity. Up to ``length`` there are only such."""
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
        if scores[at] > border or is_equal:
            chosen[found] = U(place)
            found += U(1)
        else:
            scores[at] = F(-np.inf)


@njit(nogil=True, cache=True, boundscheck=False)
def _sum_chosen(raw, halves, shape, pages, start, chosen, count, sums, own, plain, weights, base):  # type: ignore[no-untyped-def]
    """The values of the chosen places by their weights onto the sums of one query."""
    for number in range(count):
        position = start + chosen[number]
        turn, place = position // shape.page_tokens, position % shape.page_tokens
        at = head_at(shape, pages, turn, shape.num_heads) + place * shape.token_stride
        make_plain(raw, halves, at, U(1), shape, plain, at)
        _sum_one(sums, own, shape.padded, plain, U(1), weights, base + chosen[number])


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
    scores = np.empty(count * stride, np.float32)
    chosen = np.empty(longest if share < 1 else U(0), np.uintp)
    plain = np.zeros((shape.page_tokens + U(_FEW)) * shape.padded, np.float32)
    for job in range(first, last):
        row, head = job // num_heads, job % num_heads
        start, end = U(starts[row]), U(ends[row])
        own = U(job) * count * shape.padded
        table, seen = pages[row, head], end - start
        keep = max(U(1), U(np.ceil(share * np.float64(seen))))
        _score(raw, halves, shape, table, start, end, queries, own, count, plain, scores, stride)
        length = (seen + _WIDTH - U(1)) // _WIDTH * _WIDTH
        for query in range(count):
            base = U(query) * stride
            if limit > 0:
                cap(scores, base, seen, limit)
            for place in range(seen, length):
                scores[base + U(place)] = F(-np.inf)
            if keep < seen:
                _choose(scores, base, seen, length, keep, chosen)
            weight, highest = _weigh(scores, base, length)
            lses[U(job) * count + U(query)] = highest + np.log(weight)
            factor = F(1.0) / weight
            for place in range(0, length, WIDTH):
                at = base + U(place)
                store(scores, at, multiply(load(scores, at), splat(factor)))
            if keep < seen:
                at = own + U(query) * shape.padded
                _sum_chosen(
                    raw, halves, shape, table, start, chosen, keep, sums, at, plain, scores, base
                )
        if keep >= seen:
            _sum(raw, halves, shape, table, start, end, sums, own, count, plain, scores, stride)


@njit(nogil=True, cache=True)
def heads_together(threads, counters, borders, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(attend_heads, (counters, borders), (), others, threads)
