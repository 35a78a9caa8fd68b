"""Products of 8-bit integers: tokens and rows of weights as codes with a scale each.

value = code * scale, codes from -127 to 127, the scale the largest magnitude over 127 (LLM.int8(),
Dettmers et al. 2022, without its outliers). Sums of products are exact in 32 bits; they are scaled
in float32 and rounded once. A token's result depends on nothing but the token and the rows: not on
its neighbours, nor on how rows are cut. A matrix is uint8 [rows, columns + 4], a row its codes and
its scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from freight.kernels.integer_tiles import multiply_in_tiles
from freight.kernels.threads import quantise_on_cpu, scale_on_cpu
from freight.model.number_format import SUMS

__all__ = [
    "IntegerRows",
    "IntegerTokens",
    "integer_product",
    "quantise_rows",
    "quantise_tokens",
    "scale_sums",
]

_MOST_TOKENS: Final = 2048
_LEAST: Final = 2.0**-119
"""The least magnitude that a scale comes of: those of smaller ones would not be normal numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerRows:
    """Rows of a matrix with so many columns."""

    raw: torch.Tensor
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.raw.shape[0], self.columns

    @property
    def codes(self) -> torch.Tensor:
        return self.raw[:, : self.columns].view(torch.int8)

    @property
    def scales(self) -> torch.Tensor:
        return self.raw[:, self.columns :].view(torch.float32).view(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerTokens:
    """Codes [T, columns] and scales [T] of tokens."""

    codes: torch.Tensor
    scales: torch.Tensor

    def of(self, rows: slice) -> IntegerTokens:
        return IntegerTokens(codes=self.codes[rows], scales=self.scales[rows])


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns], columns a multiple of 4, as uint8 [rows, columns + 4]."""
    rows, columns = x.shape
    raw = torch.empty(rows, columns + 4, dtype=torch.uint8)
    own = IntegerRows(raw=raw, columns=columns)
    _quantise_reference(x, own.codes, own.scales)
    return raw


def quantise_tokens(x: torch.Tensor, tokens: IntegerTokens) -> None:
    """Fill ``tokens`` from x [T, columns]: bfloat16 or float32. A value is off by half of its
    token's scale at most.

    Where a value is infinite or no number (NaN), the token's scale is NaN, and so are all its
    results. Tokens without a magnitude of 2^-119 become 0.
    """
    if not quantise_on_cpu(x, tokens.codes, tokens.scales, _LEAST):
        _quantise_reference(x, tokens.codes, tokens.scales)


def _quantise_reference(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    wide = x.float()
    most = wide.abs().amax(dim=1)
    has_codes = torch.isfinite(most) & (most >= _LEAST)
    scale = torch.where(has_codes, most / 127.0, torch.where(most < _LEAST, 0.0, torch.nan))
    scales.copy_(scale)
    divided = wide / torch.where(has_codes, scale, 1.0)[:, None]
    codes.copy_(torch.where(has_codes[:, None], divided.round_(), 0.0))


def integer_product(
    tokens: IntegerTokens,
    rows: IntegerRows,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    sums: torch.Tensor,
    *,
    adds: bool,
) -> None:
    """out [T, rows] = tokens times the rows, plus the bias, or out += that where it ``adds``.

    ``sums`` int32 is scratch, as ``integer_scratch`` has it.
    """
    if multiply_in_tiles(tokens.codes, tokens.scales, rows.raw, bias, out, sums, adds=adds):
        return
    codes = rows.codes
    for tokens_from, tokens_to, first, last in _tiles(*out.shape):
        own = sums[: (tokens_to - tokens_from) * (last - first)].view(-1, last - first)
        torch._int_mm(tokens.codes[tokens_from:tokens_to], codes[first:last].t(), out=own)
        scale_sums(
            own,
            tokens.scales[tokens_from:tokens_to],
            # They lie behind the codes, which the product has just read.
            rows.scales[first:last].contiguous(),
            None if bias is None else bias[first:last],
            out[tokens_from:tokens_to, first:last],
            adds=adds,
        )


def _tiles(num_tokens: int, num_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of tokens and of rows: few and large, for each is a product of its own."""
    if not num_tokens:
        return
    step = SUMS // min(num_tokens, _MOST_TOKENS)
    for start in range(0, num_tokens, _MOST_TOKENS):
        for first in range(0, num_rows, step):
            yield start, min(start + _MOST_TOKENS, num_tokens), first, min(first + step, num_rows)


def scale_sums(
    sums: torch.Tensor,
    token_scales: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool,
) -> None:
    """out [T, rows] = sums * scale of the token * scale of the row (+ bias) (+ out), in float32 in
    this order, rounded once."""
    wide = None if bias is None else bias.float()
    if scale_on_cpu(sums, token_scales, row_scales, wide, out, adds=adds):
        return
    values = sums.float().mul_(token_scales[:, None]).mul_(row_scales)
    if wide is not None:
        values += wide
    if adds:
        values += out
    out.copy_(values)
