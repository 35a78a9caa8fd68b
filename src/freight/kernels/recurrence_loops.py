"""Convolutions, the gated delta rule and scans over rows that keep a state, as compiled loops.
Each works on some rows, or heads of rows, alone; threads are the caller's business.

Numbers are float32 in a flat array, or bfloat16 in one of uint16, as in ``token_loops``. States are
used where they lie, one seat every ``seat_pitch``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.attention_steps import exponential
from freight.kernels.cache_lines import whole_lines
from freight.kernels.compiled import uncounted
from freight.kernels.vectors import (
    WIDTH,
    add,
    larger,
    load,
    multiply,
    multiply_add,
    number_at,
    put_number,
    quotient,
    splat,
    store,
    subtract,
    total,
)

__all__ = ["convolve", "recur"]

U = np.uintp
F = np.float32

_MOST_TOKENS = 256
"""Of a row whose queries and keys are made one long at once: they stay in a core's cache."""
_MOST_BY_ROW = 64
"""Of these where each row of a matrix decays by a rate of its own: more is kept of a token."""
_FEW_TOKENS = 2
"""For which a matrix is not copied to where it is near."""
_EPS = F(1e-6)


@njit(nogil=True, cache=True, boundscheck=False)
def convolve(  # type: ignore[no-untyped-def]
    first,
    last,
    starts,
    counts,
    seats,
    is_new,
    x,
    pitch,
    num_columns,
    weight,
    bias,
    taps,
    columns,
    seat_pitch,
):
    """Rows ``first`` to ``last``: each token becomes the sum of the last ``taps`` of its row, with
    itself, times ``weight`` [taps, C], plus the bias [C] or an empty one; ``columns`` have the
    tokens before a row's first. From the last token to the first, so that those that are wanted are
    still what they were."""
    whole = num_columns // WIDTH * WIDTH
    kept = np.empty((taps - 1) * num_columns, columns.dtype)
    for row in range(first, last):
        seat = U(seats[row]) * U(seat_pitch)
        count, start = counts[row], starts[row]
        if is_new[row]:
            for place in range((taps - 1) * num_columns):
                columns[seat + U(place)] = 0
        for tap in range(taps - 1):
            before = count - (taps - 1) + tap
            source, at = columns, seat + U(max(0, taps - 1 + before)) * U(num_columns)
            if before >= 0:
                source, at = x, U(start + before) * U(pitch)
            for place in range(num_columns):
                kept[tap * num_columns + place] = source[at + U(place)]
        for token in range(count - 1, -1, -1):
            own = U(start + token) * U(pitch)
            for place in range(0, whole, WIDTH):
                at = U(place)
                sums = multiply(load(x, own + at), load(weight, U((taps - 1) * num_columns) + at))
                for tap in range(taps - 1):
                    before = token - (taps - 1) + tap
                    factor = load(weight, U(tap * num_columns) + at)
                    if before >= 0:
                        found = load(x, U(start + before) * U(pitch) + at)
                    else:
                        found = load(columns, seat + U((taps - 1 + before) * num_columns) + at)
                    sums = multiply_add(found, factor, sums)
                if bias.shape[0]:
                    sums = add(sums, load(bias, at))
                store(x, own + at, sums)
            for place in range(whole, num_columns):
                at = U(place)
                sum_ = number_at(x, own + at) * weight[U((taps - 1) * num_columns) + at]
                for tap in range(taps - 1):
                    before = token - (taps - 1) + tap
                    factor = weight[U(tap * num_columns) + at]
                    if before >= 0:
                        sum_ += number_at(x, U(start + before) * U(pitch) + at) * factor
                    else:
                        begin = seat + U((taps - 1 + before) * num_columns)
                        sum_ += number_at(columns, begin + at) * factor
                if bias.shape[0]:
                    sum_ += bias[at]
                put_number(x, own + at, sum_)
        for place in range((taps - 1) * num_columns):
            columns[seat + U(place)] = kept[place]


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _put_unit(x, begin, width, factor, out, place):  # type: ignore[no-untyped-def]
    """out[place..] = width numbers from x[begin] on, made ``factor`` long."""
    sums = splat(F(0.0))
    for at in range(0, width, WIDTH):
        own = load(x, begin + U(at))
        sums = multiply_add(own, own, sums)
    scale = splat(F(factor) / np.sqrt(total(sums) + _EPS))
    for at in range(0, width, WIDTH):
        store(out, place + U(at), multiply(load(x, begin + U(at)), scale))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _put(x, begin, width, out, place):  # type: ignore[no-untyped-def]
    """out[place..] = width numbers from x[begin] on."""
    for at in range(0, width, WIDTH):
        store(out, place + U(at), load(x, begin + U(at)))


@uncounted
def _dot(a, b, place, width):  # type: ignore[no-untyped-def]
    sums = splat(F(0.0))
    for at in range(0, width, WIDTH):
        sums = multiply_add(load(a, place + U(at)), load(b, place + U(at)), sums)
    return total(sums)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + e^x) of sixteen: the larger of x and 0, and log(1 + y) with y = e^-|x|, which is
    twice the series of artanh(y / (2 + y))."""
    nothing = splat(F(0.0))
    y = exponential(subtract(nothing, larger(x, subtract(nothing, x))))
    part = quotient(y, add(splat(F(2.0)), y))
    square = multiply(part, part)
    series = multiply_add(splat(F(1.0 / 15.0)), square, splat(F(1.0 / 13.0)))
    series = multiply_add(series, square, splat(F(1.0 / 11.0)))
    series = multiply_add(series, square, splat(F(1.0 / 9.0)))
    series = multiply_add(series, square, splat(F(1.0 / 7.0)))
    series = multiply_add(series, square, splat(F(1.0 / 5.0)))
    series = multiply_add(series, square, splat(F(1.0 / 3.0)))
    series = multiply_add(series, square, splat(F(1.0)))
    return add(larger(nothing, x), multiply(splat(F(2.0)), multiply(part, series)))


@uncounted
def _put_left(a, at, bias, first, width, speed, bound, lefts, place):  # type: ignore[no-untyped-def]
    """lefts[place..] = e to minus ``speed`` times log(1 + e^(a + bias)), of ``width`` rows; or with
    a ``bound`` to minus that over 1 + e^(-speed (a + bias))."""
    for row in range(0, width, WIDTH):
        rate = add(load(a, at + U(row)), load(bias, first + U(row)))
        if bound > F(0.0):
            steep = larger(splat(F(-87.0)), multiply(splat(speed), rate))
            grown = exponential(subtract(splat(F(0.0)), steep))
            power = quotient(splat(-bound), add(splat(F(1.0)), grown))
        else:
            power = multiply(splat(-speed), _softplus(rate))
        store(lefts, place + U(row), exponential(power))


@uncounted
def _put_products(a, b, width, out):  # type: ignore[no-untyped-def]
    """out[..] = the first ``width`` numbers of a times those of b."""
    for at in range(0, width, WIDTH):
        store(out, U(at), multiply(load(a, U(at)), load(b, U(at))))


@uncounted
def _step(  # type: ignore[no-untyped-def]
    held,
    begin,
    value_width,
    queries,
    keys,
    added,
    lefts,
    place,
    key_width,
    left,
    seen,
    strength,
    fit,
    skip,
    x,
    value,
    out,
    to,
):
    """One token, 32 columns of a matrix [W, U] from ``begin`` on: it reads q (left S), adds k times
    its value without what k (left S) has of it, the part ``seen``, and to what is read the part
    ``skip`` of its value. Where rows have ``lefts`` of their own queries and keys have them
    already, and the keys ``added`` have not. Of 32 columns there are as many sums as do not wait
    for each other, and what two of them are multiplied by is read once."""
    stride, next_ = U(value_width), U(WIDTH)
    read, found = splat(F(0.0)), splat(F(0.0))
    read2, found2 = splat(F(0.0)), splat(F(0.0))
    read3, found3 = splat(F(0.0)), splat(F(0.0))
    read4, found4 = splat(F(0.0)), splat(F(0.0))
    at = begin
    for w in range(0, key_width, 2):
        here = place + U(w)
        key, query = splat(keys[here]), splat(queries[here])
        own, other = load(held, at), load(held, at + next_)
        found, read = multiply_add(key, own, found), multiply_add(query, own, read)
        found2, read2 = multiply_add(key, other, found2), multiply_add(query, other, read2)
        key, query = splat(keys[here + U(1)]), splat(queries[here + U(1)])
        own, other = load(held, at + stride), load(held, at + stride + next_)
        found3, read3 = multiply_add(key, own, found3), multiply_add(query, own, read3)
        found4, read4 = multiply_add(key, other, found4), multiply_add(query, other, read4)
        at += stride + stride
    factor, much, fits, skips = splat(left), splat(strength), splat(fit), splat(skip)
    part, own, other = splat(left * seen), load(x, value), load(x, value + next_)
    found, found2 = multiply(add(found, found3), part), multiply(add(found2, found4), part)
    change = multiply(subtract(own, found), much)
    change2 = multiply(subtract(other, found2), much)
    read = multiply_add(own, skips, multiply(add(read, read3), factor))
    read2 = multiply_add(other, skips, multiply(add(read2, read4), factor))
    store(out, to, multiply_add(change, fits, read))
    store(out, to + next_, multiply_add(change2, fits, read2))
    at = begin
    for w in range(key_width):
        if lefts.shape[0]:
            factor = splat(lefts[place + U(w)])
        key = splat(added[place + U(w)])
        store(held, at, multiply_add(key, change, multiply(load(held, at), factor)))
        own = multiply(load(held, at + next_), factor)
        store(held, at + next_, multiply_add(key, change2, own))
        at += stride


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _copy_columns(source, at, pitch, target, to, target_pitch, num_rows):  # type: ignore[no-untyped-def]
    """32 columns of so many rows."""
    for _ in range(num_rows):
        store(target, to, load(source, at))
        store(target, to + U(WIDTH), load(source, at + U(WIDTH)))
        at += U(pitch)
        to += U(target_pitch)


@njit(nogil=True, cache=True, boundscheck=False)
def recur(  # type: ignore[no-untyped-def]
    first,
    last,
    starts,
    counts,
    seats,
    is_new,
    x,
    pitch,
    a,
    a_pitch,
    b,
    b_pitch,
    decay,
    bias,
    skips,
    query_place,
    key_place,
    value_place,
    held,
    seat_pitch,
    out,
    out_pitch,
    num_key_heads,
    sharers,
    key_width,
    value_width,
    most,
    by_row,
    bound,
):
    """Heads of queries and keys ``first`` to ``last``, counted over all rows, with the ``sharers``
    heads of values that share each: by the gated delta rule, or where there are ``skips`` [N] by a
    scan. Queries, keys and values of a token begin at their places. ``most`` is the share that a
    token corrects at most, and ``by_row`` whether each row of a matrix has a rate of its own, with
    a ``bound`` or 0."""
    is_scan = skips.shape[0] > 0
    size = U(key_width) * U(value_width)
    at_once = _MOST_BY_ROW if by_row else _MOST_TOKENS
    queries = whole_lines(at_once * key_width)
    keys = whole_lines(at_once * key_width)
    row_lefts = whole_lines(at_once * key_width if by_row else 0)
    asked = whole_lines(at_once * key_width) if by_row else queries
    found = whole_lines(at_once * key_width) if by_row else keys
    fits = np.empty(_MOST_TOKENS, np.float32)
    lefts = np.empty(_MOST_TOKENS, np.float32)
    strengths = np.empty(_MOST_TOKENS, np.float32)
    near = whole_lines(key_width * 2 * WIDTH)
    scale = F(1.0) / np.sqrt(F(key_width))
    for task in range(first, last):
        row, key_head = task // num_key_heads, task % num_key_heads
        seat = U(seats[row]) * U(seat_pitch)
        if is_new[row]:
            begin = seat + U(key_head * sharers) * size
            for place in range(sharers * key_width * value_width):
                held[begin + U(place)] = F(0.0)
        for begun in range(0, counts[row], at_once):
            some = min(at_once, counts[row] - begun)
            start = starts[row] + begun
            for token in range(some):
                own_x = U(start + token) * U(pitch) + U(key_head * key_width)
                query, key = own_x + U(query_place), own_x + U(key_place)
                at = U(token * key_width)
                if is_scan:
                    _put(x, query, key_width, queries, at)
                    _put(x, key, key_width, keys, at)
                else:
                    _put_unit(x, query, key_width, scale, queries, at)
                    _put_unit(x, key, key_width, F(1.0), keys, at)
                fits[token] = _dot(queries, keys, at, key_width)
            for turn in range(sharers):
                head = key_head * sharers + turn
                speed = np.exp(decay[head])
                for token in range(some):
                    rates = U(start + token) * U(a_pitch)
                    if by_row:
                        first_rate, at = U(head * key_width), U(token * key_width)
                        _put_left(
                            a,
                            rates + first_rate,
                            bias,
                            first_rate,
                            key_width,
                            speed,
                            F(bound),
                            row_lefts,
                            at,
                        )
                        lefts[token] = F(1.0)
                    else:
                        own = number_at(a, rates + U(head)) + bias[head]
                        rate = own if own > F(20.0) else np.log1p(np.exp(own))
                        lefts[token] = np.exp(-speed * rate)
                        strengths[token] = rate
                    if not is_scan:
                        own = number_at(b, U(start + token) * U(b_pitch) + U(head))
                        strengths[token] = F(most) / (F(1.0) + np.exp(-own))
                if by_row:
                    _put_products(queries, row_lefts, some * key_width, asked)
                    _put_products(keys, row_lefts, some * key_width, found)
                seen = F(0.0) if is_scan else F(1.0)
                skip = skips[head] if is_scan else F(0.0)
                begin = seat + U(head) * size
                values = U(value_place + head * value_width)
                for column in range(0, value_width, 2 * WIDTH):
                    # Rows of a matrix are so far apart that they share few of a cache's sets.
                    matrix, at, stride = held, begin + U(column), value_width
                    if some > _FEW_TOKENS:
                        _copy_columns(held, at, value_width, near, U(0), 2 * WIDTH, key_width)
                        matrix, at, stride = near, U(0), 2 * WIDTH
                    for token in range(some):
                        _step(
                            matrix,
                            at,
                            stride,
                            asked,
                            found,
                            keys,
                            row_lefts,
                            U(token * key_width),
                            key_width,
                            lefts[token],
                            seen,
                            strengths[token],
                            fits[token],
                            skip,
                            x,
                            U(start + token) * U(pitch) + values + U(column),
                            out,
                            U(start + token) * U(out_pitch) + U(head * value_width + column),
                        )
                    if some > _FEW_TOKENS:
                        at = begin + U(column)
                        _copy_columns(near, U(0), 2 * WIDTH, held, at, value_width, key_width)
