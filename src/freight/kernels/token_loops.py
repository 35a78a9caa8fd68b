"""Norms, rotations and activations of tokens, as loops that numba compiles. Each works on some
tokens, alone; threads are the caller's business.

Numbers are float32 in a flat array, or bfloat16 in one of uint16: these are computed in float32 and
rounded once. A token begins every ``pitch``; its heads follow each other.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from freight.kernels.attention_steps import exponential
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

__all__ = ["gated_silu", "gelu_tanh", "normalise", "rotate", "silu"]

U = np.uintp
F = np.float32


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _mean(x, start, width):  # type: ignore[no-untyped-def]
    whole = width // WIDTH * WIDTH
    sums = splat(F(0.0))
    for place in range(0, whole, WIDTH):
        sums = add(sums, load(x, start + U(place)))
    sum_ = total(sums)
    for place in range(whole, width):
        sum_ += number_at(x, start + U(place))
    return sum_ / F(width)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _mean_square(x, start, width, mean):  # type: ignore[no-untyped-def]
    whole = width // WIDTH * WIDTH
    sums, middle = splat(F(0.0)), splat(mean)
    for place in range(0, whole, WIDTH):
        off = subtract(load(x, start + U(place)), middle)
        sums = multiply_add(off, off, sums)
    sum_ = total(sums)
    for place in range(whole, width):
        off = number_at(x, start + U(place)) - mean
        sum_ += off * off
    return sum_ / F(width)


@uncounted
def normalise(  # type: ignore[no-untyped-def]
    first, last, num_heads, width, x, pitch, gain, bias, eps, centred, out, out_pitch
):
    """Each head [width] of the tokens ``first`` to ``last``: ``centred`` if asked for, divided by
    the root of its mean square, times the gain [width] or each head's own [num_heads * width], plus
    the bias [width] or an empty one. ``out`` may be x."""
    whole = width // WIDTH * WIDTH
    for token in range(first, last):
        for head in range(num_heads):
            start = U(token) * U(pitch) + U(head) * U(width)
            target = U(token) * U(out_pitch) + U(head) * U(width)
            gains = U(0) if gain.shape[0] == width else U(head) * U(width)
            mean = _mean(x, start, width) if centred else F(0.0)
            scale = F(1.0) / np.sqrt(_mean_square(x, start, width, mean) + F(eps))
            middle, factor = splat(mean), splat(scale)
            for place in range(0, whole, WIDTH):
                at = U(place)
                own = multiply(subtract(load(x, start + at), middle), factor)
                own = multiply(own, load(gain, gains + at))
                if bias.shape[0]:
                    own = add(own, load(bias, at))
                store(out, target + at, own)
            for place in range(whole, width):
                at = U(place)
                number = (number_at(x, start + at) - mean) * scale * gain[gains + at]
                if bias.shape[0]:
                    number += bias[at]
                put_number(out, target + at, number)


@uncounted
def rotate(first, last, num_heads, width, x, pitch, cos, sin, half, angle_pitch):  # type: ignore[no-untyped-def]
    """Turn the first 2 ``half`` numbers of each head [width], in place: those of the first half
    with those of the second, by the angles whose cosines and sines a token has every
    ``angle_pitch``."""
    whole = half // WIDTH * WIDTH
    for token in range(first, last):
        angles = U(token) * U(angle_pitch)
        for head in range(num_heads):
            start = U(token) * U(pitch) + U(head) * U(width)
            for place in range(0, whole, WIDTH):
                low, high = start + U(place), start + U(half) + U(place)
                a, b = load(x, low), load(x, high)
                c, s = load(cos, angles + U(place)), load(sin, angles + U(place))
                store(x, low, subtract(multiply(a, c), multiply(b, s)))
                store(x, high, multiply_add(b, c, multiply(a, s)))
            for place in range(whole, half):
                low, high = start + U(place), start + U(half) + U(place)
                a, b = number_at(x, low), number_at(x, high)
                c, s = number_at(cos, angles + U(place)), number_at(sin, angles + U(place))
                put_number(x, low, a * c - b * s)
                put_number(x, high, b * c + a * s)


@uncounted
def rotate_pairs(first, last, num_heads, width, x, pitch, cos, sin, half, angle_pitch):  # type: ignore[no-untyped-def]
    """The same of neighbours: each number at an even place with the next."""
    for token in range(first, last):
        angles = U(token) * U(angle_pitch)
        for head in range(num_heads):
            start = U(token) * U(pitch) + U(head) * U(width)
            for place in range(half):
                low = start + U(2) * U(place)
                a, b = number_at(x, low), number_at(x, low + U(1))
                c, s = number_at(cos, angles + U(place)), number_at(sin, angles + U(place))
                put_number(x, low, a * c - b * s)
                put_number(x, low + U(1), b * c + a * s)


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def silu(x):  # type: ignore[no-untyped-def]
    """x / (1 + e^-x) of sixteen."""
    grown = exponential(subtract(splat(F(0.0)), larger(x, splat(F(-87.0)))))
    return quotient(x, add(splat(F(1.0)), grown))


@uncounted
def gated_silu(first, last, width, x, pitch, other, other_pitch):  # type: ignore[no-untyped-def]
    """x = x / (1 + e^-x) times ``other``, for the numbers [width] of the tokens ``first`` to
    ``last``."""
    whole = width // WIDTH * WIDTH
    for token in range(first, last):
        start, beside = U(token) * U(pitch), U(token) * U(other_pitch)
        for place in range(0, whole, WIDTH):
            at = U(place)
            found = multiply(silu(load(x, start + at)), load(other, beside + at))
            store(x, start + at, found)
        for place in range(whole, width):
            at = U(place)
            number = number_at(x, start + at)
            number /= F(1.0) + np.exp(min(-number, F(87.0)))
            put_number(x, start + at, number * number_at(other, beside + at))


@uncounted
def gelu_tanh(first, last, width, x, pitch, other, other_pitch):  # type: ignore[no-untyped-def]
    """x = x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), times ``other`` unless that is
    empty, for the numbers [width] of the tokens ``first`` to ``last``. (1 + tanh u) / 2 is
    1 / (1 + e^-2u)."""
    whole = width // WIDTH * WIDTH
    slope, bend = F(1.5957691216057308), F(0.07135481627159816)
    one, nothing, least = splat(F(1.0)), splat(F(0.0)), splat(F(-88.0))
    for token in range(first, last):
        start, beside = U(token) * U(pitch), U(token) * U(other_pitch)
        for place in range(0, whole, WIDTH):
            at = U(place)
            own = load(x, start + at)
            power = multiply(own, multiply_add(multiply(own, own), splat(bend), splat(slope)))
            grown = exponential(subtract(nothing, larger(power, least)))
            found = quotient(own, add(one, grown))
            if other.shape[0]:
                found = multiply(found, load(other, beside + at))
            store(x, start + at, found)
        for place in range(whole, width):
            at = U(place)
            number = number_at(x, start + at)
            power = number * (number * number * bend + slope)
            grown = np.exp(-power if power > F(-88.0) else F(88.0))
            number = number / (F(1.0) + grown)
            if other.shape[0]:
                number *= number_at(other, beside + at)
            put_number(x, start + at, number)
