"""Attention of several queries a row over keys and values in pages, whose products are made of
pairs of bfloat16, in registers of sixteen by sixteen or else in vectors: a loop that numba
compiles. Scores and sums are float32; weights are rounded to bfloat16, as are keys and values that
are kept in fewer bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels import query_blocks
from freight.kernels.attention_steps import cap
from freight.kernels.cache_lines import whole_lines, zero_lines
from freight.kernels.compiled import UNCOUNTED
from freight.kernels.features import may_use_tiles
from freight.kernels.lines import put_pairs
from freight.kernels.open_mp import share_ranges
from freight.kernels.query_blocks import (
    KEYS,
    Rows,
    Rule,
    Tokens,
    attend_parts,
    make_block_plain,
    seen_of_block,
    weigh_panel,
)
from freight.kernels.vectors import (
    WIDTH,
    load,
    multiply,
    number_at,
    put_number,
    splat,
    store,
    transpose,
)

if may_use_tiles():
    from freight.kernels.tile_registers import (
        ROWS,
        add_products,
        configure,
        put_products,
        release,
    )
else:
    from freight.kernels.pair_registers import (
        ROWS,
        add_products,
        configure,
        put_products,
        release,
    )

__all__ = [
    "COLUMNS",
    "MOST_COLUMNS",
    "PART_ROWS",
    "Rows",
    "Rule",
    "Tokens",
    "attend_queries",
    "queries_together",
]

U = np.uintp
F = np.float32
PART_ROWS = 8 * ROWS
"""Queries of all heads that share keys which meet a block of keys once it is laid out."""
COLUMNS = 2 * WIDTH
"""Of which a head is made up, with zeros where it has no more: sixteen pairs."""
MOST_COLUMNS = 640
"""Of a head."""
_WIDTH = U(WIDTH)
_TWICE = U(2 * WIDTH)
_PAIRS = U(KEYS // 2)
_TILE = U(ROWS * WIDTH)
"""Numbers of sixteen columns of a panel's sums."""
_WHOLE_ROWS = -(-ROWS // WIDTH) * WIDTH
"""Of a panel, up to whole vectors."""


class _Room(NamedTuple):
    """What ``query_blocks`` says, ``plain`` in bfloat16. Pairs of neighbours: ``words`` is the same
    in pairs, of a block keys [tiles, padded / 2, 16] and values [padded / 16, KEYS / 2, 16], where
    a pair is of two keys; queries [PART_ROWS, padded] and the panel's weights are bfloat16, and
    pairs as well."""

    plain: Any
    words: Any
    keys: Any
    values: Any
    queries: Any
    query_pairs: Any
    sums: Any
    tops: Any
    found: Any
    scores: Any
    weights: Any
    weight_pairs: Any
    gains: Any
    changes: Any
    lines: Any


@njit(nogil=True, cache=True, boundscheck=False)
def _new_room(padded):  # type: ignore[no-untyped-def]
    # As many pairs as half as many floats; what is not there counts as 0.
    words = whole_lines(U(KEYS // 2) * padded).view(np.uint32)
    queries = whole_lines(U(PART_ROWS // 2) * padded).view(np.uint32)
    weights = whole_lines(ROWS * KEYS // 2).view(np.uint32)
    words[:], queries[:], weights[:] = 0, 0, 0
    return _Room(
        words.view(np.uint16),
        words,
        whole_lines(U(KEYS // 2) * padded),
        whole_lines(U(KEYS // 2) * padded),
        queries.view(np.uint16),
        queries,
        whole_lines(PART_ROWS + WIDTH),
        whole_lines(PART_ROWS + WIDTH),
        whole_lines(U(PART_ROWS) * padded),
        whole_lines(KEYS * ROWS),
        weights.view(np.uint16),
        weights,
        zero_lines(_WHOLE_ROWS),
        zero_lines(_WHOLE_ROWS),
        zero_lines(_WHOLE_ROWS * WIDTH),
    )


def _is_here(room: Any) -> bool:
    return getattr(room, "instance_class", None) is _Room


@overload(query_blocks.lay_out, jit_options=UNCOUNTED)
def _choose_lay_out(raw, halves, shape, pages, begin, count, room):  # type: ignore[no-untyped-def]
    return _lay_out if _is_here(room) else None


def _lay_out(raw, halves, shape, pages, begin, count, room):  # type: ignore[no-untyped-def]
    pairs = shape.padded // U(2)
    whole = make_block_plain(raw, halves, shape, pages, U(0), begin, count, _TWICE, room)
    for token in range(0, whole, WIDTH):
        for pair in range(0, pairs, WIDTH):
            source, target = U(token) * pairs + U(pair), U(token) * pairs + U(pair) * _WIDTH
            transpose(room.words, source, pairs, room.keys, target)
    make_block_plain(raw, halves, shape, pages, shape.to_values, begin, count, _TWICE, room)
    apart = _PAIRS * _WIDTH
    for column in range(0, shape.padded, COLUMNS):
        for pair in range(whole // U(2)):
            source = U(2) * U(pair) * shape.padded + U(column)
            target = U(column) // _WIDTH * apart + U(pair) * _WIDTH
            put_pairs(room.values, target, apart, room.plain, source, source + shape.padded)


@overload(query_blocks.attend_panel, jit_options=UNCOUNTED)
def _choose_attend_panel(room, rule, padded, own, before, block):  # type: ignore[no-untyped-def]
    return _attend_panel if _is_here(room) else None


def _attend_panel(room, rule, padded, own, before, block):  # type: ignore[no-untyped-def]
    seen = seen_of_block(rule, own, before, block)
    if seen == 0:
        return
    num_tiles, columns = (seen + _TWICE - U(1)) // _TWICE * U(2), padded // _WIDTH
    pairs, first = padded // U(2), own[1]
    rows, apart = room.query_pairs, pairs * _WIDTH
    keys, scores = (room.keys, U(0), apart, pairs), (room.scores, U(0), _TILE)
    put_products(rows, first * pairs, pairs, *keys, *scores, num_tiles)
    scale = rule.scale
    if rule.limit > 0:
        for place in range(0, num_tiles * _TILE, WIDTH):
            scaled = multiply(load(room.scores, U(place)), splat(scale))
            store(room.scores, U(place), scaled)
        cap(room.scores, U(0), num_tiles * _TILE, rule.limit)
        scale = F(1.0)
    weigh_panel(room, rule, U(ROWS), scale, columns, own, before, block, num_tiles)
    values = room.values, U(0), _PAIRS * _WIDTH, num_tiles * _WIDTH // U(2)
    found = room.found, first * padded, _TILE
    add_products(room.weight_pairs, U(0), _PAIRS, *values, *found, columns)


@overload(query_blocks.load_queries, jit_options=UNCOUNTED)
def _choose_load_queries(q, at, rule, query, count, shape, room):  # type: ignore[no-untyped-def]
    return _load_queries if _is_here(room) else None


def _load_queries(q, at, rule, query, count, shape, room):  # type: ignore[no-untyped-def]
    """As they are: scores are scaled."""
    for row in range(count):
        token, head = (query + U(row)) // rule.group, (query + U(row)) % rule.group
        source, to = at + token * q.pitch + head * shape.width, U(row) * shape.padded
        whole = shape.width // _WIDTH * _WIDTH
        for column in range(0, whole, WIDTH):
            store(room.queries, to + U(column), load(q.numbers, source + U(column)))
        for column in range(whole, shape.width):
            put_number(room.queries, to + U(column), number_at(q.numbers, source + U(column)))


@njit(nogil=True, cache=True, boundscheck=False)
def attend_queries(first, last, raw, halves, shape, pages, rows, rule, q, out, lses):  # type: ignore[no-untyped-def]
    """As ``attend_parts``, of PART_ROWS queries each."""
    room, size = _new_room(shape.padded), (U(ROWS), U(PART_ROWS))
    configure()
    attend_parts(first, last, room, size, (raw, halves, shape), pages, rows, rule, q, out, lses)
    release()


@njit(nogil=True, cache=True)
def queries_together(threads, counters, borders, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(attend_queries, (counters, borders), (), others, threads)
