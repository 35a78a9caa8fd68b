"""Loops over rows of integers in groups, which numba compiles. Each works on some rows, alone;
threads are the caller's business.

Where groups run across rows, a line is as many rows as a group has, and is cut by bytes of the
groups: each has one or two rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.compiled import uncounted
from freight.kernels.vectors import (
    WIDTH,
    add,
    factor_at,
    load,
    load_bytes,
    load_factors,
    load_high,
    load_low,
    multiply,
    splat_factor,
    store,
)

__all__ = ["make_plain", "make_plain_across", "plain_groups", "plain_row", "widen_factors"]

U = np.uintp
F = np.float32
_STRIP = 1024
"""Columns whose scales and minima stay in the nearest cache."""


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _value(code, scale, lowest):  # type: ignore[no-untyped-def]
    # In two steps, as the reference rounds.
    return add(multiply(code, scale), lowest)


@uncounted
def plain_groups(raw, start, numbers, factors, groups, size, bits, first, last, out, target):  # type: ignore[no-untyped-def]
    """Groups ``first`` to ``last`` of a row's ``groups`` to values: float32, or uint16 that are
    bfloat16, in out from ``target`` on. The row's codes begin at ``start`` of raw; its scales,
    behind which minima lie, at ``factors`` of the same bytes as uint16 or uint32, whichever is as
    wide as a scale."""
    own = U(size)
    step = own * U(bits) // U(8)
    # Where a group is no multiple of a vector, the last one overlaps the one before it.
    last_vector = step - U(WIDTH)
    for number in range(first, last):
        group = U(number)
        scale = splat_factor(numbers, factors + group)
        lowest = splat_factor(numbers, factors + groups + group)
        source, to = start + group * step, target + U(number - first) * own
        if bits == 4:
            for byte in range(0, step, WIDTH):
                place = min(U(byte), last_vector)
                low, high = load_low(raw, source + place), load_high(raw, source + place)
                store(out, to + place, _value(low, scale, lowest))
                store(out, to + step + place, _value(high, scale, lowest))
        else:
            for byte in range(0, step, WIDTH):
                place = min(U(byte), last_vector)
                codes = load_bytes(raw, source + place)
                store(out, to + place, _value(codes, scale, lowest))


@uncounted
def plain_row(raw, numbers, size, bits, out):  # type: ignore[no-untyped-def]
    """All of a row, whose bytes these are, once as numbers of a scale's width."""
    groups = U(out.shape[0]) // U(size)
    factors = groups * (U(size) * U(bits) // U(8)) // U(numbers.itemsize)
    plain_groups(raw, U(0), numbers, factors, groups, size, bits, 0, groups, out, U(0))


@uncounted
def make_plain(raw, numbers, size, bits, out):  # type: ignore[no-untyped-def]
    """raw uint8 [rows, row bytes], the same as numbers of a scale's width, to out [rows, columns]:
    float32, or uint16 that are bfloat16, rounded to the nearest, ties to even."""
    for row in range(out.shape[0]):
        plain_row(raw[row], numbers[row], size, bits, out[row])


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def widen_factors(numbers, start, count, out, place):  # type: ignore[no-untyped-def]
    """``count`` factors from ``start`` on as float32, to out from ``place`` on."""
    whole = count // U(WIDTH) * U(WIDTH)
    for column in range(0, whole, WIDTH):
        store(out, place + U(column), load_factors(numbers, start + U(column)))
    for column in range(whole, count):
        out[place + column] = factor_at(numbers, start + column)


@uncounted
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
            widen_factors(numbers[line], U(factors + strip), U(until - strip), own, U(0))
            widen_factors(
                numbers[line], U(factors + columns + strip), U(until - strip), lowest, U(0)
            )
            for byte in range(first - line * step, end - line * step):
                row = line * size + byte
                low, high = out[row, strip:until], out[row + size - step, strip:until]
                _plain_byte(raw[line], byte * columns + strip, own, lowest, bits, low, high)
        first = end
