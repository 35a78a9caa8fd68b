"""Attention of single queries over keys and values in pages of bfloat16, whose products are made of
pairs of such numbers, in registers of sixteen by sixteen or else in vectors: a loop that numba
compiles. Queries that share a head are columns, keys are rows as they lie in their page; of values
pairs of tokens are laid side by side first. Scores and sums are float32, weights are rounded to
bfloat16.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.attention_steps import (
    LOG_2,
    LOG_E,
    cap,
    head_at,
    inverse,
    power_of_two,
    token_at,
)
from freight.kernels.cache_lines import prefetch, prefetch_further, whole_lines
from freight.kernels.compiled import uncounted
from freight.kernels.features import may_use_tiles
from freight.kernels.lines import put_narrowed, put_narrowed_pairs, put_pairs
from freight.kernels.open_mp import share_ranges
from freight.kernels.vectors import (
    WIDTH,
    add,
    larger,
    load,
    multiply,
    multiply_add,
    of_bits,
    splat,
    store,
    subtract,
    swapped,
    swapped_by_twos,
    transpose,
)

if may_use_tiles():
    from freight.kernels.tile_registers import (
        FEW,
        IS_PACED,
        add_sums,
        begin_sums,
        configure,
        end_sums,
        lay_weights,
        put_scores,
        release,
    )
else:
    from freight.kernels.pair_registers import (
        FEW,
        IS_PACED,
        add_sums,
        begin_sums,
        configure,
        end_sums,
        lay_weights,
        put_scores,
        release,
    )

__all__ = ["COLUMNS", "LEAST_QUERIES", "attend_heads", "heads_together"]

U = np.uintp
F = np.float32
COLUMNS = 2 * WIDTH
"""Of which a head is made up: sixteen pairs."""
LEAST_QUERIES = 5 if may_use_tiles() else 1
"""Of a head of keys: fewer leave most of a register empty."""
_WIDTH = U(WIDTH)
_TWO, _FOUR = U(2), U(4)
_TOKENS = U(2 * WIDTH)
"""That are pairs of a register's row."""
_SQUARE = U(WIDTH * WIDTH)
_COLUMNS_AT_ONCE = U((8 if IS_PACED else 4) * WIDTH)
"""Of values, whose sums stay in registers."""
_TOKENS_AT_ONCE = U(512)
"""Whose values are in the second cache when their other columns are wanted."""
_MOST_TOKENS = U(4096)
"""Whose scores are held at once."""
_LINE = U(32)
"""Numbers of a cache line."""
_AHEAD = U(2 if IS_PACED else 1)
"""Sixteens of tokens that are fetched before they are wanted."""
_LOWEST = F(-3e38)


@uncounted
def _lay_queries(queries, first, count, shape, room, pairs, fours):  # type: ignore[no-untyped-def]
    """Up to sixteen queries [count, width] of bfloat16, as pairs [width / 2, 16], or so many
    ``fours`` of them, whose pairs lie by fours too, [width / 8, queries, 4]; those that are not
    there are zeros."""
    half = shape.width // _TWO
    if fours:
        for place in range(half * _FOUR * fours):
            pairs[U(place)] = F(0.0)
        for query in range(count):
            for place in range(half):
                own = U(place) // _FOUR * _WIDTH * fours + U(place) % _FOUR + _FOUR * U(query)
                pairs[own] = of_bits(queries[first + U(query) * half + U(place)])
        return
    for query in range(count):
        for place in range(half):
            room[U(query) * half + U(place)] = queries[first + U(query) * half + U(place)]
    for place in range(count * half, _WIDTH * half):
        room[U(place)] = np.uint32(0)
    for place in range(0, half, WIDTH):
        transpose(room, U(place), half, pairs, U(place) * _WIDTH)


@uncounted
def _size(tokens, fours):  # type: ignore[no-untyped-def]
    """Scores of so many tokens, a multiple of four."""
    return tokens // _FOUR * fours * _WIDTH if fours else tokens * _WIDTH


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
def _find(shape, table, begin, end, places):  # type: ignore[no-untyped-def]
    """Where the keys begin of each sixteen tokens from ``begin`` to ``end``; how many these are."""
    count = U(0)
    for position in range(begin, end, _WIDTH):
        places[count] = token_at(shape, table, position, U(0))
        count += U(1)
    return count


@uncounted
def _score(raw, shape, places, begin, start, end, pairs, plain, scores, fours):  # type: ignore[no-untyped-def]
    """Scores [tokens, 16] of the tokens from ``begin``, a whole sixteen, to ``end`` in sixteens,
    whose keys are at these ``places``, or [tokens / 4, queries, 4] of so many ``fours``; nothing is
    known of those before ``start``, and from ``end`` on."""
    blocks = shape.width // U(COLUMNS)
    for position in range(begin, end, _WIDTH):
        block = (position - begin) // _WIDTH
        at, ahead = places[block], places[block + _AHEAD]
        low, high = max(start, position) - position, min(end - position, _WIDTH)
        to = _size(position - begin, fours)
        if low == U(0) and high == _WIDTH:
            put_scores(raw, at, shape.token_stride, pairs, blocks, scores, to, ahead, fours)
        else:
            _copy(raw, at, low, high, shape, plain)
            put_scores(plain, U(0), shape.width, pairs, blocks, scores, to, U(0), fours)


@uncounted
def _rule_out(scores, begin, start, end, scale, limit, fours):  # type: ignore[no-untyped-def]
    """Scores that are capped, where they have a limit; the lowest of all before ``start`` and
    behind the last token."""
    count = end - begin
    if limit > 0:
        lanes = _size((count + _FOUR - U(1)) // _FOUR * _FOUR, fours)
        for place in range(U(0), lanes, _WIDTH):
            store(scores, place, multiply(load(scores, place), splat(scale)))
        cap(scores, U(0), lanes, limit)
    for before in range(U(0), max(start, begin) - begin):
        _put_lowest(scores, before, fours)
    for beyond in range(count, (count + _TOKENS - U(1)) // _TOKENS * _TOKENS):
        _put_lowest(scores, beyond, fours)


@uncounted
def _put_lowest(scores, token, fours):  # type: ignore[no-untyped-def]
    if fours:
        at = token // _FOUR * fours * _WIDTH
        for lane in range(token % _FOUR, fours * _WIDTH, _FOUR):
            scores[at + lane] = _LOWEST
    else:
        store(scores, token * _WIDTH, splat(_LOWEST))


@uncounted
def _weigh(scores, count, scale, room, weights, sums, tops, gains):  # type: ignore[no-untyped-def]
    """Of scores, times ``scale`` logarithms to base 2, what their softmax would be but for the sum,
    as pairs of tokens: by 32 of them as ``add_sums`` takes them. Sums and highest scores, scaled,
    are of all tokens so far; ``gains`` become what earlier sums are to be multiplied by."""
    a = b = splat(_LOWEST)
    for place in range(U(0), count * _WIDTH, _TWO * _WIDTH):
        a, b = larger(load(scores, place), a), larger(load(scores, place + _WIDTH), b)
    factor = splat(scale)
    below = _grow(larger(a, b), factor, U(0), sums, tops, gains)
    a, b = load(sums, U(0)), splat(F(0.0))
    for block in range(U(0), count, _TOKENS):
        for turn in range(U(0), _WIDTH):
            at = block * _WIDTH + turn * _TWO * _WIDTH
            one = power_of_two(multiply_add(load(scores, at), factor, below))
            other = power_of_two(multiply_add(load(scores, at + _WIDTH), factor, below))
            a, b = add(a, one), add(b, other)
            put_narrowed_pairs(room, turn * _WIDTH, one, other)
        lay_weights(room, weights, block // _TWO * _WIDTH)
    store(sums, U(0), add(a, b))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _grow(most, factor, part, sums, tops, gains):  # type: ignore[no-untyped-def]
    """The highest of earlier scores, ``tops``, and these; what sums and gains come to with them.
    Returns what is to be added to scores."""
    earlier = load(tops, part)
    top = larger(multiply(most, factor), earlier)
    store(tops, part, top)
    gain = power_of_two(subtract(earlier, top))
    store(gains, part, gain)
    store(sums, part, multiply(load(sums, part), gain))
    return subtract(splat(F(0.0)), top)


@uncounted
def _weigh_fours(scores, count, scale, weights, sums, tops, gains, fours):  # type: ignore[no-untyped-def]
    """The same of four tokens of four queries each: of every query four sums, and four times its
    highest score."""
    step, factor = fours * _WIDTH, splat(scale)
    for part in range(U(0), step, _WIDTH):
        a = b = splat(_LOWEST)
        for place in range(part, count // _FOUR * step, _TWO * step):
            a, b = larger(load(scores, place), a), larger(load(scores, place + step), b)
        most = larger(a, b)
        most = larger(most, swapped(most))
        most = larger(most, swapped_by_twos(most))
        _grow(most, factor, part, sums, tops, gains)
    second = step - _WIDTH
    a = b = nothing = splat(F(0.0))
    below, further = subtract(nothing, load(tops, U(0))), subtract(nothing, load(tops, second))
    for place in range(U(0), count // _FOUR * step, _TWO * _WIDTH):
        one = power_of_two(multiply_add(load(scores, place), factor, below))
        other = power_of_two(multiply_add(load(scores, place + _WIDTH), factor, further))
        a, b = add(a, one), add(b, other)
        put_narrowed(weights, place // _TWO, one, other)
    store(sums, U(0), add(load(sums, U(0)), a))
    store(sums, second, add(load(sums, second), b))


@uncounted
def _shrink(found, width, count, gains, apart):  # type: ignore[no-untyped-def]
    """Sums [width / 16, 16 queries, 16] of ``count`` queries by what their weights are less than
    they were, for which there are gains ``apart`` from each other."""
    for query in range(count):
        gain = splat(gains[U(query) * apart])
        for column in range(U(0), width, _WIDTH):
            at = (column + U(query)) * _WIDTH
            store(found, at, multiply(load(found, at), gain))


@uncounted
def _pair_up(raw, at, ahead, stride, first, tiles, values, to):  # type: ignore[no-untyped-def]
    """Sixteen tokens' values from column ``first`` on as eight pairs [tiles, 16 pairs, 16]."""
    for pair in range(WIDTH // 2):
        one = at + _TWO * U(pair) * stride + first
        coming = ahead + _TWO * U(pair) * stride + first
        if IS_PACED:
            for line in range(U(0), tiles * _WIDTH, _LINE):
                prefetch_further(raw, coming + line)
                prefetch_further(raw, coming + stride + line)
        for tile in range(0, tiles, 2):
            column = U(tile) * _WIDTH
            place = to + U(tile) * _SQUARE + U(pair) * _WIDTH
            put_pairs(values, place, _SQUARE, raw, one + column, one + stride + column)


@uncounted
def _sum(raw, shape, places, begin, start, end, weights, plain, values, sums):  # type: ignore[no-untyped-def]
    """The values of these tokens by their weights: sums [width / 16, 16 queries, 16], how many
    queries there are, how many fours of them, and whether they begin; else they are added to what
    is there. A token's values are as far from its keys as a page's are."""
    found, count, fours, is_first = sums
    further = shape.to_values * shape.head_stride
    for some in range(begin, end, _TOKENS_AT_ONCE):
        for first in range(U(0), shape.width, _COLUMNS_AT_ONCE):
            tiles = min(_COLUMNS_AT_ONCE, shape.width - first) // _WIDTH
            begin_sums(found, first * _WIDTH, tiles, U(not is_first or some > begin))
            for position in range(some, min(end, some + _TOKENS_AT_ONCE), _WIDTH):
                block = (position - begin) // _WIDTH
                half = block % _TWO
                at, ahead = places[block] + further, places[block + _AHEAD] + further
                if first == U(0) and not IS_PACED:
                    for line in range(U(0), _WIDTH * shape.token_stride, _LINE):
                        prefetch(raw, ahead + line)
                low, high = max(start, position) - position, min(end - position, _WIDTH)
                to = half * _WIDTH // _TWO * _WIDTH
                if low == U(0) and high == _WIDTH:
                    _pair_up(raw, at, ahead, shape.token_stride, first, tiles, values, to)
                else:
                    _copy(raw, at, low, high, shape, plain)
                    _pair_up(plain, U(0), U(0), shape.width, first, tiles, values, to)
                is_last = position + _WIDTH >= end
                if is_last and half == U(0):
                    for tile in range(tiles):
                        for pair in range(WIDTH // 2, WIDTH):
                            place = U(tile) * _SQUARE + U(pair) * _WIDTH
                            store(values, place, splat(F(0.0)))
                if is_last or half == U(1):
                    # Two weights lie where one score did.
                    own = _size((position - begin) // _TOKENS * _WIDTH, fours)
                    add_sums(weights, own, values, tiles, found, first * _WIDTH, count, fours)
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
    totals, tops = np.empty(2 * WIDTH, np.float32), np.empty(2 * WIDTH, np.float32)
    gains = np.empty(2 * WIDTH, np.float32)
    places = np.empty(_MOST_TOKENS // _WIDTH + _AHEAD, np.uintp)
    further = shape.to_values * shape.head_stride
    configure()
    fours = (count + _FOUR - U(1)) // _FOUR if count <= U(FEW) else U(0)
    apart = _FOUR if fours else U(1)
    for job in range(first, last):
        row, head = job // num_heads, job % num_heads
        start, end = U(starts[row]), U(ends[row])
        begin, table = start // _WIDTH * _WIDTH, pages[row, head]
        row, head = min(job + 1, last - 1) // num_heads, min(job + 1, last - 1) % num_heads
        coming = U(starts[row]) // shape.page_tokens
        following = head_at(shape, pages[row, head], coming, U(0))
        for query in range(U(0), count, _WIDTH):
            own, some = U(job) * count + query, min(_WIDTH, count - query)
            _lay_queries(queries, own * half, some, shape, laid, pairs, fours)
            totals[:], tops[:] = F(0.0), _LOWEST
            for position in range(begin, end, _MOST_TOKENS):
                upto, is_first = U(min(end, position + _MOST_TOKENS)), position == begin
                num_places = _find(shape, table, position, upto, places)
                places[num_places : num_places + _AHEAD] = places[0] + further
                keys = pairs, plain, scores, fours
                _score(raw, shape, places, position, start, upto, *keys)
                _rule_out(scores, position, start, upto, scale, limit, fours)
                seen = (upto - position + _TOKENS - U(1)) // _TOKENS * _TOKENS
                factor = LOG_E * (F(1.0) if limit > 0 else scale)
                if fours:
                    _weigh_fours(scores, seen, factor, weights, totals, tops, gains, fours)
                else:
                    _weigh(scores, seen, factor, room, weights, totals, tops, gains)
                if not is_first:
                    _shrink(found, width, some, gains, apart)
                own_sums = found, some, fours, is_first
                places[num_places : num_places + _AHEAD] = following - further
                taken = weights, plain, values, own_sums
                _sum(raw, shape, places, position, start, upto, *taken)
            for member in range(some):
                lane = U(member) * apart
                total = F(0.0)
                for own_lane in range(lane, lane + apart):
                    total += totals[own_lane]
                lses[own + member] = tops[lane] * LOG_2 + np.log(total)
                share = splat(inverse(total))
                for column in range(U(0), width, _WIDTH):
                    source = (column + member) * _WIDTH
                    target = (own + member) * width + column
                    store(sums, target, multiply(load(found, source), share))
    release()


@njit(nogil=True, cache=True)
def heads_together(threads, counters, borders, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(attend_heads, (counters, borders), (), others, threads)
