"""Loops that numba compiles. Each works on some rows, alone; threads are the caller's business."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["to_bfloat16", "to_float32"]


@njit(nogil=True, cache=True, boundscheck=False)
def _row(codes, scales, minima, size, bits, values):  # type: ignore[no-untyped-def]
    """One row's values in float32."""
    half = size // 2
    for group in range(scales.shape[0]):
        scale, lowest, begin = scales[group], minima[group], group * size
        if bits == 4:
            first = group * half
            for j in range(half):
                values[begin + j] = np.float32(codes[first + j] & 15) * scale + lowest
            for j in range(half):
                values[begin + half + j] = np.float32(codes[first + j] >> 4) * scale + lowest
        else:
            for j in range(size):
                values[begin + j] = np.float32(codes[begin + j]) * scale + lowest


@njit(nogil=True, cache=True, boundscheck=False)
def to_float32(codes, scales, minima, size, bits, out):  # type: ignore[no-untyped-def]
    for row in range(out.shape[0]):
        _row(codes[row], scales[row], minima[row], size, bits, out[row])


@njit(nogil=True, cache=True, boundscheck=False)
def to_bfloat16(codes, scales, minima, size, bits, out):  # type: ignore[no-untyped-def]
    """Rounded to the nearest, ties to even; values are finite."""
    values = np.empty(out.shape[1], np.float32)
    words = values.view(np.uint32)
    for row in range(out.shape[0]):
        _row(codes[row], scales[row], minima[row], size, bits, values)
        for j in range(out.shape[1]):
            word = words[j]
            out[row, j] = (word + np.uint32(0x7FFF) + ((word >> 16) & np.uint32(1))) >> 16
