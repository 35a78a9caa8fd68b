"""Attention of several queries a row over keys and values in pages, a loop that numba compiles.

Queries of all heads that share keys are rows of one product, a panel of them at a time: their sums
with the keys of a block, turned so that sixteen lie side by side, stay in registers. Blocks of keys
follow one another, and what was found so far is scaled to the highest score yet (as in
FlashAttention, Dao et al., 2022); those that no query of a panel sees are left out. All is
computed in float32. Threads are the caller's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freight.kernels.attention_steps import cap, exponential, head_at, make_plain
from freight.kernels.register_blocks import (
    PANEL_ROWS,
    TILES_TOGETHER,
    add_products,
    add_products_of_tiles,
)
from freight.kernels.vectors import (
    WIDTH,
    add,
    larger,
    largest,
    load,
    multiply,
    number_at,
    put_number,
    splat,
    store,
    subtract,
    total,
    transpose,
)

__all__ = ["MOST_COLUMNS", "PART_ROWS", "Rule", "Tokens", "attend_queries"]

U = np.uintp
F = np.float32
PART_ROWS = 240
"""Queries of all heads that share keys which meet a block of keys once it is plain: whole panels,
and so many that making it plain is a fiftieth of the work."""
_KEYS = 128
"""Of a block: its keys and values stay in a core's own cache."""
MOST_COLUMNS = 256
"""Of a head."""
_WIDTH = U(WIDTH)
_PANEL = U(PANEL_ROWS)
_TILE = U(PANEL_ROWS * WIDTH)
"""Numbers of sixteen columns of a panel's sums."""
_LOWEST = F(-3e38)


class Tokens(NamedTuple):
    """Numbers of tokens in a flat array, those of one ``pitch`` after those of the one before."""

    numbers: Any
    pitch: Any


class Rule(NamedTuple):
    """What queries see, and how: ``per_row`` of them follow a row's earlier keys, with ``group``
    heads for each head of keys. Each sees its own token and what comes before, but only the last
    ``window`` unless that is 0. Scores are scaled, and capped at ``limit`` unless that is 0."""

    per_row: Any
    group: Any
    scale: Any
    limit: Any
    window: Any


class _Room(NamedTuple):
    """What a thread works in. Of a block: keys or values [_KEYS, padded], these turned to [tiles,
    padded, 16] and [padded / 16, _KEYS, 16]. Of each row of a part: its query [MOST_COLUMNS], the
    sum of its weights and the highest score so far; of each panel what was found, [padded / 16,
    panel, 16]. Of the panel at hand: scores [tiles, panel, 16], weights [panel, _KEYS], their sums
    [panel] and by how much the highest scores have grown [16]."""

    plain: Any
    keys: Any
    values: Any
    queries: Any
    sums: Any
    tops: Any
    found: Any
    scores: Any
    weights: Any
    gains: Any
    changes: Any


@njit(nogil=True, cache=True, boundscheck=False)
def _new_room(padded):  # type: ignore[no-untyped-def]
    block, part = U(_KEYS) * padded, U(PART_ROWS) * padded
    return _Room(
        np.zeros(block, np.float32),
        np.empty(block, np.float32),
        np.empty(block, np.float32),
        np.empty(PART_ROWS * MOST_COLUMNS, np.float32),
        np.empty(PART_ROWS, np.float32),
        np.empty(PART_ROWS, np.float32),
        np.empty(part, np.float32),
        np.empty(_KEYS * PANEL_ROWS, np.float32),
        np.zeros(_KEYS * PANEL_ROWS, np.float32),
        np.empty(PANEL_ROWS, np.float32),
        np.zeros(WIDTH, np.float32),
    )


@njit(nogil=True, cache=True, boundscheck=False)
def _make_block_plain(raw, halves, shape, pages, offset, begin, count, room):  # type: ignore[no-untyped-def]
    """``count`` tokens from ``begin`` on, followed by zeros up to whole tiles."""
    done = U(0)
    while done < count:
        turn, place = (begin + done) // shape.page_tokens, (begin + done) % shape.page_tokens
        tokens = min(count - done, shape.page_tokens - place)
        at = head_at(shape, pages, turn, offset) + place * shape.token_stride
        make_plain(raw, halves, at, tokens, shape, room.plain[done * shape.padded :])
        done += tokens
    whole = (count + _WIDTH - U(1)) // _WIDTH * _WIDTH
    room.plain[count * shape.padded : whole * shape.padded] = F(0.0)
    return whole


@njit(nogil=True, cache=True, boundscheck=False)
def _lay_out(raw, halves, shape, pages, begin, count, room):  # type: ignore[no-untyped-def]
    """A block's keys and values as products take them."""
    padded = shape.padded
    whole = _make_block_plain(raw, halves, shape, pages, U(0), begin, count, room)
    for token in range(0, whole, WIDTH):
        for column in range(0, padded, WIDTH):
            source = U(token) * padded + U(column)
            target = U(token) * padded + U(column) * _WIDTH
            transpose(room.plain, source, padded, room.keys, target)
    _make_block_plain(raw, halves, shape, pages, shape.num_heads, begin, count, room)
    for column in range(0, padded, WIDTH):
        for token in range(count):
            target = (U(column) // _WIDTH * U(_KEYS) + U(token)) * _WIDTH
            store(room.values, target, load(room.plain, U(token) * padded + U(column)))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _multiply(rows, pitch, count, x, apart, num_tiles, sums):  # type: ignore[no-untyped-def]
    """sums [tiles, panel, 16] += the panel's rows, which are ``pitch`` apart, times tiles of x,
    which are ``apart``; ``count`` numbers of each. A pitch known to the compiler leaves registers
    for sums."""
    together = num_tiles // U(TILES_TOGETHER) * U(TILES_TOGETHER)
    for tile in range(0, together, TILES_TOGETHER):
        at, own = U(tile) * apart, U(tile) * _TILE
        add_products_of_tiles(rows, pitch, x, at, apart, count, sums, own, _TILE)
    for tile in range(together, num_tiles):
        at, own = U(tile) * apart, U(tile) * _TILE
        add_products(rows, pitch, x, at, apart, count, sums, own, _TILE)


@njit(nogil=True, cache=True, boundscheck=False)
def _hide(numbers, start, pitch, low, high, value):  # type: ignore[no-untyped-def]
    """A value in place of those outside of ``low`` to ``high`` in the tiles that these share with
    others; tiles are ``pitch`` apart."""
    for place in range(low // _WIDTH * _WIDTH, low):
        numbers[start + U(place) // _WIDTH * pitch + U(place) % _WIDTH] = value
    for place in range(high, (high + _WIDTH - U(1)) // _WIDTH * _WIDTH):
        numbers[start + U(place) // _WIDTH * pitch + U(place) % _WIDTH] = value


@njit(nogil=True, cache=True, boundscheck=False)
def _weigh(room, place, low, high, num_tiles, top):  # type: ignore[no-untyped-def]
    """The scores of the panel's row at ``place`` with the keys ``low`` to ``high`` of a block to
    weights, relative to the highest score, this one or ``top``; 0 where it sees none. Returns
    their sum and the highest score."""
    first, last = low // _WIDTH, (high + _WIDTH - U(1)) // _WIDTH
    own, start = U(place) * _WIDTH, U(place) * U(_KEYS)
    _hide(room.scores, own, _TILE, low, high, _LOWEST)
    most = splat(top)
    for tile in range(first, last):
        most = larger(load(room.scores, U(tile) * _TILE + own), most)
    top = largest(most)
    highest = splat(top)
    for tile in range(first, last):
        score = load(room.scores, U(tile) * _TILE + own)
        store(room.weights, start + U(tile) * _WIDTH, exponential(subtract(score, highest)))
    _hide(room.weights, start, _WIDTH, low, high, F(0.0))
    sums = splat(F(0.0))
    for tile in range(first, last):
        sums = add(sums, load(room.weights, start + U(tile) * _WIDTH))
    for tile in range(first):
        store(room.weights, start + U(tile) * _WIDTH, splat(F(0.0)))
    for tile in range(last, num_tiles):
        store(room.weights, start + U(tile) * _WIDTH, splat(F(0.0)))
    return total(sums), top


@njit(nogil=True, cache=True, boundscheck=False)
def _scale_found(room, found, place, factor, columns):  # type: ignore[no-untyped-def]
    for column in range(columns):
        at = U(column) * _TILE + U(place) * _WIDTH
        store(found, at, multiply(load(found, at), splat(factor)))


@njit(nogil=True, cache=True, boundscheck=False)
def _attend_panel(room, rule, padded, query, first, count, before, begin, length):  # type: ignore[no-untyped-def]
    """The panel of ``count`` rows that begins with the part's row ``first``, the row's query
    ``query``, over the block of ``length`` keys from ``begin`` on."""
    group, window = rule.group, rule.window
    # The last query sees most, the first one what lies farthest back.
    seen = before + (query + count - U(1)) // group + U(1)
    if seen <= begin or (window and begin + length + window <= before + query // group + U(1)):
        return
    seen = min(length, seen - begin)
    num_tiles, columns = (seen + _WIDTH - U(1)) // _WIDTH, padded // _WIDTH
    scores, found = room.scores[: num_tiles * _TILE], room.found[first * padded :]
    scores[:] = F(0.0)
    _multiply(
        room.queries[first * U(MOST_COLUMNS) :],
        U(MOST_COLUMNS),
        padded,
        room.keys,
        padded * _WIDTH,
        num_tiles,
        scores,
    )
    if rule.limit > 0:
        cap(scores, U(0), num_tiles * _TILE, rule.limit)
    for place in range(count):
        border = before + (query + U(place)) // group + U(1)
        high = min(length, border - begin) if border > begin else U(0)
        low = min(high, border - window - begin) if window and border > begin + window else U(0)
        before_it = room.tops[first + U(place)]
        room.gains[place], top = _weigh(room, place, low, high, num_tiles, before_it)
        room.changes[place] = before_it - top
        room.tops[first + U(place)] = top
    store(room.changes, U(0), exponential(load(room.changes, U(0))))
    for place in range(count):
        factor, own = room.changes[place], first + U(place)
        room.sums[own] = room.sums[own] * factor + room.gains[place]
        if factor != F(1.0):
            _scale_found(room, found, place, factor, columns)
    _multiply(room.weights, U(_KEYS), seen, room.values, U(_KEYS) * _WIDTH, columns, found)


@njit(nogil=True, cache=True, boundscheck=False)
def _load_queries(q, at, rule, query, count, shape, room):  # type: ignore[no-untyped-def]
    """``count`` rows from the queries ``query`` on, a token's heads side by side, scaled."""
    for row in range(count):
        token, head = (query + U(row)) // rule.group, (query + U(row)) % rule.group
        source, to = at + token * q.pitch + head * shape.width, U(row) * U(MOST_COLUMNS)
        whole = shape.width // _WIDTH * _WIDTH
        if whole < shape.width:
            store(room.queries, to + whole, splat(F(0.0)))
        for column in range(0, whole, WIDTH):
            scaled = multiply(load(q.numbers, source + U(column)), splat(rule.scale))
            store(room.queries, to + U(column), scaled)
        for column in range(whole, shape.width):
            number = number_at(q.numbers, source + U(column))
            room.queries[to + U(column)] = number * rule.scale


@njit(nogil=True, cache=True, boundscheck=False)
def _put_found(out, at, rule, query, count, shape, room):  # type: ignore[no-untyped-def]
    """What was found for these rows, over the sums of their weights, to where they belong."""
    for row in range(count):
        token, head = (query + U(row)) // rule.group, (query + U(row)) % rule.group
        target, factor = at + token * out.pitch + head * shape.width, F(1.0) / room.sums[row]
        panel, place = U(row) // _PANEL * _PANEL, U(row) % _PANEL
        own = panel * shape.padded + place * _WIDTH
        whole = shape.width // _WIDTH
        for column in range(whole):
            number = multiply(load(room.found, own + U(column) * _TILE), splat(factor))
            store(out.numbers, target + U(column) * _WIDTH, number)
        for lane in range(shape.width - whole * _WIDTH):
            number = room.found[own + whole * _TILE + U(lane)] * factor
            put_number(out.numbers, target + whole * _WIDTH + U(lane), number)


@njit(nogil=True, cache=True, boundscheck=False)
def attend_queries(first, last, raw, halves, shape, pages, kv_lens, rule, q, out, lses):  # type: ignore[no-untyped-def]
    """The ``first`` to ``last`` of all parts: those of PART_ROWS queries of each head of keys of
    each row, in this order.

    raw, halves, shape: the pool, as ``attend_heads`` has it. pages [rows, heads, pages]: numbers of
    [page, head]. kv_lens [rows]: keys before a row's first query; those of its queries follow them.
    q: float32, or uint16 that are bfloat16; out likewise, where a token's heads lie side by side;
    the log-sum-exps of each go to lses, unless its array is empty.
    """
    num_heads, group = U(pages.shape[1]), U(rule.group)
    all_rows = rule.per_row * group
    parts = (all_rows + U(PART_ROWS - 1)) // U(PART_ROWS)
    room = _new_room(shape.padded)
    for job in range(first, last):
        part, own = U(job) % parts, U(job) // parts
        row, head = own // num_heads, own % num_heads
        query = part * U(PART_ROWS)
        count = min(U(PART_ROWS), all_rows - query)
        token, column = row * rule.per_row, head * group * shape.width
        _load_queries(q, token * q.pitch + column, rule, query, count, shape, room)
        room.sums[:], room.tops[:], room.found[:] = F(0.0), _LOWEST, F(0.0)
        before = U(kv_lens[row])
        nearest = before + query // group + U(1)
        begin = nearest - rule.window if rule.window and nearest > rule.window else U(0)
        end = before + (query + count - U(1)) // group + U(1)
        while begin < end:
            length = min(U(_KEYS), end - begin)
            _lay_out(raw, halves, shape, pages[row, head], begin, length, room)
            for panel in range(0, count, PANEL_ROWS):
                own_rows, at = min(_PANEL, count - U(panel)), query + U(panel)
                _attend_panel(
                    room, rule, shape.padded, at, U(panel), own_rows, before, begin, length
                )
            begin += length
        _put_found(out, token * out.pitch + column, rule, query, count, shape, room)
        if lses.numbers.shape[0]:
            for line in range(count):
                at = token + (query + U(line)) // group
                place = at * lses.pitch + head * group + (query + U(line)) % group
                lses.numbers[place] = room.tops[line] + np.log(room.sums[line])
