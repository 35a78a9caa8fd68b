"""Loops over rows of integers in groups, which numba compiles. Each works on some rows, alone;
threads are the caller's business.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.vectors import (
    WIDTH,
    add,
    factor_at,
    load,
    load_bytes,
    load_high,
    load_low,
    multiply,
    multiply_add,
    splat,
    store,
    total,
)

__all__ = ["make_plain", "product"]

U = np.uintp
F = np.float32
_FEW = 4
"""Tokens that are multiplied at once."""


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _value(code, scale, lowest):  # type: ignore[no-untyped-def]
    # In two steps, as the reference rounds.
    return add(multiply(code, scale), lowest)


@njit(nogil=True, cache=True, boundscheck=False)
def _plain_row(raw, numbers, size, bits, out):  # type: ignore[no-untyped-def]
    """One row's bytes, and the same as uint16 or uint32, whichever is as wide as a scale, to its
    values: float32, or uint16 that are bfloat16."""
    own = U(size)
    step, groups = own * U(bits) // U(8), U(out.shape[0]) // own
    factors = groups * step // U(numbers.itemsize)
    # Where a group is no multiple of a vector, the last one overlaps the one before it.
    last = step - U(WIDTH)
    for number in range(groups):
        group = U(number)
        scale = splat(factor_at(numbers, factors + group))
        lowest = splat(factor_at(numbers, factors + groups + group))
        source, target = group * step, group * own
        if bits == 4:
            for byte in range(0, step, WIDTH):
                place = min(U(byte), last)
                low, high = load_low(raw, source + place), load_high(raw, source + place)
                store(out, target + place, _value(low, scale, lowest))
                store(out, target + step + place, _value(high, scale, lowest))
        else:
            for byte in range(0, step, WIDTH):
                place = min(U(byte), last)
                codes = load_bytes(raw, source + place)
                store(out, target + place, _value(codes, scale, lowest))


@njit(nogil=True, cache=True, boundscheck=False)
def make_plain(raw, numbers, size, bits, out):  # type: ignore[no-untyped-def]
    """raw uint8 [rows, row bytes], the same as numbers of a scale's width, to out [rows, columns]:
    float32, or uint16 that are bfloat16, rounded to the nearest, ties to even."""
    for row in range(out.shape[0]):
        _plain_row(raw[row], numbers[row], size, bits, out[row])


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
def product(raw, numbers, size, bits, x, columns, out):  # type: ignore[no-untyped-def]
    """out [rows, tokens] = rows times x, which is flat, [tokens * columns], in float32: each row is
    made plain in the nearest cache and used for all tokens."""
    values = np.empty(columns, np.float32)
    tokens = out.shape[1]
    fours = tokens // _FEW * _FEW
    for row in range(out.shape[0]):
        _plain_row(raw[row], numbers[row], size, bits, values)
        for token in range(0, fours, _FEW):
            _multiply_four(values, x, token, out[row])
        for token in range(fours, tokens):
            _multiply_one(values, x, token, out[row])
