"""Loops over rows of plain numbers times tokens, in float32, which numba compiles. Each works on
some rows, alone; threads are the caller's business.

Rows are float32, or 16 bits that are widened where they are used: uint16 that are bfloat16, int16
that are float16. Many tokens are multiplied as Goto and van de Geijn do it (2008): a panel of rows,
some columns of it at a time, lies in the nearest cache and meets tokens sixteen by sixteen, whose
sums stay in registers. Few tokens are multiplied row by row, as fast as rows can be read.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.vectors import (
    PANEL_ROWS,
    WIDTH,
    add,
    add_products,
    load,
    multiply_add,
    prefetch,
    splat,
    store,
    total,
    transpose,
)

__all__ = ["PANEL_ROWS", "few_tokens", "lay_in_tiles", "many_tokens", "multiply_few"]

U = np.uintp
F = np.float32
_FEW = 4
"""Tokens that are multiplied at once where there are few."""
_COLUMNS = 256
"""Of a panel, at a time: with as many of sixteen tokens they stay in the nearest cache."""


@njit(nogil=True, cache=True, boundscheck=False)
def _multiply_four(values, x, token, out):  # type: ignore[no-untyped-def]
    """A row times four tokens of x, which is flat."""
    columns = U(values.shape[0])
    at = U(token) * columns
    a = b = c = d = splat(F(0.0))
    for column in range(0, columns, WIDTH):
        place = U(column)
        some = load(values, place)
        a = multiply_add(some, load(x, at + place), a)
        b = multiply_add(some, load(x, at + columns + place), b)
        c = multiply_add(some, load(x, at + U(2) * columns + place), c)
        d = multiply_add(some, load(x, at + U(3) * columns + place), d)
    out[token], out[token + 1], out[token + 2], out[token + 3] = (
        total(a),
        total(b),
        total(c),
        total(d),
    )


@njit(nogil=True, cache=True, boundscheck=False)
def _multiply_one(values, x, token, out):  # type: ignore[no-untyped-def]
    """Likewise one token; every second vector has a sum of its own, for one need not wait then."""
    columns = U(values.shape[0])
    at = U(token) * columns
    even = columns // U(2 * WIDTH) * U(2 * WIDTH)
    a = b = splat(F(0.0))
    for column in range(0, even, 2 * WIDTH):
        place = U(column)
        a = multiply_add(load(values, place), load(x, at + place), a)
        place += U(WIDTH)
        b = multiply_add(load(values, place), load(x, at + place), b)
    if even < columns:
        a = multiply_add(load(values, even), load(x, at + even), a)
    out[token] = total(add(a, b))


@njit(nogil=True, cache=True, boundscheck=False)
def multiply_few(values, x, out):  # type: ignore[no-untyped-def]
    """out [tokens] = a row of whole vectors times each token of x, which is flat."""
    tokens = out.shape[0]
    fours = tokens // _FEW * _FEW
    for token in range(0, fours, _FEW):
        _multiply_four(values, x, token, out)
    for token in range(fours, tokens):
        _multiply_one(values, x, token, out)


@njit(nogil=True, cache=True, boundscheck=False)
def few_tokens(rows, x, bias, adds, out, pitch, first):  # type: ignore[no-untyped-def]
    """Rows [n, columns] of whole vectors times tokens [tokens * columns], to the columns of out
    from ``first`` on, whose rows are ``pitch`` apart: plus the bias [all rows] unless it is empty,
    added to what is there where it ``adds``."""
    columns = rows.shape[1]
    sums = np.empty(x.shape[0] // columns, np.float32)
    for row in range(rows.shape[0]):
        multiply_few(rows[row], x, sums)
        place = first + row
        own = bias[place] if bias.shape[0] else F(0.0)
        for token in range(sums.shape[0]):
            before = out[token * pitch + place] if adds else F(0.0)
            out[token * pitch + place] = sums[token] + own + before


@njit(nogil=True, cache=True, boundscheck=False)
def lay_in_tiles(x, pitch, columns, tokens, first, last, out):  # type: ignore[no-untyped-def]
    """Tiles ``first`` to ``last`` of sixteen tokens of x, whose rows are ``pitch`` apart, to out
    [tiles * columns * 16]: a column's sixteen side by side, zeros where there is no token."""
    for tile in range(first, last):
        at, token = tile * columns * WIDTH, tile * WIDTH
        if token + WIDTH <= tokens:
            for column in range(0, columns, WIDTH):
                start = U(token * pitch + column)
                transpose(x, start, U(pitch), out, U(at + column * WIDTH))
        else:
            for place in range(WIDTH):
                is_there = token + place < tokens
                source = (token + place) * pitch
                for column in range(columns):
                    own = x[source + column] if is_there else F(0.0)
                    out[at + column * WIDTH + place] = own


@njit(nogil=True, cache=True, boundscheck=False)
def many_tokens(rows, tiles, tokens, bias, adds, out, pitch, first):  # type: ignore[no-untyped-def]
    """As ``few_tokens``, of tokens that lie in tiles."""
    count, columns = rows.shape
    flat = rows.reshape(-1)
    num_tiles = (tokens + WIDTH - 1) // WIDTH
    panel = np.zeros(PANEL_ROWS * _COLUMNS, np.float32)
    sums = np.empty(num_tiles * PANEL_ROWS * WIDTH, np.float32)
    for top in range(0, count, PANEL_ROWS):
        height = min(PANEL_ROWS, count - top)
        sums[:] = F(0.0)
        for begin in range(0, columns, _COLUMNS):
            width = min(_COLUMNS, columns - begin)
            # What is wanted next: the same rows' further columns, or the next panel's first ones.
            ahead = _COLUMNS if begin + width < columns else PANEL_ROWS * columns - begin
            for row in range(height):
                at = (top + row) * columns + begin
                for column in range(0, width, WIDTH):
                    prefetch(flat, U(at + ahead + column))
                    store(panel, U(row * _COLUMNS + column), load(flat, U(at + column)))
            for tile in range(num_tiles):
                at, place = (tile * columns + begin) * WIDTH, tile * PANEL_ROWS * WIDTH
                add_products(panel, U(_COLUMNS), tiles, U(at), U(width), sums, U(place))
        _put(sums, tokens, height, bias, adds, out, pitch, first + top)


@njit(nogil=True, cache=True, boundscheck=False)
def _put(sums, tokens, height, bias, adds, out, pitch, first):  # type: ignore[no-untyped-def]
    """A panel's sums to its columns of out."""
    for token in range(tokens):
        at = token // WIDTH * PANEL_ROWS * WIDTH + token % WIDTH
        for row in range(height):
            place = token * pitch + first + row
            found = sums[at + row * WIDTH]
            if bias.shape[0]:
                found += bias[first + row]
            if adds:
                found += out[place]
            out[place] = found
