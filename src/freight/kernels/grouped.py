"""Integers in groups as tensors: quantise, and back. The reference of all faster versions.

A compressed matrix is uint8 [rows, row bytes]; the format is in ``model.number_format``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from freight.kernels.cuda.choice import kernels_of
from freight.kernels.threads import dequantise_on_cpu, product_on_cpu
from freight.model.number_format import Grouped

__all__ = [
    "GroupedRows",
    "dequantise",
    "dequantise_reference",
    "join_rows",
    "quantise",
    "small_product",
]

_FEW_TOKENS: Final = 16
_MOST: Final = 65504.0
"""The largest number of float16, in which scales and minima are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRows:
    """Rows of a matrix with so many columns, compressed."""

    raw: torch.Tensor
    columns: int
    number_format: Grouped

    @property
    def shape(self) -> tuple[int, int]:
        return self.raw.shape[0], self.columns

    def rows(self, first: int, last: int) -> GroupedRows:
        return GroupedRows(
            raw=self.raw[first:last], columns=self.columns, number_format=self.number_format
        )


def quantise(x: torch.Tensor, number_format: Grouped) -> torch.Tensor:
    """x [rows, columns] of any float type as uint8 [rows, row bytes].

    Values beyond float16 become its largest, of no value (NaN) 0. A value is off by half of a step
    at most, a step being (max - min) / levels of its group, and by the rounding of scale and
    minimum. A constant group keeps its value as float16 has it. Scales and minima of zero have no
    sign: which of 0 and -0 is the smaller, machines disagree.
    """
    rows, columns = x.shape
    size = number_format.group_size
    groups = columns // size
    wide = torch.nan_to_num(x.float(), nan=0.0, posinf=_MOST, neginf=-_MOST).clamp_(-_MOST, _MOST)
    wide = wide.view(rows, groups, size)
    lowest = wide.amin(dim=-1).half().add_(0.0)
    span = (wide.amax(dim=-1) - lowest.float()).clamp_(min=0.0)
    # By a number, CUDA would multiply by its inverse, and not always round to the nearest.
    levels = torch.full((), float(number_format.levels), device=x.device)
    scale = (span / levels).half().add_(0.0)
    step = scale.float()[..., None]
    codes = (wide - lowest.float()[..., None]) / torch.where(step > 0, step, 1.0)
    codes = codes.round_().clamp_(0, number_format.levels)
    codes = torch.where(step > 0, codes, 0.0).to(torch.uint8)
    return join_rows(codes, scale, lowest, number_format)


def join_rows(
    codes: torch.Tensor, scale: torch.Tensor, lowest: torch.Tensor, number_format: Grouped
) -> torch.Tensor:
    """codes uint8 [rows, groups, group size], scales and minima [rows, groups] in the format's own
    type, as uint8 [rows, row bytes]."""
    rows, _, size = codes.shape
    if number_format.code_bits == 4:
        codes = codes[..., : size // 2] | codes[..., size // 2 :] << 4
    return torch.cat(
        [codes.reshape(rows, -1), scale.view(torch.uint8), lowest.view(torch.uint8)], dim=1
    )


def dequantise_reference(rows: GroupedRows, out: torch.Tensor) -> None:
    """out [rows, columns] = the values, computed in float32 and rounded once."""
    number_format, (count, columns) = rows.number_format, rows.shape
    groups = columns // number_format.group_size
    border = number_format.code_bytes(columns)
    codes = rows.raw[:, :border].view(count, groups, -1)
    if number_format.code_bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    factors = rows.raw[:, border:].view(torch.float32 if number_format.wide else torch.float16)
    scale, lowest = factors[:, :groups].float(), factors[:, groups:].float()
    values = codes.float() * scale[..., None] + lowest[..., None]
    out.copy_(values.view(count, columns))


def small_product(x: torch.Tensor, rows: GroupedRows) -> torch.Tensor | None:
    """x [tokens, columns] times the rows, in float32 [tokens, rows], for so few tokens that making
    the rows plain would cost more than the product; None where that is not so, or not known how."""
    if (multiply := kernels_of(x.device).multiply) is not None:
        return multiply(x, rows.raw, rows.number_format)
    if x.device.type != "cpu" or x.shape[0] > _FEW_TOKENS:
        return None
    return product_on_cpu(rows.raw, rows.number_format, x)


def dequantise(rows: GroupedRows, out: torch.Tensor) -> None:
    """The same values by the fastest means there is."""
    if (make_plain := kernels_of(out.device).make_plain) is not None:
        make_plain(rows.raw, rows.number_format, out)
        return
    if out.device.type == "cpu" and dequantise_on_cpu(
        rows.raw, rows.columns, rows.number_format, out
    ):
        return
    dequantise_reference(rows, out)
