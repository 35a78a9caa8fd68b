"""Attention of several queries a row over keys and values in pages, all in float32: a loop that
numba compiles. Sums of a panel's queries with the keys of a block, turned so that sixteen lie side
by side, stay in registers.
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
from freight.kernels.register_blocks import (
    PANEL_ROWS,
    TILES_TOGETHER,
    add_products,
    add_products_of_tiles,
)
from freight.kernels.vectors import WIDTH, load, multiply, number_at, splat, store, transpose

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
PART_ROWS = 240
"""Queries of all heads that share keys which meet a block of keys once it is plain: whole panels,
and so many that making it plain is a fiftieth of the work."""
COLUMNS = WIDTH
"""Of which a head is made up, with zeros where it has no more."""
MOST_COLUMNS = 640
"""Of a head."""
_WIDTH = U(WIDTH)
_TILE = U(PANEL_ROWS * WIDTH)
"""Numbers of sixteen columns of a panel's sums."""
_WHOLE_ROWS = -(-PANEL_ROWS // WIDTH) * WIDTH
"""Of a panel, up to whole vectors."""


class _Room(NamedTuple):
    """What ``query_blocks`` says, and of a block keys turned to [tiles, padded, 16] and values to
    [padded / 16, KEYS, 16], and queries [PART_ROWS, MOST_COLUMNS]."""

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
    lines: Any


@njit(nogil=True, cache=True, boundscheck=False)
def _new_room(padded):  # type: ignore[no-untyped-def]
    block, part = U(KEYS) * padded, U(PART_ROWS) * padded
    return _Room(
        zero_lines(block),
        whole_lines(block),
        whole_lines(block),
        whole_lines(PART_ROWS * MOST_COLUMNS),
        whole_lines(PART_ROWS + WIDTH),
        whole_lines(PART_ROWS + WIDTH),
        whole_lines(part),
        whole_lines(KEYS * PANEL_ROWS),
        zero_lines(KEYS * PANEL_ROWS),
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
    padded = shape.padded
    whole = make_block_plain(raw, halves, shape, pages, U(0), begin, count, _WIDTH, room)
    for token in range(0, whole, WIDTH):
        for column in range(0, padded, WIDTH):
            source = U(token) * padded + U(column)
            target = U(token) * padded + U(column) * _WIDTH
            transpose(room.plain, source, padded, room.keys, target)
    make_block_plain(raw, halves, shape, pages, shape.to_values, begin, count, _WIDTH, room)
    for column in range(0, padded, WIDTH):
        for token in range(count):
            target = (U(column) // _WIDTH * U(KEYS) + U(token)) * _WIDTH
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


@overload(query_blocks.attend_panel, jit_options=UNCOUNTED)
def _choose_attend_panel(room, rule, padded, own, before, block):  # type: ignore[no-untyped-def]
    return _attend_panel if _is_here(room) else None


def _attend_panel(room, rule, padded, own, before, block):  # type: ignore[no-untyped-def]
    seen = seen_of_block(rule, own, before, block)
    if seen == 0:
        return
    num_tiles, columns, first = (seen + _WIDTH - U(1)) // _WIDTH, padded // _WIDTH, own[1]
    scores = room.scores[: num_tiles * _TILE]
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
    weigh_panel(room, rule, U(PANEL_ROWS), F(1.0), columns, own, before, block, num_tiles)
    found = room.found[first * padded :]
    _multiply(room.weights, U(KEYS), seen, room.values, U(KEYS) * _WIDTH, columns, found)


@overload(query_blocks.load_queries, jit_options=UNCOUNTED)
def _choose_load_queries(q, at, rule, query, count, shape, room):  # type: ignore[no-untyped-def]
    return _load_queries if _is_here(room) else None


def _load_queries(q, at, rule, query, count, shape, room):  # type: ignore[no-untyped-def]
    """Scaled."""
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
def attend_queries(first, last, raw, halves, shape, pages, rows, rule, q, out, lses):  # type: ignore[no-untyped-def]
    """As ``attend_parts``, of PART_ROWS queries each."""
    room, size = _new_room(shape.padded), (U(PANEL_ROWS), U(PART_ROWS))
    attend_parts(first, last, room, size, (raw, halves, shape), pages, rows, rule, q, out, lses)


@njit(nogil=True, cache=True)
def queries_together(threads, counters, borders, *others):  # type: ignore[no-untyped-def]
    """Ranges from each border to the next, on so many of OpenMP's threads."""
    share_ranges(attend_queries, (counters, borders), (), others, threads)
