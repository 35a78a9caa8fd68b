"""Loops over rows of integers in groups, which numba compiles. Each works on some rows, alone;
threads are the caller's business.

Where groups run across rows, a line is as many rows as a group has, and is cut by bytes of the
groups: each has one or two rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.product_loops import ROWS_TOGETHER, multiply_few
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

__all__ = ["make_plain", "make_plain_across", "product", "product_across"]

U = np.uintp
F = np.float32
_STRIP = 1024
"""Columns whose scales and minima stay in the nearest cache."""


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
def product(raw, numbers, size, bits, x, columns, out):  # type: ignore[no-untyped-def]
    """out [rows, tokens] = rows times x, which is flat, [tokens * columns], in float32: some rows
    are made plain in the nearest cache and used for all tokens."""
    values = np.empty((ROWS_TOGETHER, columns), np.float32)
    plain, sums, tokens = values.reshape(-1), out.reshape(-1), out.shape[1]
    for top in range(0, out.shape[0], ROWS_TOGETHER):
        count = min(ROWS_TOGETHER, out.shape[0] - top)
        for row in range(count):
            _plain_row(raw[top + row], numbers[top + row], size, bits, values[row])
        multiply_few(plain, 0, count, columns, x, False, sums, top * tokens)


@njit(nogil=True, cache=True, boundscheck=False)
def _widen(numbers, start, out):  # type: ignore[no-untyped-def]
    """Factors from ``start`` on as float32."""
    for column in range(out.shape[0]):
        out[column] = factor_at(numbers, U(start) + U(column))


@njit(nogil=True, cache=True, boundscheck=False)
def _plain_byte(raw, start, scales, minima, bits, low, high):  # type: ignore[no-untyped-def]
    """One byte of the groups of some columns, in raw from ``start`` on, to the values of its row,
    or of the two rows that share it."""
    for column in range(0, scales.shape[0], WIDTH):
        place = U(column)
        scale, lowest = load(scales, place), load(minima, place)
        source = U(start) + place
        if bits == 4:
            store(low, place, _value(load_low(raw, source), scale, lowest))
            store(high, place, _value(load_high(raw, source), scale, lowest))
        else:
            store(low, place, _value(load_bytes(raw, source), scale, lowest))


@njit(nogil=True, cache=True, boundscheck=False)
def make_plain_across(raw, numbers, size, bits, first, last, out):  # type: ignore[no-untyped-def]
    """Bytes ``first`` to ``last`` of the groups of raw uint8 [lines, line bytes], counted over all
    lines, to their rows of out [rows, columns], whose columns are whole vectors. ``numbers`` and
    ``out`` are as ``make_plain`` has them."""
    columns, step = out.shape[1], size * bits // 8
    scales, minima = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.float32)
    factors = step * columns // numbers.itemsize
    while first < last:
        line = first // step
        end = min(last, (line + 1) * step)
        for strip in range(0, columns, _STRIP):
            until = min(strip + _STRIP, columns)
            own, lowest = scales[: until - strip], minima[: until - strip]
            _widen(numbers[line], factors + strip, own)
            _widen(numbers[line], factors + columns + strip, lowest)
            for byte in range(first - line * step, end - line * step):
                row = line * size + byte
                low, high = out[row, strip:until], out[row + size - step, strip:until]
                _plain_byte(raw[line], byte * columns + strip, own, lowest, bits, low, high)
        first = end


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
            _widen(numbers[line], factors, scales)
            _widen(numbers[line], factors + columns, minima)
            _scale_tokens(x, scales, minima, scaled, added)
        for half in range(size // step):
            _codes_of(raw[line], byte * columns, bits, half == 1, codes)
            row = out[line * size + byte + half * step]
            multiply_few(codes, 0, 1, columns, scaled, False, row, 0)
            for token in range(added.shape[0]):
                row[token] += added[token]
