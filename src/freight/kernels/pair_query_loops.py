"""Attention of single queries over keys and values in pages of bfloat16, whose products are made of
pairs of such numbers, in registers of sixteen by sixteen or else in vectors: a loop that numba
compiles. Queries that share a head are columns, keys are rows as they lie in their page; of values
pairs of tokens are laid side by side first. Scores and sums are float32, weights are rounded to
bfloat16.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.attention_steps import cap, exponential, head_at
from freight.kernels.compiled import uncounted
from freight.kernels.features import may_use_tiles
from freight.kernels.lines import put_narrowed_pairs
from freight.kernels.open_mp import share_ranges
from freight.kernels.vectors import (
    WIDTH,
    add,
    larger,
    load,
    multiply,
    multiply_add,
    prefetch,
    put_pairs,
    splat,
    store,
    subtract,
    transpose,
    whole_lines,
)

if may_use_tiles():
    from freight.kernels.tile_registers import (
        add_sums,
        begin_sums,
        configure,
        end_sums,
        put_scores,
        release,
    )
else:
    from freight.kernels.pair_registers import (
        add_sums,
        begin_sums,
        configure,
        end_sums,
        put_scores,
        release,
    )

__all__ = ["COLUMNS", "LEAST_QUERIES", "attend_heads", "heads_together"]

U = np.uintp
F = np.float32
COLUMNS = 2 * WIDTH
"""Of which a head is made up: sixteen pairs."""
LEAST_QUERIES = 5 if may_use_tiles() else 6
"""Of a head of keys: fewer leave most of a register empty."""
_WIDTH = U(WIDTH)
_TWO = U(2)
_TOKENS = U(2 * WIDTH)
"""That are pairs of a register's row."""
_SQUARE = U(WIDTH * WIDTH)
_COLUMNS_AT_ONCE = U(4 * WIDTH)
"""Of values, whose sums stay in registers."""
_TOKENS_AT_ONCE = U(512)
"""Whose values are in the second cache when their other columns are wanted."""
_MOST_TOKENS = U(4096)
"""Whose scores are held at once."""
_LINE = U(32)
"""Numbers of a cache line."""
_LOWEST = F(-3e38)


@uncounted
def _fetch(raw, at, count):  # type: ignore[no-untyped-def]
    for place in range(0, count, _LINE):
        prefetch(raw, at + U(place))


@uncounted
def _lay_queries(queries, first, count, shape, room, pairs):  # type: ignore[no-untyped-def]
    """Up to sixteen queries [count, width] of bfloat16, as pairs [width / 2, 16]; those that are
    not there are zeros."""
    half = shape.width // _TWO
    for query in range(count):
        for place in range(half):
            room[U(query) * half + U(place)] = queries[first + U(query) * half + U(place)]
    for place in range(count * half, _WIDTH * half):
        room[U(place)] = np.uint32(0)
    for place in range(0, half, WIDTH):
        transpose(room, U(place), half, pairs, U(place) * _WIDTH)


@uncounted
def _copy(raw, at, low, high, shape, plain):  # type: ignore[no-untyped-def]
    """The tokens from ``low`` to ``high`` of sixteen that begin at ``at``; the others are zeros: of
    what was there before nothing is known, not even that it is a number."""
    for token in range(WIDTH):
        target = U(token) * shape.width
        if low <= token < high:
            source = at + U(token) * shape.token_stride
            for column in range(shape.width):
                plain[target + U(column)] = raw[source + U(column)]
        else:
            for column in range(shape.width):
                plain[target + U(column)] = np.uint16(0)


@uncounted
def _score(raw, shape, table, begin, start, end, pairs, plain, scores):  # type: ignore[no-untyped-def]
    """Scores [tokens, 16] of the tokens from ``begin``, a whole sixteen, to ``end`` in sixteens;
    those before ``start``, and from ``end`` on, are none."""
    blocks = shape.width // U(COLUMNS)
    position = begin
    while position < end:
        turn, place = position // shape.page_tokens, position % shape.page_tokens
        at = head_at(shape, table, turn, U(0)) + place * shape.token_stride
        if place == U(0) and position + shape.page_tokens < end:
            coming = head_at(shape, table, turn + U(1), U(0))
            _fetch(raw, coming, shape.page_tokens * shape.token_stride)
        low = max(start, position) - position
        high = min(end - position, _WIDTH)
        to = (position - begin) * _WIDTH
        if low == U(0) and high == _WIDTH:
            put_scores(raw, at, shape.token_stride, pairs, blocks, scores, to)
        else:
            _copy(raw, at, low, high, shape, plain)
            put_scores(plain, U(0), shape.width, pairs, blocks, scores, to)
            for token in range(low):
                store(scores, to + U(token) * _WIDTH, splat(_LOWEST))
            for token in range(high, WIDTH):
                store(scores, to + U(token) * _WIDTH, splat(_LOWEST))
        position += _WIDTH


@uncounted
def _rule_out(scores, begin, start, end, scale, limit):  # type: ignore[no-untyped-def]
    """Scores that are capped, where they have a limit, and none behind the last token."""
    count = end - begin
    if limit > 0:
        for place in range(U(0), count * _WIDTH, _WIDTH):
            store(scores, place, multiply(load(scores, place), splat(scale)))
        first = max(start, begin) - begin
        cap(scores, first * _WIDTH, (count - first) * _WIDTH, limit)
    for beyond in range(count, (count + _TOKENS - U(1)) // _TOKENS * _TOKENS):
        store(scores, U(beyond) * _WIDTH, splat(_LOWEST))


@uncounted
def _weigh(scores, count, scale, room, weights, sums, tops, gains):  # type: ignore[no-untyped-def]
    """Of scores [count, 16] what their softmax would be but for the sum, as pairs of tokens: by 32
    of them [16 queries, 16 pairs]. Sums and highest scores, scaled, are of all tokens so far;
    ``gains`` become what earlier sums are to be multiplied by."""
    a = b = splat(_LOWEST)
    for token in range(U(0), count, _TWO):
        at = token * _WIDTH
        a, b = larger(load(scores, at), a), larger(load(scores, at + _WIDTH), b)
    factor = splat(scale)
    earlier = load(tops, U(0))
    top = larger(multiply(larger(a, b), factor), earlier)
    store(tops, U(0), top)
    gain = exponential(subtract(earlier, top))
    store(gains, U(0), gain)
    below = subtract(splat(F(0.0)), top)
    a, b = multiply(load(sums, U(0)), gain), splat(F(0.0))
    for block in range(U(0), count, _TOKENS):
        for pair in range(_WIDTH):
            at = (block + _TWO * pair) * _WIDTH
            one = exponential(multiply_add(load(scores, at), factor, below))
            other = exponential(multiply_add(load(scores, at + _WIDTH), factor, below))
            a, b = add(a, one), add(b, other)
            put_narrowed_pairs(room, pair * _WIDTH, one, other)
        transpose(room, U(0), _WIDTH, weights, block // _TWO * _WIDTH)
    store(sums, U(0), add(a, b))


@uncounted
def _shrink(found, width, gains):  # type: ignore[no-untyped-def]
    """Sums [width / 16, 16 queries, 16] by what their weights are less than they were."""
    for row in range(width):
        at = U(row) * _WIDTH
        store(found, at, multiply(load(found, at), splat(gains[U(row) % _WIDTH])))


@uncounted
def _pair_up(raw, at, stride, first, tiles, values, to):  # type: ignore[no-untyped-def]
    """Sixteen tokens' values from column ``first`` on as eight pairs [tiles, 16 pairs, 16]."""
    for pair in range(WIDTH // 2):
        one = at + _TWO * U(pair) * stride + first
        for tile in range(tiles):
            column = U(tile) * _WIDTH
            place = to + U(tile) * _SQUARE + U(pair) * _WIDTH
            put_pairs(values, place, raw, one + column, one + stride + column)


@uncounted
def _sum(raw, shape, table, begin, start, end, weights, plain, values, sums):  # type: ignore[no-untyped-def]
    """The values of these tokens by their weights: sums [width / 16, 16 queries, 16], how many
    queries there are, and whether they begin; else they are added to what is there."""
    found, count, is_first = sums
    for some in range(begin, end, _TOKENS_AT_ONCE):
        for first in range(U(0), shape.width, _COLUMNS_AT_ONCE):
            tiles = min(_COLUMNS_AT_ONCE, shape.width - first) // _WIDTH
            begin_sums(found, first * _WIDTH, tiles, U(not is_first or some > begin))
            for position in range(some, min(end, some + _TOKENS_AT_ONCE), _WIDTH):
                half = (position - begin) // _WIDTH % _TWO
                turn, place = position // shape.page_tokens, position % shape.page_tokens
                at = head_at(shape, table, turn, shape.num_heads) + place * shape.token_stride
                if first == U(0) and place == U(0) and position + shape.page_tokens < end:
                    coming = head_at(shape, table, turn + U(1), shape.num_heads)
                    _fetch(raw, coming, shape.page_tokens * shape.token_stride)
                low, high = max(start, position) - position, min(end - position, _WIDTH)
                to = half * _WIDTH // _TWO * _WIDTH
                if low == U(0) and high == _WIDTH:
                    _pair_up(raw, at, shape.token_stride, first, tiles, values, to)
                else:
                    _copy(raw, at, low, high, shape, plain)
                    _pair_up(plain, U(0), shape.width, first, tiles, values, to)
                is_last = position + _WIDTH >= end
                if is_last and half == U(0):
                    for tile in range(tiles):
                        for pair in range(WIDTH // 2, WIDTH):
                            place = U(tile) * _SQUARE + U(pair) * _WIDTH
                            store(values, place, splat(F(0.0)))
                if is_last or half == U(1):
                    own = (position - begin) // _TOKENS * _SQUARE
                    add_sums(weights, own, values, tiles, found, first * _WIDTH, count)
            end_sums(found, first * _WIDTH, tiles)


@njit(nogil=True, cache=True, boundscheck=False)
def attend_heads(  # type: ignore[no-untyped-def]
    first, last, raw, shape, pages, starts, ends, queries, scale, limit, sums, lses
):
    """The heads ``first`` to ``last`` of all rows' heads of keys.

    raw: the pool as a flat array of uint16 that are bfloat16. pages [rows, heads, pages]: numbers
    of [page, head], pages of whole sixteens of tokens. starts, ends [rows]: the keys that a row's
    queries see. queries [heads * queries, width] as pairs, uint32; sums [heads * queries * width],
    float32, become what was attended; lses [heads * queries] the log-sum-exps. limit: of capped
    scores, else 0.
    """
    num_heads = pages.shape[1]
    width = shape.width
    half = width // _TWO
    count = U(queries.shape[0]) // (U(pages.shape[0] * num_heads) * half)
    longest = U(0)
    for row in range(starts.shape[0]):
        longest = max(longest, U(ends[row]) - U(starts[row]) // _WIDTH * _WIDTH)
    longest = min((longest + _TOKENS - U(1)) // _TOKENS * _TOKENS, _MOST_TOKENS)
    scores = whole_lines(longest * _WIDTH)
    weights = whole_lines(longest // _TWO * _WIDTH)
    laid = np.empty(_WIDTH * half, np.uint32)
    pairs = whole_lines(_WIDTH * half)
    room = whole_lines(WIDTH * WIDTH).view(np.uint32)
    plain = np.empty(_WIDTH * width, np.uint16)
    values = whole_lines(_COLUMNS_AT_ONCE * _WIDTH)
    found = whole_lines(_WIDTH * width)
    totals, tops = np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32)
    gains = np.empty(WIDTH, np.float32)
    configure()
    for job in range(first, last):
        row, head = job // num_heads, job % num_heads
        start, end = U(starts[row]), U(ends[row])
        begin, table = start // _WIDTH * _WIDTH, pages[row, head]
        for query in range(U(0), count, _WIDTH):
            own, some = U(job) * count + query, min(_WIDTH, count - query)
            _lay_queries(queries, own * half, some, shape, laid, pairs)
            totals[:], tops[:] = F(0.0), _LOWEST
            for position in range(begin, end, _MOST_TOKENS):
                upto, is_first = U(min(end, position + _MOST_TOKENS)), position == begin
                _score(raw, shape, table, position, start, upto, pairs, plain, scores)
                _rule_out(scores, position, start, upto, scale, limit)
                seen = (upto - position + _TOKENS - U(1)) // _TOKENS * _TOKENS
                factor = F(1.0) if limit > 0 else scale
                _weigh(scores, seen, factor, room, weights, totals, tops, gains)
                if not is_first:
                    _shrink(found, width, gains)
                own_sums = found, some, is_first
                _sum(raw, shape, table, position, start, upto, weights, plain, values, own_sums)
            for member in range(some):
                lses[own + member] = tops[member] + np.log(totals[member])
                share = splat(F(1.0) / totals[member])
                for column in range(U(0), width, _WIDTH):
                    source = (column + member) * _WIDTH
                    target = (own + member) * width + column
                    store(sums, target, multiply(load(found, source), share))
    release()


@njit(nogil=True, cache=True)
def heads_together(threads, counters, borders, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(attend_heads, (counters, borders), (), others, threads)
