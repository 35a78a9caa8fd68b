"""Attention of single queries over keys and values in pages of 4-bit codes, where the processor
multiplies pairs of bfloat16: a loop that numba compiles. Such products take codes as they are, as
whole numbers, less the middle one. A group's scale, and what its middle code stands for, are
brought in behind them: for keys in what a group adds to a score, for values in the weights. Scores
and sums are float32, weights times scales are rounded to bfloat16.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.attention_steps import cap, head_at, inverse, sixteen_at, weigh
from freight.kernels.cache_lines import prefetch_further, whole_lines
from freight.kernels.compiled import uncounted
from freight.kernels.llvm import WIDTH
from freight.kernels.open_mp import share_ranges
from freight.kernels.page_codes import (
    LEAST_GROUP,
    add_pairs,
    lay_factors,
    lay_keys,
    lay_values,
)
from freight.kernels.vectors import (
    add,
    load,
    multiply,
    multiply_add,
    of_bits,
    splat,
    store,
    total,
)

__all__ = ["LEAST_GROUP", "attend_heads", "heads_together"]

U = np.uintp
F = np.float32
_WIDTH = U(WIDTH)
_PAIRS = U(WIDTH // 2)
"""Of sixteen tokens."""
_TWO = U(2)
_FEW = U(4)
"""Tokens, or queries, that are worked on at once."""
_LINE = U(64)
_AHEAD = U(2 * WIDTH)
"""Tokens that are fetched before they are wanted."""


@uncounted
def _fetch(raw, at, shape):  # type: ignore[no-untyped-def]
    for line in range(U(0), _WIDTH * shape.token_stride, _LINE):
        prefetch_further(raw, at + line)


@uncounted
def _score_one(queries, first, totals, known, codes, factors, shape, scores, at):  # type: ignore[no-untyped-def]
    """Sixteen scores of one query: of each group its products with codes, times the scale, and the
    total of its numbers times what the middle code stands for."""
    groups, of_group = shape.width // shape.group_size, shape.group_size // _TWO
    found = splat(F(0.0))
    for group in range(groups):
        begin = U(group) * of_group
        a = b = c = d = splat(F(0.0))
        for pair in range(begin, begin + of_group, _FEW):
            place, own = first + pair, pair * _WIDTH
            a = add_pairs(a, splat(of_bits(queries[place])), load(codes, own))
            own += _WIDTH
            b = add_pairs(b, splat(of_bits(queries[place + U(1)])), load(codes, own))
            own += _WIDTH
            c = add_pairs(c, splat(of_bits(queries[place + _TWO])), load(codes, own))
            own += _WIDTH
            d = add_pairs(d, splat(of_bits(queries[place + U(3)])), load(codes, own))
        line = U(group) * _WIDTH
        scale, middle = load(factors, line), load(factors, groups * _WIDTH + line)
        found = multiply_add(add(add(a, b), add(c, d)), scale, found)
        found = multiply_add(splat(totals[known + U(group)]), middle, found)
    store(scores, at, found)


@uncounted
def _score_four(  # type: ignore[no-untyped-def]
    queries, first, totals, known, codes, factors, shape, scores, at, stride
):
    """The same of four queries."""
    groups, of_group = shape.width // shape.group_size, shape.group_size // _TWO
    half = shape.width // _TWO
    two, three, four = first + half, first + _TWO * half, first + U(3) * half
    i = j = k = m = splat(F(0.0))
    for group in range(groups):
        begin = U(group) * of_group
        a = b = c = d = e = f = g = h = splat(F(0.0))
        for pair in range(begin, begin + of_group, _TWO):
            near, far = load(codes, pair * _WIDTH), load(codes, (pair + U(1)) * _WIDTH)
            a = add_pairs(a, splat(of_bits(queries[first + pair])), near)
            b = add_pairs(b, splat(of_bits(queries[two + pair])), near)
            c = add_pairs(c, splat(of_bits(queries[three + pair])), near)
            d = add_pairs(d, splat(of_bits(queries[four + pair])), near)
            e = add_pairs(e, splat(of_bits(queries[first + pair + U(1)])), far)
            f = add_pairs(f, splat(of_bits(queries[two + pair + U(1)])), far)
            g = add_pairs(g, splat(of_bits(queries[three + pair + U(1)])), far)
            h = add_pairs(h, splat(of_bits(queries[four + pair + U(1)])), far)
        line, own = U(group) * _WIDTH, known + U(group)
        scale, middle = load(factors, line), load(factors, groups * _WIDTH + line)
        i = multiply_add(splat(totals[own]), middle, multiply_add(add(a, e), scale, i))
        own += groups
        j = multiply_add(splat(totals[own]), middle, multiply_add(add(b, f), scale, j))
        own += groups
        k = multiply_add(splat(totals[own]), middle, multiply_add(add(c, g), scale, k))
        own += groups
        m = multiply_add(splat(totals[own]), middle, multiply_add(add(d, h), scale, m))
    store(scores, at, i)
    store(scores, at + stride, j)
    store(scores, at + _TWO * stride, k)
    store(scores, at + U(3) * stride, m)


@uncounted
def _share_out(weights, at, factors, groups, shares, query, middle):  # type: ignore[no-untyped-def]
    """Sixteen weights of one query times each group's scales, as bfloat16; times what middle codes
    stand for they are added to ``middle`` [groups, 16]."""
    own = load(weights, at)
    for group in range(groups):
        place = U(group) * _WIDTH
        store(shares, query * groups * _WIDTH + place, multiply(own, load(factors, place)))
        known = load(middle, query * groups * _WIDTH + place)
        added = multiply_add(own, load(factors, groups * _WIDTH + place), known)
        store(middle, query * groups * _WIDTH + place, added)


@uncounted
def _add_four(shares, own, apart, pairs, shape, sums, first):  # type: ignore[no-untyped-def]
    """Sixteen tokens' codes by their shares onto the sums of four queries."""
    width, of_group = shape.width, shape.group_size
    for column in range(U(0), width, _TWO * _WIDTH):
        one = first + column
        two, three, four = one + width, one + _TWO * width, one + U(3) * width
        a, b, c, d = load(sums, one), load(sums, two), load(sums, three), load(sums, four)
        e, f = load(sums, one + _WIDTH), load(sums, two + _WIDTH)
        g, h = load(sums, three + _WIDTH), load(sums, four + _WIDTH)
        share = own + column // of_group * _PAIRS
        for pair in range(_PAIRS):
            at = U(pair) * width + column
            near, far = load(pairs, at), load(pairs, at + _WIDTH)
            weight = splat(of_bits(shares[share + U(pair)]))
            a, e = add_pairs(a, weight, near), add_pairs(e, weight, far)
            weight = splat(of_bits(shares[share + apart + U(pair)]))
            b, f = add_pairs(b, weight, near), add_pairs(f, weight, far)
            weight = splat(of_bits(shares[share + _TWO * apart + U(pair)]))
            c, g = add_pairs(c, weight, near), add_pairs(g, weight, far)
            weight = splat(of_bits(shares[share + U(3) * apart + U(pair)]))
            d, h = add_pairs(d, weight, near), add_pairs(h, weight, far)
        store(sums, one, a)
        store(sums, two, b)
        store(sums, three, c)
        store(sums, four, d)
        store(sums, one + _WIDTH, e)
        store(sums, two + _WIDTH, f)
        store(sums, three + _WIDTH, g)
        store(sums, four + _WIDTH, h)


@uncounted
def _add_one(shares, own, pairs, shape, sums, first):  # type: ignore[no-untyped-def]
    """The same of one query."""
    for column in range(U(0), shape.width, _FEW * _WIDTH):
        at = first + column
        a, b = load(sums, at), load(sums, at + _WIDTH)
        c, d = load(sums, at + _TWO * _WIDTH), load(sums, at + U(3) * _WIDTH)
        share = own + column // shape.group_size * _PAIRS
        for pair in range(_PAIRS):
            weight = splat(of_bits(shares[share + U(pair)]))
            place = U(pair) * shape.width + column
            a = add_pairs(a, weight, load(pairs, place))
            b = add_pairs(b, weight, load(pairs, place + _WIDTH))
            c = add_pairs(c, weight, load(pairs, place + _TWO * _WIDTH))
            d = add_pairs(d, weight, load(pairs, place + U(3) * _WIDTH))
        store(sums, at, a)
        store(sums, at + _WIDTH, b)
        store(sums, at + _TWO * _WIDTH, c)
        store(sums, at + U(3) * _WIDTH, d)


@uncounted
def _total_groups(queries, first, shape, totals, known):  # type: ignore[no-untyped-def]
    """The total of a query's numbers in each group."""
    of_group = shape.group_size // _TWO
    ones = splat(of_bits(np.uint32(0x3F803F80)))
    for group in range(shape.width // shape.group_size):
        found, begin = splat(F(0.0)), first + U(group) * of_group
        for pair in range(begin, begin + of_group, _WIDTH):
            found = add_pairs(found, ones, load(queries, pair))
        totals[known + U(group)] = total(found)


@uncounted
def _score(raw, shape, table, seen, after, numbers, codes, factors, scores):  # type: ignore[no-untyped-def]
    """Scores [queries, tokens] of the sixteens that are seen: from ``begin`` on, of keys from
    ``start`` to ``end``. Numbers are the queries', the first one's place, how many there are, and
    the totals of their groups; scores, and how many each query has."""
    begin, start, end = seen
    queries, first, count, totals = numbers
    found, stride = scores
    half, groups = shape.width // _TWO, shape.width // shape.group_size
    fours = count // _FEW * _FEW
    for position in range(begin, end, _WIDTH):
        at, ahead = sixteen_at(shape, table, position, end, U(0), after, _AHEAD)
        _fetch(raw, ahead, shape)
        lay_keys(raw, at, shape, codes)
        low, high = max(start, position) - position, min(end - position, _WIDTH)
        lay_factors(raw, at, low, high, shape, factors)
        to = position - begin
        for query in range(U(0), fours, _FEW):
            line, known, place = first + query * half, query * groups, query * stride + to
            rest = codes, factors, shape, found, place, stride
            _score_four(queries, line, totals, known, *rest)
        for query in range(fours, count):
            line, known, place = first + query * half, query * groups, query * stride + to
            _score_one(queries, line, totals, known, codes, factors, shape, found, place)


@uncounted
def _weigh(scores, base, seen, scale, limit):  # type: ignore[no-untyped-def]
    """One query's scores to the weights of what it sees; returns the log-sum-exp."""
    begin, start, end = seen
    length = (end - begin + _WIDTH - U(1)) // _WIDTH * _WIDTH
    for place in range(base, base + length, _WIDTH):
        store(scores, place, multiply(load(scores, place), splat(scale)))
    if limit > 0:
        cap(scores, base, length, limit)
    for token in range(start - begin):
        scores[base + U(token)] = F(-np.inf)
    for token in range(end - begin, length):
        scores[base + U(token)] = F(-np.inf)
    weight, highest = weigh(scores, base, length)
    factor = splat(inverse(weight))
    for place in range(base, base + length, _WIDTH):
        store(scores, place, multiply(load(scores, place), factor))
    return highest + np.log(weight)


@uncounted
def _sum(raw, shape, table, seen, after, weights, room, factors, sums):  # type: ignore[no-untyped-def]
    """Values by their weights: sums [queries, width], where they begin, and how many there are.
    Weights, and how many each query has; room for codes, for shares twice, and for what middle
    codes add."""
    begin, start, end = seen
    found, own, count = sums
    scores, stride = weights
    pairs, rounded, words, middle = room
    width, groups = shape.width, shape.width // shape.group_size
    apart, fours = groups * _PAIRS, count // _FEW * _FEW
    for place in range(own, own + count * width, _WIDTH):
        store(found, place, splat(F(0.0)))
    for place in range(U(0), count * groups * _WIDTH, _WIDTH):
        store(middle, place, splat(F(0.0)))
    for position in range(begin, end, _WIDTH):
        at, ahead = sixteen_at(shape, table, position, end, shape.to_values, after, _AHEAD)
        _fetch(raw, ahead, shape)
        lay_values(raw, at, shape, pairs)
        low, high = max(start, position) - position, min(end - position, _WIDTH)
        lay_factors(raw, at, low, high, shape, factors)
        for query in range(count):
            place = U(query) * stride + position - begin
            _share_out(scores, place, factors, groups, rounded, U(query), middle)
        for query in range(U(0), fours, _FEW):
            _add_four(words, query * apart, apart, pairs, shape, found, own + query * width)
        for query in range(fours, count):
            _add_one(words, query * apart, pairs, shape, found, own + query * width)
    for query in range(count):
        for column in range(U(0), width, _WIDTH):
            place = own + U(query) * width + column
            part = (U(query) * groups + column // shape.group_size) * _WIDTH
            more = splat(total(load(middle, part)))
            store(found, place, add(load(found, place), more))


@njit(nogil=True, cache=True, boundscheck=False)
def attend_heads(  # type: ignore[no-untyped-def]
    first, last, raw, shape, pages, starts, ends, queries, scale, limit, sums, lses
):
    """The heads ``first`` to ``last`` of all rows' heads of keys.

    raw: the pool as a flat array of bytes. pages [rows, heads, pages]: numbers of [page, head],
    pages of whole sixteens of tokens. starts, ends [rows]: the keys that a row's queries see.
    queries [heads * queries, width] as pairs, uint32; sums [heads * queries * width], float32,
    become what was attended; lses [heads * queries] the log-sum-exps. limit: of capped scores,
    else 0.
    """
    num_heads, width = pages.shape[1], shape.width
    half, groups = width // _TWO, width // shape.group_size
    count = U(queries.shape[0]) // (U(pages.shape[0] * num_heads) * half)
    longest = U(0)
    for row in range(starts.shape[0]):
        longest = max(longest, U(ends[row]) - U(starts[row]) // _WIDTH * _WIDTH)
    stride = (longest + _WIDTH - U(1)) // _WIDTH * _WIDTH
    scores = whole_lines(count * stride)
    codes = whole_lines(_WIDTH * half).view(np.uint32)
    factors = whole_lines(_TWO * groups * _WIDTH)
    totals = np.empty(count * groups, np.float32)
    shares = whole_lines(count * groups * _PAIRS)
    room = (
        whole_lines(_PAIRS * width).view(np.uint32),
        shares.view(np.uint16),
        shares.view(np.uint32),
        whole_lines(count * groups * _WIDTH),
    )
    for job in range(first, last):
        row, head = job // num_heads, job % num_heads
        start, end, table, own = U(starts[row]), U(ends[row]), pages[row, head], U(job) * count
        seen = start // _WIDTH * _WIDTH, start, end
        for query in range(count):
            _total_groups(queries, (own + U(query)) * half, shape, totals, U(query) * groups)
        after = head_at(shape, table, start // shape.page_tokens, shape.to_values)
        numbers = queries, own * half, count, totals
        _score(raw, shape, table, seen, after, numbers, codes, factors, (scores, stride))
        for query in range(count):
            lses[own + U(query)] = _weigh(scores, U(query) * stride, seen, scale, limit)
        following = min(job + 1, last - 1)
        row, head = following // num_heads, following % num_heads
        after = head_at(shape, pages[row, head], U(starts[row]) // shape.page_tokens, U(0))
        targets = sums, own * width, count
        _sum(raw, shape, table, seen, after, (scores, stride), room, factors, targets)


@njit(nogil=True, cache=True)
def heads_together(threads, counters, borders, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(attend_heads, (counters, borders), (), others, threads)
