"""Loops that numba compiles. Each works on some rows, alone; threads are the caller's business.

Indices are unsigned: numba then asks of none whether it counts from the end, and the compiler can
make vectors of the loops.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = [
    "product",
    "scale_to_bfloat16",
    "scale_to_float32",
    "to_bfloat16",
    "to_float32",
    "to_int8",
]

_ONE = np.uint32(1)
_HALF_ULP = np.uint32(0x7FFF)
_SIXTEEN = np.uint32(16)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_ROUNDING = np.float32(12582912.0)
"""1.5 * 2^23: added to a small float32, it leaves the nearest integer, ties to even, in the lowest
bits."""


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _group(raw, first, scale, lowest, size, bits, values):  # type: ignore[no-untyped-def]
    """A group's values in float32; its codes begin at byte ``first`` of a row."""
    if bits == 4:
        half = size // np.uintp(2)
        for j in range(half):
            i = np.uintp(j)
            values[i] = np.float32(raw[first + i] & np.uint8(15)) * scale + lowest
        for j in range(half):
            i = np.uintp(j)
            values[half + i] = np.float32(raw[first + i] >> np.uint8(4)) * scale + lowest
    else:
        for j in range(size):
            i = np.uintp(j)
            values[i] = np.float32(raw[first + i]) * scale + lowest


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _factors(numbers, first, factors, words):  # type: ignore[no-untyped-def]
    """A row's scales and minima, from place ``first`` on, as float32, which they may be already.
    float16's bits moved to where float32 has them make a number that is 2^112 times too small. None
    is infinite."""
    if numbers.itemsize == 4:
        for j in range(factors.shape[0]):
            i = np.uintp(j)
            words[i] = np.uint32(numbers[first + i])
        return
    for j in range(factors.shape[0]):
        i = np.uintp(j)
        half = np.uint32(numbers[first + i])
        words[i] = (half & np.uint32(0x7FFF)) << np.uint32(13)
    for j in range(factors.shape[0]):
        i = np.uintp(j)
        factors[i] *= np.float32(5.192296858534828e33)
    for j in range(factors.shape[0]):
        i = np.uintp(j)
        words[i] |= (np.uint32(numbers[first + i]) & np.uint32(0x8000)) << _SIXTEEN


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _plain_row(raw, numbers, size, bits, factors, words, values):  # type: ignore[no-untyped-def]
    """One row's bytes, and the same as uint16 or uint32, whichever is as wide as a scale, to its
    values in float32; ``factors`` and their ``words`` are scratch for two numbers a group."""
    groups = np.uintp(factors.shape[0] // 2)
    own, step = np.uintp(size), np.uintp(size * bits // 8)
    _factors(numbers, groups * step // np.uintp(numbers.itemsize), factors, words)
    for group in range(groups):
        g = np.uintp(group)
        some = values[g * own : g * own + own]
        _group(raw, g * step, factors[g], factors[groups + g], own, bits, some)


@njit(nogil=True, cache=True, boundscheck=False)
def to_float32(raw, numbers, size, bits, out):  # type: ignore[no-untyped-def]
    """raw uint8 [rows, row bytes], the same as numbers of a scale's width, to out [rows, cols]."""
    factors = np.empty(2 * (out.shape[1] // size), np.float32)
    words = factors.view(np.uint32)
    for row in range(out.shape[0]):
        _plain_row(raw[row], numbers[row], size, bits, factors, words, out[row])


@njit(nogil=True, cache=True, boundscheck=False)
def to_bfloat16(raw, numbers, size, bits, out):  # type: ignore[no-untyped-def]
    """Likewise, the upper halves of the float32 values, rounded to the nearest, ties to even."""
    columns = out.shape[1]
    values = np.empty(columns, np.float32)
    value_words = values.view(np.uint32)
    factors = np.empty(2 * (columns // size), np.float32)
    words = factors.view(np.uint32)
    for row in range(out.shape[0]):
        _plain_row(raw[row], numbers[row], size, bits, factors, words, values)
        for j in range(columns):
            i = np.uintp(j)
            word = value_words[i]
            rounded = word + _HALF_ULP + ((word >> _SIXTEEN) & _ONE)
            out[row, i] = np.uint16(rounded >> _SIXTEEN)


@njit(nogil=True, cache=True, boundscheck=False, fastmath={"reassoc", "contract", "nsz"})
def _dot(x, y):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for j in range(x.shape[0]):
        i = np.uintp(j)
        total += x[i] * y[i]
    return total


@njit(nogil=True, cache=True, boundscheck=False)
def product(raw, numbers, size, bits, x, out):  # type: ignore[no-untyped-def]
    """out [rows, tokens] = rows times x [tokens, columns], in float32: each row is made plain in
    the nearest cache and used for all tokens."""
    columns = x.shape[1]
    values = np.empty(columns, np.float32)
    factors = np.empty(2 * (columns // size), np.float32)
    words = factors.view(np.uint32)
    for row in range(out.shape[0]):
        _plain_row(raw[row], numbers[row], size, bits, factors, words, values)
        for token in range(x.shape[0]):
            out[row, token] = _dot(values, x[token])


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _widen(words, shift, own):  # type: ignore[no-untyped-def]
    """Words of a bfloat16 (``shift`` 16) or float32 as those of a float32; the largest magnitude's
    word."""
    most = np.int32(0)
    for j in range(own.shape[0]):
        i = np.uintp(j)
        word = np.uint32(words[i]) << shift
        own[i] = word
        magnitude = np.int32(word & _MAGNITUDE)
        if magnitude > most:
            most = magnitude
    return most


@njit(nogil=True, cache=True, boundscheck=False)
def to_int8(words, shift, pitch, least, codes, scales):  # type: ignore[no-untyped-def]
    """Each token's codes [T, columns], as bytes, and scale. ``words`` is flat, a token begins every
    ``pitch``. Below the word ``least`` a token is 0; its scale is NaN where a value is not
    finite."""
    columns = codes.shape[1]
    values = np.empty(columns, np.float32)
    own = values.view(np.uint32)
    single = np.empty(1, np.float32)
    single_word = single.view(np.uint32)
    for token in range(codes.shape[0]):
        t = np.uintp(token)
        first = t * np.uintp(pitch)
        most = np.uint32(_widen(words[first : first + np.uintp(columns)], shift, own))
        target = codes[t]
        if most < least or most >= _INFINITE:
            scales[t] = np.float32(0) if most < least else np.float32(np.nan)
            for j in range(columns):
                target[np.uintp(j)] = np.uint8(0)
            continue
        single_word[0] = most
        scale = single[0] / np.float32(127)
        scales[t] = scale
        for j in range(columns):
            i = np.uintp(j)
            values[i] = values[i] / scale + _ROUNDING
        for j in range(columns):
            i = np.uintp(j)
            target[i] = np.uint8(own[i] & np.uint32(255))


@njit(nogil=True, cache=True, boundscheck=False, inline="always")
def _scaled(sums, scale, row_scales, bias, values):  # type: ignore[no-untyped-def]
    """One token's results in float32; the bias may be empty."""
    for j in range(values.shape[0]):
        i = np.uintp(j)
        values[i] = np.float32(sums[i]) * scale * row_scales[i]
    for j in range(bias.shape[0]):
        i = np.uintp(j)
        values[i] += bias[i]


@njit(nogil=True, cache=True, boundscheck=False)
def scale_to_float32(  # type: ignore[no-untyped-def]
    sums, token_scales, row_scales, bias, adds, out, pitch
):
    """out = sums [T, rows] * scale of the token * scale of the row + bias, or out += that. ``out``
    is flat, a token begins every ``pitch``."""
    count = np.uintp(row_scales.shape[0])
    values = np.empty(row_scales.shape[0], np.float32)
    for token in range(token_scales.shape[0]):
        t = np.uintp(token)
        _scaled(sums[t], token_scales[t], row_scales, bias, values)
        target = out[t * np.uintp(pitch) : t * np.uintp(pitch) + count]
        if adds:
            for j in range(values.shape[0]):
                i = np.uintp(j)
                target[i] += values[i]
        else:
            for j in range(values.shape[0]):
                i = np.uintp(j)
                target[i] = values[i]


@njit(nogil=True, cache=True, boundscheck=False)
def scale_to_bfloat16(  # type: ignore[no-untyped-def]
    sums, token_scales, row_scales, bias, adds, out, pitch
):
    """Likewise in words of bfloat16; the sum with what was there is rounded once."""
    count = np.uintp(row_scales.shape[0])
    values = np.empty(row_scales.shape[0], np.float32)
    before = np.empty(row_scales.shape[0], np.float32)
    words, words_before = values.view(np.uint32), before.view(np.uint32)
    for token in range(token_scales.shape[0]):
        t = np.uintp(token)
        _scaled(sums[t], token_scales[t], row_scales, bias, values)
        target = out[t * np.uintp(pitch) : t * np.uintp(pitch) + count]
        if adds:
            for j in range(values.shape[0]):
                i = np.uintp(j)
                words_before[i] = np.uint32(target[i]) << _SIXTEEN
            for j in range(values.shape[0]):
                i = np.uintp(j)
                values[i] += before[i]
        for j in range(values.shape[0]):
            i = np.uintp(j)
            word = words[i]
            rounded = word + _HALF_ULP + ((word >> _SIXTEEN) & _ONE)
            target[i] = np.uint16(rounded >> _SIXTEEN)
