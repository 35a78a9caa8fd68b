"""Products of several sets of tokens on a CUDA device, each by rows of its own, in one launch.

Experts of today's models are small and many: launching a product for each takes longer than it
does. The reference is a product of each set by torch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from freight.kernels.cuda.launch import dot_type, power_of_two

__all__ = ["multiply_sets"]

_LEAST_TOKENS: Final = 16
"""The fewest rows of a tensor core's operand."""
_ROWS: Final = 64
_COLUMN_BYTES: Final = 128
"""Of rows and tokens that are multiplied at once: a line of the cache of each."""
_STAGES: Final = 3


@triton.jit
def _multiply_sets(  # type: ignore[no-untyped-def]
    x,
    out,
    sets,
    columns,
    rows,
    x_stride,
    out_stride,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    dot: tl.constexpr,
):
    """``block_rows`` rows by all tokens of a set. Of each set it is said where its rows are, where
    their bias, which token is its first, and how many it has."""
    own = sets + 4 * tl.program_id(0)
    kind = tl.pointer_type(x.dtype.element_ty)
    own_rows = tl.multiple_of(tl.load(own).to(kind), 16)
    first, tokens = tl.load(own + 2), tl.load(own + 3)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    token, column = tl.arange(0, block_tokens), tl.arange(0, block_columns)
    is_row, is_token = row < rows, (token < tokens)[:, None]
    rows_at = own_rows + row[None, :] * columns + column[:, None]
    x_at = x + (first + token)[:, None] * x_stride + column[None, :]
    sums = tl.zeros([block_tokens, block_rows], tl.float32)
    for begin in range(0, columns, block_columns):
        is_column = begin + column < columns
        some = tl.load(x_at + begin, mask=is_token & is_column[None, :], other=0.0)
        met = tl.load(rows_at + begin, mask=is_row[None, :] & is_column[:, None], other=0.0)
        sums = tl.dot(some.to(dot), met.to(dot), sums, input_precision="ieee")
    if has_bias:
        bias = tl.load(own + 1).to(kind)
        sums += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + (first + token)[:, None] * out_stride + row[None, :]
    inside = is_token & is_row[None, :]
    if adds:
        sums += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)


def multiply_sets(
    x: torch.Tensor,
    sets: torch.Tensor,
    out: torch.Tensor,
    *,
    most_tokens: int,
    has_bias: bool,
    adds: bool,
) -> None:
    """Rows [rows, columns] of x's type, one behind the other, by tokens of x [T, columns], to the
    same tokens of out [T, rows], or onto them. Of each of the ``sets`` int64 [n, 4] the address of
    its rows, which 16 divides, that of their bias [rows], the first token, and how many: up to
    ``most_tokens``."""
    columns, rows = x.shape[1], out.shape[1]
    _multiply_sets[(len(sets), triton.cdiv(rows, _ROWS))](
        x,
        out,
        sets,
        columns,
        rows,
        x.stride(0),
        out.stride(0),
        has_bias=has_bias,
        adds=adds,
        block_tokens=max(_LEAST_TOKENS, power_of_two(most_tokens)),
        block_rows=_ROWS,
        block_columns=_COLUMN_BYTES // x.itemsize,
        dot=dot_type(x),
        num_stages=_STAGES,
    )
