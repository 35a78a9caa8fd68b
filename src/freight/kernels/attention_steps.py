"""What loops of attention have in common: how keys and values lie in pages, pages made plain,
exponentials, and scores that are capped."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.cache_lines import prefetch
from freight.kernels.compiled import UNCOUNTED, uncounted
from freight.kernels.features import HAS_WIDE_REGISTERS
from freight.kernels.vectors import (
    WIDTH,
    add,
    larger,
    largest,
    load,
    load_bytes,
    load_high,
    load_low,
    multiply,
    multiply_add,
    quotient,
    rounded,
    scaled,
    splat,
    splat_factor,
    store,
    subtract,
    total,
)

__all__ = [
    "LOG_2",
    "LOG_E",
    "PageShape",
    "cap",
    "exponential",
    "head_at",
    "inverse",
    "make_plain",
    "power_of_two",
    "sixteen_at",
    "stretch_at",
    "token_at",
    "weigh",
]

U = np.uintp
F = np.float32
LOG_E = F(1.4426950408889634)
"""To base 2."""
LOG_2 = F(0.6931471805599453)
_WIDTH = U(WIDTH)
_LEAST_POWER = F(-200.0 if HAS_WIDE_REGISTERS else -127.0)
"""Of two that makes nothing, without being too little to be made so."""


class PageShape(NamedTuple):
    """How pages lie in a flat array. Strides count its elements: from page to page, from head to
    head, from token to token; a head's values are ``to_values`` heads behind its keys. ``width``
    numbers of a head are kept, ``padded`` are computed with. Of compressed ones: bits and group
    size, else 0."""

    page_stride: Any
    head_stride: Any
    token_stride: Any
    num_heads: Any
    to_values: Any
    page_tokens: Any
    width: Any
    padded: Any
    bits: Any
    group_size: Any


def make_plain(
    raw: Any, halves: Any, first: Any, count: Any, shape: Any, plain: Any, ahead: Any
) -> None:
    """``count`` tokens of a head, from element ``first`` of ``raw``, to float32 in ``plain``. As
    much from ``ahead`` on is brought to the cache meanwhile: the processor would not know of
    another page, and all of it at once would have to wait for each other."""
    raise NotImplementedError


@overload(make_plain, jit_options=UNCOUNTED, inline="always")
def _choose_make_plain(raw, halves, first, count, shape, plain, ahead):  # type: ignore[no-untyped-def]
    return _plain_codes if raw.dtype.bitwidth == 8 else _plain_numbers


def _plain_numbers(raw, halves, first, count, shape, plain, ahead):  # type: ignore[no-untyped-def]
    if shape.token_stride == shape.padded:  # whole vectors, side by side, two at a time
        numbers = U(count) * shape.padded
        whole = numbers // U(2 * WIDTH) * U(2 * WIDTH)
        if whole < numbers:
            store(plain, whole, load(raw, first + whole))
        for number in range(0, whole, 2 * WIDTH):
            place = U(number)
            prefetch(raw, ahead + place)
            if raw.itemsize == 4:
                prefetch(raw, ahead + place + _WIDTH)
            store(plain, place, load(raw, first + place))
            store(plain, place + _WIDTH, load(raw, first + place + _WIDTH))
        return
    # Where a row is no multiple of a vector, the last one overlaps the one before it.
    last = shape.width - _WIDTH
    for token in range(count):
        source = first + U(token) * shape.token_stride
        target = U(token) * shape.padded
        for column in range(0, shape.width, WIDTH):
            place = min(U(column), last)
            prefetch(raw, ahead + source - first + place)
            store(plain, target + place, load(raw, source + place))


def _plain_codes(raw, halves, first, count, shape, plain, ahead):  # type: ignore[no-untyped-def]
    groups = shape.width // shape.group_size
    for token in range(count):
        source = first + U(token) * shape.token_stride
        target = U(token) * shape.padded
        end = source + shape.width * shape.bits // U(8)
        prefetch(raw, ahead + end - first)
        factors = end // U(2)
        for group in range(groups):
            scale = splat_factor(halves, factors + U(group))
            lowest = splat_factor(halves, factors + groups + U(group))
            own = target + U(group) * shape.group_size
            if shape.bits == 4:
                half = shape.group_size // U(2)
                codes = source + U(group) * half
                prefetch(raw, ahead + codes - first)
                for byte in range(0, half, WIDTH):
                    place = min(U(byte), half - _WIDTH)
                    low = load_low(raw, codes + place)
                    high = load_high(raw, codes + place)
                    store(plain, own + place, multiply_add(low, scale, lowest))
                    store(plain, own + half + place, multiply_add(high, scale, lowest))
            else:
                codes = source + U(group) * shape.group_size
                prefetch(raw, ahead + codes - first)
                for byte in range(0, shape.group_size, WIDTH):
                    place = min(U(byte), shape.group_size - _WIDTH)
                    some = load_bytes(raw, codes + place)
                    store(plain, own + place, multiply_add(some, scale, lowest))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def head_at(shape, pages, turn, offset):  # type: ignore[no-untyped-def]
    """Where a head's keys begin in a row's page, or what is ``offset`` heads behind them."""
    both = U(2) * shape.num_heads
    head = pages[turn] % both + offset
    return pages[turn] // both * shape.page_stride + head * shape.head_stride


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def stretch_at(shape, pages, position, end, offset, after):  # type: ignore[no-untyped-def]
    """Where the tokens from ``position`` on begin, for ``offset`` as ``head_at`` has it; how many
    of them, up to ``end``, follow each other; and where the page after theirs begins, or what comes
    ``after`` the last."""
    turn, place = position // shape.page_tokens, position % shape.page_tokens
    tokens = min(end - position, shape.page_tokens - place)
    at = head_at(shape, pages, turn, offset) + place * shape.token_stride
    ahead = after if end - position == tokens else head_at(shape, pages, turn + U(1), offset)
    return at, tokens, ahead


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def exponential(x):  # type: ignore[no-untyped-def]
    """e^x to 2 units in the last place, for x up to 88; as at -87 below that; of no number none.
    The polynomial is that of the Cephes library."""
    x = larger(splat(F(-87.0)), x)
    power = rounded(multiply(x, splat(F(1.4426950408889634))))
    rest = multiply_add(power, splat(F(-0.693359375)), x)
    rest = multiply_add(power, splat(F(2.12194440e-4)), rest)
    series = splat(F(1.9875691500e-4))
    series = multiply_add(series, rest, splat(F(1.3981999507e-3)))
    series = multiply_add(series, rest, splat(F(8.3334519073e-3)))
    series = multiply_add(series, rest, splat(F(4.1665795894e-2)))
    series = multiply_add(series, rest, splat(F(1.6666665459e-1)))
    series = multiply_add(series, rest, splat(F(5.0000001201e-1)))
    series = add(multiply_add(series, multiply(rest, rest), rest), splat(F(1.0)))
    return scaled(series, power)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def power_of_two(x):  # type: ignore[no-untyped-def]
    """2^x to 3 units in the last place, for x from -126 to 127; 0 far below; of no number none. The
    polynomial is the one of its degree, 1 at 0, whose largest relative error is least (by linear
    programming)."""
    x = larger(splat(_LEAST_POWER), x)
    power = rounded(x)
    rest = subtract(x, power)
    series = splat(F(0.0013274633))
    series = multiply_add(series, rest, splat(F(0.009671962)))
    series = multiply_add(series, rest, splat(F(0.055506784)))
    series = multiply_add(series, rest, splat(F(0.24022235)))
    series = multiply_add(series, rest, splat(F(0.69314706)))
    return scaled(multiply_add(series, rest, splat(F(1.0))), power)


@njit(cache=True, error_model="numpy", **UNCOUNTED)
def inverse(number):  # type: ignore[no-untyped-def]
    """1 / number; infinite where that is 0, as where all scores are minus infinity."""
    return F(1.0) / number


@uncounted
def cap(scores, start, count, limit):  # type: ignore[no-untyped-def]
    """limit tanh(score / limit), in place."""
    one, two = splat(F(1.0)), splat(F(2.0))
    for place in range(0, count, WIDTH):
        at = start + U(place)
        x = larger(splat(F(-40.0)), quotient(load(scores, at), splat(limit)))
        x = subtract(splat(F(0.0)), larger(splat(F(-40.0)), subtract(splat(F(0.0)), x)))
        grown = exponential(add(x, x))
        capped = subtract(one, quotient(two, add(grown, one)))
        store(scores, at, multiply(capped, splat(limit)))


@uncounted
def weigh(scores, start, count):  # type: ignore[no-untyped-def]
    """Scores to what their softmax would be but for the sum; returns it, and the highest score."""
    top = splat(F(-3e38))
    for place in range(0, count, WIDTH):
        top = larger(load(scores, start + U(place)), top)
    highest = splat(largest(top))
    sums = splat(F(0.0))
    for place in range(0, count, WIDTH):
        weight = exponential(subtract(load(scores, start + U(place)), highest))
        sums = add(sums, weight)
        store(scores, start + U(place), weight)
    return total(sums), largest(top)


@uncounted
def token_at(shape, pages, position, offset):  # type: ignore[no-untyped-def]
    """Where a token's row begins, for ``offset`` as ``head_at`` has it."""
    turn, place = position // shape.page_tokens, position % shape.page_tokens
    return head_at(shape, pages, turn, offset) + place * shape.token_stride


@uncounted
def sixteen_at(shape, pages, position, end, offset, after, ahead):  # type: ignore[no-untyped-def]
    """Where sixteen tokens' rows begin, and those so many tokens ``ahead``, before ``end``, or what
    comes ``after``."""
    at, further = token_at(shape, pages, position, offset), position + ahead
    return at, token_at(shape, pages, further, offset) if further < end else after
