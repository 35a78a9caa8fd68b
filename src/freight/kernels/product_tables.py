"""Tables of products, as loops that numba compiles read them: lines of tokens and, behind each of
them, lines of the products that these have.

A line of tokens says where they are, pairs from one to the next, how many pairs, how many tokens,
and last -1. One of a product says where rows are and how many, where float32 are to be added or 0,
what becomes of sums, where results are, numbers from one to the next, and which line the tokens
have. All are int64.
"""

from __future__ import annotations

import numpy as np

from freight.kernels.compiled import uncounted
from freight.kernels.sums import GATES

__all__ = ["gates_before", "place_of", "rows_of"]


@uncounted
def gates_before(table, line):  # type: ignore[no-untyped-def]
    """Whether a line is of a product that gates the one before."""
    return line < table.shape[0] and table[line, 6] >= 0 and table[line, 3] == GATES


@uncounted
def place_of(table, turn, line, before, most):  # type: ignore[no-untyped-def]
    """The line whose rows a turn of ``most`` is of, the first of them, and the turns of the lines
    before it; line 0 behind the last turn. It is looked for from a ``line`` on that has so many
    ``before``. Rows that gate have their turns with those before them, whose results they gate."""
    while line < table.shape[0]:
        if table[line, 6] >= 0 and not gates_before(table, line):
            turns = (table[line, 1] + most - 1) // most
            if turn - before < turns:
                return line, (turn - before) * most, before
            before += turns
        line += 1
    return 0, 0, before


@uncounted
def rows_of(table):  # type: ignore[no-untyped-def]
    """Of all products."""
    count = np.int64(0)
    for line in range(table.shape[0]):
        if table[line, 6] >= 0:
            count += table[line, 1]
    return count
