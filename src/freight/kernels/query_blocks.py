"""Attention of several queries a row over keys and values in pages: what loops for it have in
common, whatever their products are made with.

Queries of all heads that share keys are rows of one product, a panel of them at a time. Blocks of
keys follow one another, and what was found so far is scaled to the highest score yet (as in
FlashAttention, Dao et al., 2022); those that no query of a panel sees are left out. Scores and
sums are float32. Threads are the caller's business.

A loop brings a room of its own, whose type says how queries are loaded, keys laid out and panels
attended. Rooms have: ``plain``, a block's keys or values [KEYS, padded]; of each row of a part
``sums`` of its weights and the highest score so far, ``tops``; of each panel what was ``found``,
[padded / 16, panel, 16]. Of the panel at hand ``scores`` [tiles, panel, 16], ``weights`` [panel,
KEYS], their sums ``gains`` [panel] and by how much the highest scores have grown, ``changes``,
whole vectors of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freight.kernels.attention_steps import exponential, head_at, make_plain
from freight.kernels.compiled import uncounted
from freight.kernels.vectors import (
    WIDTH,
    add,
    larger,
    largest,
    load,
    multiply,
    multiply_add,
    put_number,
    splat,
    store,
    total,
)

__all__ = [
    "KEYS",
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


class Rule(NamedTuple):
    """What queries see, and how: ``per_row`` of them follow a row's earlier keys, with ``group``
    heads for each head of keys. Each sees its own token and what comes before, but only the last
    ``window`` unless that is 0. Scores are scaled, and capped at ``limit`` unless that is 0."""

    per_row: Any
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


@uncounted
def _hide(numbers, start, pitch, low, high, value):  # type: ignore[no-untyped-def]
    """A value in place of those outside of ``low`` to ``high`` in the tiles that these share with
    others; tiles are ``pitch`` apart."""
    for place in range(low // _WIDTH * _WIDTH, low):
        numbers[start + U(place) // _WIDTH * pitch + U(place) % _WIDTH] = value
    for place in range(high, (high + _WIDTH - U(1)) // _WIDTH * _WIDTH):
        numbers[start + U(place) // _WIDTH * pitch + U(place) % _WIDTH] = value


@uncounted
def _weigh(room, panel, scale, place, low, high, num_tiles, top):  # type: ignore[no-untyped-def]
    """The scores of the panel's row at ``place`` with the keys ``low`` to ``high`` of a block,
    scaled, to weights, relative to the highest score, this one or ``top``; 0 where it sees none.
    Returns their sum and the highest score."""
    first, last = low // _WIDTH, (high + _WIDTH - U(1)) // _WIDTH
    own, start, apart = U(place) * _WIDTH, U(place) * U(KEYS), panel * _WIDTH
    _hide(room.scores, own, apart, low, high, _LOWEST)
    most = splat(_LOWEST)
    for tile in range(first, last):
        most = larger(load(room.scores, U(tile) * apart + own), most)
    top = max(top, largest(most) * scale)
    factor, lowered = splat(scale), splat(-top)
    for tile in range(first, last):
        score = multiply_add(load(room.scores, U(tile) * apart + own), factor, lowered)
        store(room.weights, start + U(tile) * _WIDTH, exponential(score))
    _hide(room.weights, start, _WIDTH, low, high, 0)
    sums = splat(F(0.0))
    for tile in range(first, last):
        sums = add(sums, load(room.weights, start + U(tile) * _WIDTH))
    for tile in range(first):
        store(room.weights, start + U(tile) * _WIDTH, splat(F(0.0)))
    for tile in range(last, num_tiles):
        store(room.weights, start + U(tile) * _WIDTH, splat(F(0.0)))
    return total(sums), top


@uncounted
def weigh_panel(room, rule, panel, scale, columns, own, before, block, num_tiles):  # type: ignore[no-untyped-def]
    """Scores of a panel, whose rows are ``panel``, scaled, to weights, and what was found so far,
    in so many ``columns`` of sixteen, scaled to the highest scores."""
    query, first, count = own
    begin, length = block
    for place in range(count):
        border = before + (query + U(place)) // rule.group + U(1)
        high = min(length, border - begin) if border > begin else U(0)
        low = U(0)
        if rule.window and border > begin + rule.window:
            low = min(high, border - rule.window - begin)
        before_it = room.tops[first + U(place)]
        room.gains[place], top = _weigh(room, panel, scale, place, low, high, num_tiles, before_it)
        room.changes[place] = before_it - top
        room.tops[first + U(place)] = top
    for place in range(0, count, WIDTH):
        store(room.changes, U(place), exponential(load(room.changes, U(place))))
    found = room.found[first * columns * _WIDTH :]
    for place in range(count):
        factor, row = room.changes[place], first + U(place)
        room.sums[row] = room.sums[row] * factor + room.gains[place]
        if factor == F(1.0):
            continue
        for column in range(columns):
            at = (U(column) * panel + U(place)) * _WIDTH
            store(found, at, multiply(load(found, at), splat(factor)))


@uncounted
def _put_found(out, at, rule, query, count, shape, room, panel):  # type: ignore[no-untyped-def]
    """What was found for these rows, over the sums of their weights, to where they belong."""
    for row in range(count):
        token, head = (query + U(row)) // rule.group, (query + U(row)) % rule.group
        target, factor = at + token * out.pitch + head * shape.width, F(1.0) / room.sums[row]
        own = U(row) // panel * panel * shape.padded + U(row) % panel * _WIDTH
        whole, apart = shape.width // _WIDTH, panel * _WIDTH
        for column in range(whole):
            number = multiply(load(room.found, own + U(column) * apart), splat(factor))
            store(out.numbers, target + U(column) * _WIDTH, number)
        for lane in range(shape.width - whole * _WIDTH):
            number = room.found[own + whole * apart + U(lane)] * factor
            put_number(out.numbers, target + whole * _WIDTH + U(lane), number)


@uncounted
def attend_parts(first, last, room, size, pool, pages, kv_lens, rule, q, out, lses):  # type: ignore[no-untyped-def]
    """The ``first`` to ``last`` of all parts: those of so many queries of each head of keys of each
    row, in this order. ``size`` is how many queries a panel has, and a part, which is whole panels.

    pool: raw, halves and shape, as ``attend_heads`` has them. pages [rows, heads, pages]: numbers
    of [page, head]. kv_lens [rows]: keys before a row's first query; those of its queries follow
    them. q: float32, or uint16 that are bfloat16; out likewise, where a token's heads lie side by
    side; the log-sum-exps of each go to lses, unless its array is empty.
    """
    num_heads, group = U(pages.shape[1]), U(rule.group)
    panel, part_rows = size
    raw, halves, shape = pool
    all_rows = rule.per_row * group
    parts = (all_rows + part_rows - U(1)) // part_rows
    for job in range(first, last):
        part, own = U(job) % parts, U(job) // parts
        row, head = own // num_heads, own % num_heads
        query = part * part_rows
        count = min(part_rows, all_rows - query)
        token, column = row * rule.per_row, head * group * shape.width
        load_queries(q, token * q.pitch + column, rule, query, count, shape, room)
        room.sums[:], room.tops[:], room.found[:] = F(0.0), _LOWEST, F(0.0)
        before = U(kv_lens[row])
        nearest = before + query // group + U(1)
        begin = nearest - rule.window if rule.window and nearest > rule.window else U(0)
        end = before + (query + count - U(1)) // group + U(1)
        while begin < end:
            length = min(U(KEYS), end - begin)
            lay_out(raw, halves, shape, pages[row, head], begin, length, room)
            for at in range(0, count, panel):
                rows = query + U(at), U(at), min(panel, count - U(at))
                attend_panel(room, rule, shape.padded, rows, before, (begin, length))
            begin += length
        _put_found(out, token * out.pitch + column, rule, query, count, shape, room, panel)
        if lses.numbers.shape[0]:
            for line in range(count):
                at_token = token + (query + U(line)) // group
                place = at_token * lses.pitch + head * group + (query + U(line)) % group
                lses.numbers[place] = room.tops[line] + np.log(room.sums[line])
