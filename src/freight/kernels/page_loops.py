"""Single queries with the tokens of one page, as loops that numba compiles: their scores with the
keys, and the values by their weights.

A query, like a token, is ``width`` numbers in whole pairs of vectors; queries, and their sums,
follow each other from ``first`` on. Keys and values are float32, or bfloat16 in an array of uint16,
and begin at ``at``. What lies ``ahead`` is brought to the cache meanwhile: the processor would not
know of another page, and all of it at once would have to wait for each other. Scores and weights of
a query begin ``stride`` after those of the one before, from ``start`` on.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.cache_lines import prefetch
from freight.kernels.compiled import uncounted
from freight.kernels.features import HAS_WIDE_REGISTERS
from freight.kernels.llvm import HALF
from freight.kernels.page_registers import (
    load_both,
    load_twice,
    put_totals,
    put_totals_of_halves,
    put_totals_of_pairs,
)
from freight.kernels.vectors import WIDTH, add, load, multiply_add, splat, store

__all__ = [
    "meet_page",
    "score_four_by_halves",
    "score_four_whole",
    "sum_four_by_halves",
    "sum_four_whole",
]

U = np.uintp
F = np.float32
_WIDTH = U(WIDTH)
_FEW = 4
"""Queries, or tokens, that are worked on at once."""


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _fetch(x, at, count):  # type: ignore[no-untyped-def]
    """Have ``count`` pairs of vectors brought. Memory gives them fastest in the order in which they
    lie."""
    for pair in range(count):
        place = at + U(pair) * U(2 * WIDTH)
        prefetch(x, place)
        if x.itemsize == 4:
            prefetch(x, place + _WIDTH)


@uncounted
def score_four_by_halves(  # type: ignore[no-untyped-def]
    queries, first, width, keys, at, ahead, count, scores, start, stride
):
    """Four queries, side by side from ``first`` on, with two tokens at a time, of which each has
    half of a vector; what follows the last score of an odd count is overwritten."""
    two, three = width * U(2), width * U(3)
    for token in range(0, count, 2):
        near = U(token) * width
        far = min(near + width, (count - U(1)) * width)
        a = b = c = d = splat(F(0.0))
        for column in range(0, width, 2 * WIDTH):
            _fetch(keys, ahead + near + U(2) * U(column), U(2))
            for part in range(column, column + 2 * WIDTH, HALF):
                place = U(part)
                own = load_both(keys, at + near + place, at + far + place)
                query = first + place
                a = multiply_add(load_twice(queries, query), own, a)
                b = multiply_add(load_twice(queries, query + width), own, b)
                c = multiply_add(load_twice(queries, query + two), own, c)
                d = multiply_add(load_twice(queries, query + three), own, d)
        put_totals_of_halves(scores, start + U(token), stride, a, b, c, d)


@uncounted
def score_four_whole(  # type: ignore[no-untyped-def]
    queries, first, width, keys, at, ahead, count, scores, start, stride
):
    """The same where registers are enough for eight vectors."""
    two, three = width * U(2), width * U(3)
    for token in range(0, count, 2):
        near = U(token) * width
        far = min(near + width, (count - U(1)) * width)
        a = b = c = d = e = f = g = h = splat(F(0.0))
        for column in range(0, width, 2 * WIDTH):
            _fetch(keys, ahead + near + U(2) * U(column), U(2))
            for part in range(column, column + 2 * WIDTH, WIDTH):
                place = U(part)
                one, other = load(keys, at + near + place), load(keys, at + far + place)
                query = load(queries, first + place)
                a, e = multiply_add(query, one, a), multiply_add(query, other, e)
                query = load(queries, first + width + place)
                b, f = multiply_add(query, one, b), multiply_add(query, other, f)
                query = load(queries, first + two + place)
                c, g = multiply_add(query, one, c), multiply_add(query, other, g)
                query = load(queries, first + three + place)
                d, h = multiply_add(query, one, d), multiply_add(query, other, h)
        put_totals_of_pairs(scores, start + U(token), stride, a, e, b, f, c, g, d, h)


@uncounted
def _score_one(queries, first, width, keys, at, ahead, count, scores, start):  # type: ignore[no-untyped-def]
    """One query with four tokens at a time; what follows the last score is overwritten."""
    last = (count - U(1)) * width
    for token in range(0, count, _FEW):
        one = U(token) * width
        two, three = min(one + width, last), min(one + width * U(2), last)
        four = min(one + width * U(3), last)
        a = b = c = d = splat(F(0.0))
        for column in range(0, width, 2 * WIDTH):
            _fetch(keys, ahead + one + U(_FEW) * U(column), U(_FEW))
            for part in range(column, column + 2 * WIDTH, WIDTH):
                place = at + U(part)
                query = load(queries, first + U(part))
                a = multiply_add(query, load(keys, place + one), a)
                b = multiply_add(query, load(keys, place + two), b)
                c = multiply_add(query, load(keys, place + three), c)
                d = multiply_add(query, load(keys, place + four), d)
        put_totals(scores, start + U(token), a, b, c, d)


@uncounted
def sum_four_by_halves(  # type: ignore[no-untyped-def]
    sums, first, width, values, at, ahead, count, weights, start, stride
):
    """Values by their weights onto the sums of four queries, 16 columns at a time."""
    two, three = width * U(2), width * U(3)
    for column in range(0, width, WIDTH):
        own = first + U(column)
        a, b = load(sums, own), load(sums, own + width)
        c, d = load(sums, own + two), load(sums, own + three)
        for token in range(count):
            prefetch(values, ahead + (U(column) * count + U(token) * _WIDTH))
            value = load(values, at + U(token) * width + U(column))
            weight = start + U(token)
            a = multiply_add(splat(weights[weight]), value, a)
            b = multiply_add(splat(weights[weight + stride]), value, b)
            c = multiply_add(splat(weights[weight + stride * U(2)]), value, c)
            d = multiply_add(splat(weights[weight + stride * U(3)]), value, d)
        store(sums, own, a)
        store(sums, own + width, b)
        store(sums, own + two, c)
        store(sums, own + three, d)


@uncounted
def sum_four_whole(  # type: ignore[no-untyped-def]
    sums, first, width, values, at, ahead, count, weights, start, stride
):
    """The same, 32 columns at a time, where registers are enough for eight vectors."""
    two, three = width * U(2), width * U(3)
    for column in range(0, width, 2 * WIDTH):
        own = first + U(column)
        a, b = load(sums, own), load(sums, own + _WIDTH)
        c, d = load(sums, own + width), load(sums, own + width + _WIDTH)
        e, f = load(sums, own + two), load(sums, own + two + _WIDTH)
        g, h = load(sums, own + three), load(sums, own + three + _WIDTH)
        for token in range(count):
            place = U(token) * width + U(column)
            _fetch(values, ahead + (U(column) * count + U(token) * U(2 * WIDTH)), U(1))
            one, other = load(values, at + place), load(values, at + place + _WIDTH)
            place = start + U(token)
            weight = splat(weights[place])
            a, b = multiply_add(weight, one, a), multiply_add(weight, other, b)
            weight = splat(weights[place + stride])
            c, d = multiply_add(weight, one, c), multiply_add(weight, other, d)
            weight = splat(weights[place + stride * U(2)])
            e, f = multiply_add(weight, one, e), multiply_add(weight, other, f)
            weight = splat(weights[place + stride * U(3)])
            g, h = multiply_add(weight, one, g), multiply_add(weight, other, h)
        store(sums, own, a)
        store(sums, own + _WIDTH, b)
        store(sums, own + width, c)
        store(sums, own + width + _WIDTH, d)
        store(sums, own + two, e)
        store(sums, own + two + _WIDTH, f)
        store(sums, own + three, g)
        store(sums, own + three + _WIDTH, h)


@uncounted
def _sum_one(sums, first, width, values, at, ahead, count, weights, start):  # type: ignore[no-untyped-def]
    """Likewise of one query; two sums of every second token, so that one need not wait for the
    other."""
    even = count // U(2) * U(2)
    for column in range(0, width, 2 * WIDTH):
        own = first + U(column)
        a, b = load(sums, own), load(sums, own + _WIDTH)
        c = d = splat(F(0.0))
        for token in range(0, even, 2):
            place = U(token) * width + U(column)
            _fetch(values, ahead + (U(column) * count + U(token) * U(2 * WIDTH)), U(2))
            place += at
            weight = splat(weights[start + U(token)])
            a = multiply_add(weight, load(values, place), a)
            b = multiply_add(weight, load(values, place + _WIDTH), b)
            place += width
            weight = splat(weights[start + U(token) + U(1)])
            c = multiply_add(weight, load(values, place), c)
            d = multiply_add(weight, load(values, place + _WIDTH), d)
        for token in range(even, count):
            place = U(token) * width + U(column)
            _fetch(values, ahead + (U(column) * count + U(token) * U(2 * WIDTH)), U(1))
            weight = splat(weights[start + U(token)])
            a = multiply_add(weight, load(values, at + place), a)
            b = multiply_add(weight, load(values, at + place + _WIDTH), b)
        store(sums, own, add(a, c))
        store(sums, own + _WIDTH, add(b, d))


_score_four = score_four_whole if HAS_WIDE_REGISTERS else score_four_by_halves
_sum_four = sum_four_whole if HAS_WIDE_REGISTERS else sum_four_by_halves


@uncounted
def meet_page(  # type: ignore[no-untyped-def]
    are_values, tokens_in, at, ahead, tokens, width, vectors, first, count, numbers, start, stride
):
    """``count`` queries' scores with keys, or values by their weights onto as many sums, of tokens
    that follow each other."""
    fours = count // U(_FEW) * U(_FEW)
    for query in range(0, fours, _FEW):
        own, row = first + U(query) * width, start + U(query) * stride
        rest = tokens_in, at, ahead if query == 0 else at, tokens, numbers, row, stride
        if are_values:
            _sum_four(vectors, own, width, *rest)
        else:
            _score_four(vectors, own, width, *rest)
    for query in range(fours, count):
        own, row = first + U(query) * width, start + U(query) * stride
        rest_of_one = tokens_in, at, ahead if query == 0 else at, tokens, numbers, row
        if are_values:
            _sum_one(vectors, own, width, *rest_of_one)
        else:
            _score_one(vectors, own, width, *rest_of_one)
