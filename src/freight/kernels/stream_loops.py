"""Loops over a residual stream that is several side by side, which numba compiles: what a block
works on, and what it leaves. Each works on some tokens, alone; threads are the caller's business.

Numbers are float32 in a flat array, or bfloat16 in one of uint16: these are computed in float32 and
rounded once. A token begins every ``pitch``; its streams, whole vectors each, follow each other.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.cache_lines import whole_lines
from freight.kernels.compiled import uncounted
from freight.kernels.vectors import (
    WIDTH,
    load,
    multiply,
    multiply_add,
    number_at,
    put_number,
    splat,
    store,
    total,
)

__all__ = ["collapse", "expand", "share"]

U = np.uintp
F = np.float32
_TOGETHER = 4
"""Tokens that meet each of a matrix's numbers."""
_BLOCK = 512
"""Columns of these, which the nearest cache holds."""


@uncounted
def _widen(x, token, pitch, count, columns, wide, squares):  # type: ignore[no-untyped-def]
    """Of ``count`` tokens, zeros for others; and the sums of their squares."""
    for own in range(_TOGETHER):
        sums = splat(F(0.0))
        for column in range(0, columns, WIDTH):
            numbers = splat(F(0.0))
            if own < count:
                numbers = load(x, U((token + own) * pitch + column))
            sums = multiply_add(numbers, numbers, sums)
            store(wide, U(own * columns + column), numbers)
        squares[own] = total(sums)


@uncounted
def _map(wide, columns, weight, num_mappings, sums):  # type: ignore[no-untyped-def]
    """Sums [mappings, tokens, 16], whose lanes are to be added up."""
    apart = U(columns)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        for mapping in range(num_mappings):
            place, row = U(mapping * _TOGETHER * WIDTH), mapping * columns
            a, b, c, d = splat(F(0.0)), splat(F(0.0)), splat(F(0.0)), splat(F(0.0))
            if begin:
                a, b = load(sums, place), load(sums, place + U(WIDTH))
                c, d = load(sums, place + U(2 * WIDTH)), load(sums, place + U(3 * WIDTH))
            for column in range(begin, end, WIDTH):
                at, own = U(column), load(weight, U(row + column))
                a = multiply_add(own, load(wide, at), a)
                b = multiply_add(own, load(wide, at + apart), b)
                c = multiply_add(own, load(wide, at + U(2) * apart), c)
                d = multiply_add(own, load(wide, at + U(3) * apart), d)
            store(sums, place, a)
            store(sums, place + U(WIDTH), b)
            store(sums, place + U(2 * WIDTH), c)
            store(sums, place + U(3 * WIDTH), d)


@njit(nogil=True, cache=True, boundscheck=False)
def collapse(  # type: ignore[no-untyped-def]
    first, last, x, pitch, num_streams, width, weight, factors, base, eps, floor, out, apart, mapped
):
    """Of the tokens ``first`` to ``last`` mappings [T, M]: products with the ``weight`` [M, all
    columns] over the root of the mean square, times ``factors`` [M], plus the ``base`` [M]; and the
    sum of their streams, each times sigmoid of its mapping, plus ``floor``."""
    columns, num_mappings = num_streams * width, base.shape[0]
    wide, squares = whole_lines(_TOGETHER * columns), np.empty(_TOGETHER, np.float32)
    sums = whole_lines(num_mappings * _TOGETHER * WIDTH)
    weights = np.empty(num_streams, np.float32)
    for begin in range(first, last, _TOGETHER):
        count = min(_TOGETHER, last - begin)
        _widen(x, begin, pitch, count, columns, wide, squares)
        _map(wide, columns, weight, num_mappings, sums)
        for own in range(count):
            scale, token = F(1.0) / np.sqrt(squares[own] / F(columns) + F(eps)), begin + own
            for mapping in range(num_mappings):
                sum_ = total(load(sums, U((mapping * _TOGETHER + own) * WIDTH)))
                found = sum_ * scale * factors[mapping] + base[mapping]
                mapped[token, mapping] = found
                if mapping < num_streams:
                    weights[mapping] = _sigmoid(found) + F(floor)
            for place in range(0, width, WIDTH):
                made = splat(F(0.0))
                for stream in range(num_streams):
                    numbers = load(wide, U(own * columns + stream * width + place))
                    made = multiply_add(splat(weights[stream]), numbers, made)
                store(out, U(token * apart + place), made)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _sigmoid(number):  # type: ignore[no-untyped-def]
    return F(1.0) / (F(1.0) + np.exp(min(-number, F(87.0))))


@njit(nogil=True, cache=True, boundscheck=False)
def _divide_by_sums(mix, floor):  # type: ignore[no-untyped-def]
    """Each row by its sum, plus ``floor``."""
    for row in range(mix.shape[0]):
        sum_ = F(floor)
        for column in range(mix.shape[1]):
            sum_ += mix[row, column]
        for column in range(mix.shape[1]):
            mix[row, column] /= sum_


@njit(nogil=True, cache=True, boundscheck=False)
def share(  # type: ignore[no-untyped-def]
    first, last, mapped, num_streams, magnitude, least_share, rounds, floor, shares, pitch
):
    """Of mappings [T, M] of the tokens ``first`` to ``last`` what streams get of an update, and
    where there are ``rounds`` how much of each stream goes into each: rows and columns of it are
    divided by their sums in turn."""
    count = num_streams
    mix = np.empty((count, count), np.float32)
    for token in range(first, last):
        to = U(token) * U(pitch)
        for stream in range(count):
            own = _sigmoid(mapped[token, count + stream])
            put_number(shares, to + U(stream), own * F(magnitude) + F(least_share))
        if rounds == 0:
            continue
        for row in range(count):
            highest, sum_ = F(-np.inf), F(0.0)
            for column in range(count):
                highest = max(highest, mapped[token, (2 + row) * count + column])
            for column in range(count):
                own = np.exp(mapped[token, (2 + row) * count + column] - highest)
                mix[row, column] = own
                sum_ += own
            for column in range(count):
                mix[row, column] = mix[row, column] / sum_ + F(floor)
        for turn in range(rounds):
            if turn:
                _divide_by_sums(mix, floor)
            _divide_by_sums(mix.T, floor)
        for row in range(count):
            for column in range(count):
                put_number(shares, to + U(count + row * count + column), mix[row, column])


@njit(nogil=True, cache=True, boundscheck=False)
def expand(  # type: ignore[no-untyped-def]
    first, last, x, pitch, num_streams, width, y, y_pitch, shares, shares_pitch, mixed
):
    """Streams of the tokens ``first`` to ``last``, in place: of y what ``shares`` say first, and
    where they are ``mixed`` of all streams what these say then, or else the stream itself."""
    made = whole_lines(num_streams * WIDTH)
    own = np.empty(num_streams + num_streams * num_streams, np.float32)
    for token in range(first, last):
        begin, count = U(token) * U(pitch), own.shape[0] if mixed else num_streams
        for number in range(count):
            own[number] = number_at(shares, U(token) * U(shares_pitch) + U(number))
        for place in range(0, width, WIDTH):
            update = load(y, U(token) * U(y_pitch) + U(place))
            for stream in range(num_streams):
                found = multiply(splat(own[stream]), update)
                if mixed:
                    for other in range(num_streams):
                        numbers = load(x, begin + U(other * width + place))
                        part = splat(own[num_streams + other * num_streams + stream])
                        found = multiply_add(part, numbers, found)
                else:
                    numbers = load(x, begin + U(stream * width + place))
                    found = multiply_add(splat(F(1.0)), numbers, found)
                store(made, U(stream * WIDTH), found)
            for stream in range(num_streams):
                store(x, begin + U(stream * width + place), load(made, U(stream * WIDTH)))
