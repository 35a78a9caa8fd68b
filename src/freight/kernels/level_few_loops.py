"""Rows of codes of 4 bits that stand for levels times a few tokens of bfloat16: what
``pair_few_loops`` calls for them. Levels that bfloat16 does not have are two of its numbers, of
which the second says what the first leaves out: no row is made plain, and no level rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from freight.kernels.addresses import bytes_at, floats_at, words_at
from freight.kernels.code_few_blocks import CHUNK
from freight.kernels.code_few_loops import AHEAD, lay_codes_tokens, multiply_tokens, wide_groups
from freight.kernels.compiled import uncounted
from freight.kernels.group_loops import widen_factors
from freight.kernels.micro_registers import load_eights
from freight.kernels.pair_few_blocks import ROWS
from freight.kernels.row_kinds import KeptLevels, kind_of
from freight.kernels.vectors import WIDTH, multiply, splat, store
from freight.model.float_formats import LEVEL_COLUMNS

__all__ = ["lay_level_tokens", "multiply_levels"]

U = np.uintp


@uncounted
def lay_level_tokens(x, given, together, laid):  # type: ignore[no-untyped-def]
    """As ``lay_codes_tokens``."""
    lay_codes_tokens(x, given, together, LEVEL_COLUMNS, laid)


def _put_scales(kind: Any, at: Any, groups: Any, room: Any, to: Any) -> None:
    """Those of a row, which begin at an address, to room from ``to`` on, as float32."""


@overload(_put_scales, jit_options={"nogil": True, "boundscheck": False})
def _put_scales_of(kind, at, groups, room, to):  # type: ignore[no-untyped-def]
    if kind_of(kind) is KeptLevels:
        return _put_words
    return _put_eights


def _put_words(kind, at, groups, room, to):  # type: ignore[no-untyped-def]
    widen_factors(words_at(at, groups), U(0), U(groups), room, to)


def _put_eights(kind, at, groups, room, to):  # type: ignore[no-untyped-def]
    scales, factor = bytes_at(at, groups), floats_at(at + groups, 1)[0]
    whole = groups // WIDTH * WIDTH
    for group in range(0, whole, WIDTH):
        own = multiply(load_eights(scales, U(group)), splat(factor))
        store(room, to + U(group), own)
    for group in range(whole, groups):
        room[to + U(group)] = kind.eights[scales[group]] * factor


def _tables_of(kind: Any) -> Any:
    """Numbers of bfloat16 whose sums are the levels."""


@overload(_tables_of, inline="always")
def _tables_of_kind(kind):  # type: ignore[no-untyped-def]
    if kind_of(kind) is KeptLevels:
        return lambda kind: (kind.levels, kind.rest)
    return lambda kind: (kind.levels,)


@njit(nogil=True, cache=True, boundscheck=False)
def multiply_levels(kind, begin, height, following, given, x, shared, room, sums):  # type: ignore[no-untyped-def]
    """As ``multiply_codes``; there are no minima."""
    columns, tokens = given
    line, groups, code_bytes = kind.row_bytes, 2 * columns // kind.size, columns
    wide, chunks, bits = U(wide_groups(columns, kind.size)), U(code_bytes // CHUNK), U(0)
    while (kind.size // 2) >> bits > 1:
        bits += U(1)
    raw, behind = bytes_at(begin, height * line), following - begin
    part, tables = U(line // (code_bytes // CHUNK)), _tables_of(kind)
    for row in range(0, height, ROWS):
        left = min(ROWS, height - row)
        for own in range(left):
            at = begin + (row + own) * line + code_bytes
            _put_scales(kind, at, groups, room, U(own) * wide)
        beyond = row + AHEAD - height
        ahead = (row + AHEAD) * line if beyond < 0 else behind + beyond * line
        rows = raw, U(row * line), U(line), U(left), part
        own_factors, target = (room, wide, U(0), bits), (sums, U(row * WIDTH))
        own_tokens = x, U(columns), chunks
        multiply_tokens(
            kind, rows, own_factors, tables, tokens, own_tokens, shared, target, U(ahead)
        )
