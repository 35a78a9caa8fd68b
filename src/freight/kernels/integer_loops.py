"""Loops of integer products, which numba compiles: tokens made integers, and sums made plain. Each
works on some tokens, alone; threads are the caller's business.

Indices are unsigned: numba then asks of none whether it counts from the end, and the compiler can
make vectors of the loops.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["scale_to_bfloat16", "scale_to_float32", "to_int8"]

_ONE = np.uint32(1)
_HALF_ULP = np.uint32(0x7FFF)
_SIXTEEN = np.uint32(16)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_ROUNDING = np.float32(12582912.0)
"""1.5 * 2^23: added to a small float32, it leaves the nearest integer, ties to even, in the lowest
bits."""


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
