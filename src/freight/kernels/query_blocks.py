"""Attention of several queries a row over keys and values in pages: what loops for it have in
common, whatever their products are made with.

Queries of all heads that share keys are rows of one product, a panel of them at a time. Blocks of
keys follow one another, and what was found so far is scaled to the highest score yet (as in
FlashAttention, Dao et al., 2022); those that no query of a panel sees are left out. Scores and
sums are float32. Threads are the caller's business.

A loop brings a room of its own, whose type says how queries are loaded, keys laid out and panels
attended. Rooms have: ``plain``, a block's keys or values [KEYS, padded]; of each row of a part
``sums`` of its weights and the highest score so far, ``tops``, as a logarithm to base 2, with room
for a vector behind them; of each panel what was ``found``, [padded / 16, panel, 16]. Of the panel
at hand ``scores`` [tiles, panel, 16], ``weights`` [panel, KEYS], rounded to what the array holds,
their sums ``gains``, by how much the highest scores have grown, ``changes``, and sixteen numbers of
each row, ``lines``: of so many rows as are whole vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freight.kernels.attention_steps import LOG_2, LOG_E, head_at, inverse, make_plain, power_of_two
from freight.kernels.compiled import uncounted
from freight.kernels.sixteen_rows import put_largest, put_totals
from freight.kernels.vectors import (
    WIDTH,
    add,
    larger,
    load,
    multiply,
    multiply_add,
    put_number,
    splat,
    spliced,
    store,
    subtract,
)

__all__ = [
    "KEYS",
    "Rows",
    "Rule",
    "Tokens",
    "attend_panel",
    "attend_parts",
    "lay_out",
    "load_queries",
    "make_block_plain",
    "seen_of_block",
    "weigh_panel",
]

U = np.uintp
F = np.float32
KEYS = 128
"""Of a block: its keys and values stay in a core's own cache."""
_WIDTH = U(WIDTH)
_LOWEST = F(-3e38)


class Tokens(NamedTuple):
    """Numbers of tokens in a flat array, those of one ``pitch`` after those of the one before."""

    numbers: Any
    pitch: Any


class Rows(NamedTuple):
    """Rows that bring queries: keys before the first of each, ``kv_lens`` [rows]; the token that it
    begins with and behind the last row how many there are, ``firsts`` [rows + 1]; how many parts
    there are before its own, and of all, ``parts`` [rows + 1]."""

    kv_lens: Any
    firsts: Any
    parts: Any


class Rule(NamedTuple):
    """What queries see, and how: those of a row follow its earlier keys, with ``group`` heads for
    each head of keys. Each sees its own token and what comes before, but only the last ``window``
    unless that is 0. Scores are scaled, and capped at ``limit`` unless that is 0."""

    group: Any
    scale: Any
    limit: Any
    window: Any


def load_queries(q: Any, at: Any, rule: Any, query: Any, count: Any, shape: Any, room: Any) -> None:
    """``count`` rows from the queries ``query`` on, a token's heads side by side."""
    raise NotImplementedError


def lay_out(
    raw: Any, halves: Any, shape: Any, pages: Any, begin: Any, count: Any, room: Any
) -> Any:
    """A block's ``count`` keys and values from ``begin`` on as products take them."""
    raise NotImplementedError


def attend_panel(room: Any, rule: Any, padded: Any, own: Any, before: Any, block: Any) -> None:
    """The panel of rows ``own``, over the ``block``: (the row's query, the part's row that it
    begins with, how many), and (the first key, how many)."""
    raise NotImplementedError


@njit(nogil=True, cache=True, boundscheck=False)
def make_block_plain(raw, halves, shape, pages, offset, begin, count, unit, room):  # type: ignore[no-untyped-def]
    """``count`` tokens from ``begin`` on, followed by zeros up to whole units; returns how many
    that makes."""
    done = U(0)
    while done < count:
        turn, place = (begin + done) // shape.page_tokens, (begin + done) % shape.page_tokens
        tokens = min(count - done, shape.page_tokens - place)
        at = head_at(shape, pages, turn, offset) + place * shape.token_stride
        make_plain(raw, halves, at, tokens, shape, room.plain[done * shape.padded :], at)
        done += tokens
    whole = (count + unit - U(1)) // unit * unit
    room.plain[count * shape.padded : whole * shape.padded] = 0
    return whole


@uncounted
def seen_of_block(rule, own, before, block):  # type: ignore[no-untyped-def]
    """How many keys of a block the panel sees, 0 where all lie after it, or before its window."""
    query, _, count = own
    begin, length = block
    # The last query sees most, the first one what lies farthest back.
    seen = before + (query + count - U(1)) // rule.group + U(1)
    border = before + query // rule.group + U(1)
    if seen <= begin or (rule.window and begin + length + rule.window <= border):
        return U(0)
    return min(length, seen - begin)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _seen(border, window, begin, length):  # type: ignore[no-untyped-def]
    """Of a block's keys those that a query sees whose own one is the last before ``border``. Where
    it sees none that is between two tiles: at the begin, or at the end of a whole block."""
    high = min(length, border - begin) if border > begin else U(0)
    if window and border > begin + window:
        return min(high, border - window - begin), high
    return U(0), high


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _following(border, member, group):  # type: ignore[no-untyped-def]
    """The next query's border, and which of a token's it is."""
    return (border, member + U(1)) if member + U(1) < group else (border + U(1), U(0))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _largest_of(scores, start, apart, low, high):  # type: ignore[no-untyped-def]
    """The highest of a row's scores from ``low`` to ``high``, in each lane; others in the tiles
    that these share with them become the lowest of all."""
    lowest = splat(_LOWEST)
    if low % _WIDTH:
        at = start + low // _WIDTH * apart
        store(scores, at, spliced(lowest, load(scores, at), low % _WIDTH))
    if high % _WIDTH:
        at = start + high // _WIDTH * apart
        store(scores, at, spliced(load(scores, at), lowest, high % _WIDTH))
    found = lowest
    for tile in range(low // _WIDTH, (high + _WIDTH - U(1)) // _WIDTH):
        found = larger(load(scores, start + U(tile) * apart), found)
    return found


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _weigh(of_row, seen, factor, top, weights, to):  # type: ignore[no-untyped-def]
    """A row's scores to weights, relative to ``top``: ``of_row`` are all scores, where its own
    begin, and from tile to tile, ``seen`` the first key, the last one, and how many tiles there
    are. Where it sees none weights are 0. Returns their sums in each lane."""
    (scores, start, apart), (low, high, num_tiles) = of_row, seen
    first, last = low // _WIDTH, (high + _WIDTH - U(1)) // _WIDTH
    nothing, factors, lowered = splat(F(0.0)), splat(factor), splat(-top)
    sums = nothing
    for tile in range(first):
        store(weights, to + U(tile) * _WIDTH, nothing)
    for tile in range(first, last):
        score = load(scores, start + U(tile) * apart)
        weight = power_of_two(multiply_add(score, factors, lowered))
        sums = add(sums, weight)
        store(weights, to + U(tile) * _WIDTH, weight)
    for tile in range(last, num_tiles):
        store(weights, to + U(tile) * _WIDTH, nothing)
    return sums


@uncounted
def weigh_panel(room, rule, panel, scale, columns, own, before, block, num_tiles):  # type: ignore[no-untyped-def]
    """Scores of a panel, whose rows are ``panel``, scaled, to weights, and what was found so far,
    in so many ``columns`` of sixteen, scaled to the highest scores. What is one number for each row
    is found for sixteen of them at once."""
    query, first, count = own
    begin, length = block
    factor, apart = scale * LOG_E, panel * _WIDTH
    nearest, turn = before + query // rule.group + U(1), query % rule.group
    border, member = nearest, turn
    for place in range(count):
        low, high = _seen(border, rule.window, begin, length)
        start = U(place) * _WIDTH
        store(room.lines, start, _largest_of(room.scores, start, apart, low, high))
        border, member = _following(border, member, rule.group)
    for place in range(0, count, WIDTH):
        put_largest(room.lines, U(place) * _WIDTH, room.gains, U(place))
        earlier = load(room.tops, first + U(place))
        top = larger(multiply(load(room.gains, U(place)), splat(factor)), earlier)
        store(room.changes, U(place), power_of_two(subtract(earlier, top)))
        store(room.tops, first + U(place), spliced(top, earlier, count - U(place)))
    border, member = nearest, turn
    for place in range(count):
        low, high = _seen(border, rule.window, begin, length)
        start, to = U(place) * _WIDTH, U(place) * U(KEYS)
        scores, top = (room.scores, start, apart), room.tops[first + U(place)]
        sums = _weigh(scores, (low, high, num_tiles), factor, top, room.weights, to)
        store(room.lines, start, sums)
        border, member = _following(border, member, rule.group)
    for place in range(0, count, WIDTH):
        put_totals(room.lines, U(place) * _WIDTH, room.gains, U(place))
        earlier = load(room.sums, first + U(place))
        grown = multiply_add(earlier, load(room.changes, U(place)), load(room.gains, U(place)))
        store(room.sums, first + U(place), spliced(grown, earlier, count - U(place)))
    found = room.found[first * columns * _WIDTH :]
    for place in range(count):
        change = room.changes[place]
        if change == F(1.0):
            continue
        for column in range(columns):
            at = (U(column) * panel + U(place)) * _WIDTH
            store(found, at, multiply(load(found, at), splat(change)))


@uncounted
def _put_found(out, at, rule, query, count, shape, room, panel):  # type: ignore[no-untyped-def]
    """What was found for these rows, over the sums of their weights, to where they belong."""
    for row in range(count):
        token, head = (query + U(row)) // rule.group, (query + U(row)) % rule.group
        target, factor = at + token * out.pitch + head * shape.width, inverse(room.sums[row])
        own = U(row) // panel * panel * shape.padded + U(row) % panel * _WIDTH
        whole, apart = shape.width // _WIDTH, panel * _WIDTH
        for column in range(whole):
            number = multiply(load(room.found, own + U(column) * apart), splat(factor))
            store(out.numbers, target + U(column) * _WIDTH, number)
        for lane in range(shape.width - whole * _WIDTH):
            number = room.found[own + whole * apart + U(lane)] * factor
            put_number(out.numbers, target + whole * _WIDTH + U(lane), number)


@uncounted
def attend_parts(first, last, room, size, pool, pages, rows, rule, q, out, lses):  # type: ignore[no-untyped-def]
    """The ``first`` to ``last`` of all parts: those of so many queries of each head of keys of each
    row, in this order. ``size`` is how many queries a panel has, and a part, which is whole panels.

    pool: raw, halves and shape, as ``attend_heads`` has them. pages [rows, heads, pages]: numbers
    of [page, head]. The keys of a row's queries follow its earlier ones. q: float32, or uint16 that
    are bfloat16; out likewise, where a token's heads lie side by side; the log-sum-exps of each go
    to lses, unless its array is empty.
    """
    group = U(rule.group)
    panel, part_rows = size
    raw, halves, shape = pool
    row = U(0)
    for job in range(first, last):
        while U(rows.parts[row + U(1)]) <= U(job):
            row += U(1)
        token, own = U(rows.firsts[row]), U(job) - U(rows.parts[row])
        all_rows = (U(rows.firsts[row + U(1)]) - token) * group
        parts = (all_rows + part_rows - U(1)) // part_rows
        head, query = own // parts, own % parts * part_rows
        count = min(part_rows, all_rows - query)
        column = head * group * shape.width
        load_queries(q, token * q.pitch + column, rule, query, count, shape, room)
        room.sums[:], room.tops[:], room.found[:] = F(0.0), _LOWEST, F(0.0)
        before = U(rows.kv_lens[row])
        nearest = before + query // group + U(1)
        begin = nearest - rule.window if rule.window and nearest > rule.window else U(0)
        end = before + (query + count - U(1)) // group + U(1)
        while begin < end:
            length = min(U(KEYS), end - begin)
            lay_out(raw, halves, shape, pages[row, head], begin, length, room)
            for at in range(0, count, panel):
                some = query + U(at), U(at), min(panel, count - U(at))
                attend_panel(room, rule, shape.padded, some, before, (begin, length))
            begin += length
        _put_found(out, token * out.pitch + column, rule, query, count, shape, room, panel)
        if lses.numbers.shape[0]:
            for line in range(count):
                at_token = token + (query + U(line)) // group
                place = at_token * lses.pitch + head * group + (query + U(line)) % group
                lses.numbers[place] = room.tops[line] * LOG_2 + np.log(room.sums[line])
