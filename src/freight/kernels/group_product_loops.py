"""Loops over rows of integers whose groups run across rows times few tokens, in float32, which
numba compiles. Threads are the caller's business."""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.compiled import uncounted
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

__all__ = ["product_across"]

U = np.uintp
F = np.float32


@uncounted
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


@uncounted
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
    """Bytes ``first`` to ``last`` of the groups times x, which is flat, [tokens * columns], to the
    rows' part of out [rows, tokens]. Rows that share groups share what their scales and minima come
    to."""
    step = size * bits // 8
    scales, minima = np.empty(columns, np.float32), np.empty(columns, np.float32)
    scaled, added = np.empty(x.shape[0], np.float32), np.empty(out.shape[1], np.float32)
    codes = np.empty(columns, np.float32)
    factors = step * columns // numbers.itemsize
    for place in range(first, last):
        line, byte = place // step, place % step
        if place == first or byte == 0:
            widen_factors(numbers[line], U(factors), U(columns), scales, U(0))
            widen_factors(numbers[line], U(factors + columns), U(columns), minima, U(0))
            _scale_tokens(x, scales, minima, scaled, added)
        for half in range(size // step):
            _codes_of(raw[line], byte * columns, bits, half == 1, codes)
            row = out[line * size + byte + half * step]
            multiply_few(codes, 0, 1, columns, scaled, False, row, 0)
            for token in range(added.shape[0]):
                row[token] += added[token]
