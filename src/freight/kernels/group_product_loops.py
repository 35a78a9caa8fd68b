"""Loops over rows of integers in groups times few tokens, in float32, which numba compiles. What
minima add is a product of its own, with sums of the tokens. Threads are the caller's business."""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.group_blocks import by_tokens
from freight.kernels.group_loops import widen_factors
from freight.kernels.product_loops import multiply_few
from freight.kernels.vectors import (
    WIDTH,
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

__all__ = ["product", "product_across"]

U = np.uintp
F = np.float32


_ONE, _TWO, _FOUR = (by_tokens(count, bits=4) for count in (1, 2, 4))
_ONE_BY_BYTES, _TWO_BY_BYTES, _FOUR_BY_BYTES = (by_tokens(count, bits=8) for count in (1, 2, 4))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _codes_by_tokens(count, raw, start, scales, size, bits, x, at, columns, sums, place):  # type: ignore[no-untyped-def]
    """Codes of a row times one, two or four tokens."""
    groups, step, pitch = U(scales.shape[0]), U(size * bits // 8), U(columns)
    start, at, place = U(start), U(at), U(place)
    if bits == 4:
        if count == 4:
            _FOUR(raw, start, scales, groups, step, x, at, pitch, sums, place)
        elif count == 2:
            _TWO(raw, start, scales, groups, step, x, at, pitch, sums, place)
        else:
            _ONE(raw, start, scales, groups, step, x, at, pitch, sums, place)
    elif count == 4:
        _FOUR_BY_BYTES(raw, start, scales, groups, step, x, at, pitch, sums, place)
    elif count == 2:
        _TWO_BY_BYTES(raw, start, scales, groups, step, x, at, pitch, sums, place)
    else:
        _ONE_BY_BYTES(raw, start, scales, groups, step, x, at, pitch, sums, place)


@njit(nogil=True, cache=True, boundscheck=False)
def product(raw, numbers, size, bits, x, columns, shared, out):  # type: ignore[no-untyped-def]
    """out [rows, tokens] = rows times x, which is flat, [tokens * columns], in float32. ``shared``,
    [tokens * some whole vectors], are the sums of each group of a token's columns, then zeros: what
    minima add is their product with those."""
    line, groups, tokens = raw.shape[1], columns // size, out.shape[1]
    flat, sums, wide = raw.reshape(-1), out.reshape(-1), U(shared.shape[0] // tokens)
    scales, minima = np.empty(groups, np.float32), np.zeros(wide, np.float32)
    added = np.empty(tokens, np.float32)
    factors = columns * bits // 8 // numbers.itemsize
    for row in range(out.shape[0]):
        widen_factors(numbers[row], factors, scales)
        widen_factors(numbers[row], factors + groups, minima[:groups])
        token = 0
        while token < tokens:
            left = tokens - token
            count = 4 if left >= 4 else 2 if left >= 2 else 1
            at, place = token * columns, row * tokens + token
            _codes_by_tokens(
                count, flat, row * line, scales, size, bits, x, at, columns, sums, place
            )
            token += count
        multiply_few(minima, 0, 1, wide, shared, False, added, 0)
        for token in range(tokens):
            sums[row * tokens + token] += added[token]


@njit(nogil=True, cache=True, boundscheck=False)
def _scale_tokens(x, scales, minima, scaled, added):  # type: ignore[no-untyped-def]
    """Tokens [tokens * columns] times the scales of their columns, and their products with the
    minima: what is left of a product is that with codes."""
    columns = U(scales.shape[0])
    for token in range(added.shape[0]):
        total_added = splat(F(0.0))
        for column in range(0, columns, WIDTH):
            place, at = U(column), U(token) * columns + U(column)
            own = load(x, at)
            store(scaled, at, multiply(own, load(scales, place)))
            total_added = multiply_add(own, load(minima, place), total_added)
        added[token] = total(total_added)


@njit(nogil=True, cache=True, boundscheck=False)
def _codes_of(raw, start, bits, is_high, out):  # type: ignore[no-untyped-def]
    """Codes of a row's columns as numbers."""
    for column in range(0, out.shape[0], WIDTH):
        place = U(column)
        source = U(start) + place
        if bits == 8:
            store(out, place, load_bytes(raw, source))
        elif is_high:
            store(out, place, load_high(raw, source))
        else:
            store(out, place, load_low(raw, source))


@njit(nogil=True, cache=True, boundscheck=False)
def product_across(raw, numbers, size, bits, first, last, x, columns, out):  # type: ignore[no-untyped-def]
    """Likewise bytes ``first`` to ``last`` to the rows' part of out [rows, tokens], as ``product``
    has it. Rows that share groups share what their scales and minima come to."""
    step = size * bits // 8
    scales, minima = np.empty(columns, np.float32), np.empty(columns, np.float32)
    scaled, added = np.empty(x.shape[0], np.float32), np.empty(out.shape[1], np.float32)
    codes = np.empty(columns, np.float32)
    factors = step * columns // numbers.itemsize
    for place in range(first, last):
        line, byte = place // step, place % step
        if place == first or byte == 0:
            widen_factors(numbers[line], factors, scales)
            widen_factors(numbers[line], factors + columns, minima)
            _scale_tokens(x, scales, minima, scaled, added)
        for half in range(size // step):
            _codes_of(raw[line], byte * columns, bits, half == 1, codes)
            row = out[line * size + byte + half * step]
            multiply_few(codes, 0, 1, columns, scaled, False, row, 0)
            for token in range(added.shape[0]):
                row[token] += added[token]
