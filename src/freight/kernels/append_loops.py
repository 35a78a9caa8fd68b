"""New keys and values compressed straight into their pages, as a loop that numba compiles.

The same bits as the reference in ``grouped`` makes. Threads are the caller's business.
"""

from __future__ import annotations

import numpy as np

from freight.kernels.compiled import uncounted
from freight.kernels.vectors import bits_of, half_at, of_bits

__all__ = ["append_tokens"]

U = np.uintp
F = np.float32
_MOST = F(65504.0)


@uncounted
def _half_bits(number):  # type: ignore[no-untyped-def]
    """The bits of the nearest float16, ties to even, of a number that has one; zero has no sign."""
    bits = bits_of(number)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    if size < np.uint32(113 << 23):
        # Below 2^-14 the steps are even: one half has just that step in float32.
        half = bits_of(of_bits(size) + F(0.5)) - np.uint32(126 << 23)
    else:
        odd = (size >> np.uint32(13)) & np.uint32(1)
        half = (size + np.uint32(0xFFF) + odd - np.uint32(112 << 23)) >> np.uint32(13)
    return np.uint16(half | sign) if half else np.uint16(0)


@uncounted
def _quantise(numbers, raw, halves, at, levels, bits, size):  # type: ignore[no-untyped-def]
    """One row [width] into the bytes from ``at`` on; ``numbers`` are changed."""
    width = numbers.shape[0]
    groups = width // size
    factors = (at + U(width * bits // 8)) // U(2)
    levels = F(levels)
    for place in range(width):
        i = U(place)
        number = numbers[i]
        number = number if number == number else F(0.0)
        numbers[i] = min(max(number, -_MOST), _MOST)
    for group in range(groups):
        own = U(group * size)
        least = most = numbers[own]
        for place in range(size):
            number = numbers[own + U(place)]
            least, most = min(least, number), max(most, number)
        halves[factors + U(groups + group)] = _half_bits(least)
        lowest = half_at(halves, factors + U(groups + group))
        halves[factors + U(group)] = _half_bits(max(most - lowest, F(0.0)) / levels)
        step = half_at(halves, factors + U(group))
        if step > F(0.0):
            for place in range(size):
                i = own + U(place)
                code = np.rint((numbers[i] - lowest) / step)
                numbers[i] = min(max(code, F(0.0)), levels)
        else:
            numbers[own : own + U(size)] = F(0.0)
        if bits == 4:
            half = U(size // 2)
            for place in range(size // 2):
                i = U(place)
                low, high = np.uint8(numbers[own + i]), np.uint8(numbers[own + half + i])
                raw[at + U(group) * half + i] = low | high << np.uint8(4)
        else:
            for place in range(size):
                i = own + U(place)
                raw[at + i] = np.uint8(numbers[i])


@uncounted
def append_tokens(first, last, numbers, places, head_stride, raw, halves, levels, bits, size):  # type: ignore[no-untyped-def]
    """The tokens ``first`` to ``last`` of numbers [tokens, heads, width]: float32, changed.

    ``places`` has the byte of ``raw`` at which a token's first head begins, the others follow in
    steps of ``head_stride``; ``halves`` is raw as uint16; ``levels`` is the largest code, which is
    kept in ``bits`` bits.
    """
    for token in range(first, last):
        for head in range(numbers.shape[1]):
            at = U(places[token]) + U(head) * U(head_stride)
            _quantise(numbers[token, head], raw, halves, at, levels, bits, size)
