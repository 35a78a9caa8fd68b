"""Compressed rows as tensors: integers in groups are made here, and rows made plain. The reference
of all faster versions.

A compressed matrix is uint8 [rows, row bytes]; its format is in ``model.number_format``. Where
groups run across rows, as many rows as a group has are one stretch of bytes, and only whole groups
mean anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from freight.kernels.cuda.choice import kernels_of
from freight.kernels.eights import make_eights_plain_reference
from freight.kernels.exponents import make_plain_reference
from freight.kernels.levels import make_levels_plain_reference
from freight.kernels.micro import make_micro_plain_reference
from freight.kernels.plain_rows import (
    eights_on_cpu,
    exponents_on_cpu,
    levels_on_cpu,
    micro_on_cpu,
)
from freight.kernels.threads import dequantise_on_cpu, product_on_cpu
from freight.model.number_format import (
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    RowFormat,
    ShortExponents,
)

__all__ = [
    "CompressedRows",
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
class CompressedRows:
    """Rows of a matrix with so many columns, compressed; whole groups of them."""

    raw: torch.Tensor
    columns: int
    number_format: RowFormat

    def __post_init__(self) -> None:
        # Loops check no index.
        assert self.raw.shape[0] % self.number_format.rows_together == 0, self.raw.shape

    @property
    def shape(self) -> tuple[int, int]:
        return self.raw.shape[0], self.columns

    def rows(self, first: int, last: int) -> CompressedRows:
        assert first % self.number_format.rows_together == 0, first
        return CompressedRows(
            raw=self.raw[first:last], columns=self.columns, number_format=self.number_format
        )


def quantise(x: torch.Tensor, number_format: Grouped) -> torch.Tensor:
    """x [rows, columns] of any float type as uint8 [rows, row bytes]; groups divide their dim.

    Values beyond float16 become its largest, of no value (NaN) 0. A value is off by half of a step
    at most, a step being (max - min) / levels of its group, and by the rounding of scale and
    minimum. A constant group keeps its value as float16 has it. Scales and minima of zero have no
    sign: which of 0 and -0 is the smaller, machines disagree.
    """
    rows, columns = x.shape
    size, dim = number_format.group_size, 1 if number_format.across else 2
    wide = torch.nan_to_num(x.float(), nan=0.0, posinf=_MOST, neginf=-_MOST).clamp_(-_MOST, _MOST)
    wide = wide.view((-1, size, columns) if number_format.across else (rows, -1, size))
    lowest = wide.amin(dim=dim).half().add_(0.0)
    span = (wide.amax(dim=dim) - lowest.float()).clamp_(min=0.0)
    # By a number, CUDA would multiply by its inverse, and not always round to the nearest.
    levels = torch.full((), float(number_format.levels), device=x.device)
    scale = (span / levels).half().add_(0.0)
    step = scale.float().unsqueeze(dim)
    codes = (wide - lowest.float().unsqueeze(dim)) / torch.where(step > 0, step, 1.0)
    codes = codes.round_().clamp_(0, number_format.levels)
    codes = torch.where(step > 0, codes, 0.0).to(torch.uint8)
    return join_rows(codes, scale, lowest, number_format)


def join_rows(
    codes: torch.Tensor, scale: torch.Tensor, lowest: torch.Tensor, number_format: Grouped
) -> torch.Tensor:
    """codes uint8 [rows, groups, group size], scales and minima [rows, groups] in the format's own
    type, as uint8 [rows, row bytes]. Across rows, codes are [groups, group size, columns] and the
    others [groups, columns]."""
    dim = 1 if number_format.across else 2
    if number_format.code_bits == 4:
        low, high = codes.chunk(2, dim=dim)
        codes = low | high << 4
    found = torch.cat([codes.flatten(1), scale.view(torch.uint8), lowest.view(torch.uint8)], dim=1)
    return found.view(len(found) * number_format.rows_together, -1)


def dequantise_reference(rows: CompressedRows, out: torch.Tensor) -> None:
    """out [rows, columns] = the values, computed in float32 and rounded once."""
    own, (count, columns) = rows.number_format, rows.shape
    if isinstance(own, ShortExponents):
        make_plain_reference(rows.raw, own, out)
        return
    if isinstance(own, MicroFloats):
        make_micro_plain_reference(rows.raw, own, out)
        return
    if isinstance(own, EightFloats):
        make_eights_plain_reference(rows.raw, own, out)
        return
    if isinstance(own, LevelFloats):
        make_levels_plain_reference(rows.raw, own, out)
        return
    dim, together = (1 if own.across else 2), own.rows_together
    raw = rows.raw.reshape(count // together, together * rows.raw.shape[1])
    border, step = together * own.code_bytes(columns), own.code_bytes(own.group_size)
    shape = (step, columns) if own.across else (columns // own.group_size, step)
    codes = raw[:, :border].view(len(raw), *shape)
    if own.code_bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=dim)
    factors = raw[:, border:].view(torch.float32 if own.wide else torch.float16).float()
    scale, lowest = factors.chunk(2, dim=1)
    values = codes.float() * scale.unsqueeze(dim) + lowest.unsqueeze(dim)
    out.copy_(values.view(count, columns))


def small_product(x: torch.Tensor, rows: CompressedRows) -> torch.Tensor | None:
    """x [tokens, columns] times the rows, in float32 [tokens, rows], for so few tokens that making
    the rows plain would cost more than the product; None where that is not so, or not known how. On
    a CPU for groups across rows: ``products.multiply`` has loops for others."""
    if not isinstance(rows.number_format, Grouped):
        return None
    if (multiply := kernels_of(x.device).multiply) is not None:
        return multiply(x, rows.raw, rows.number_format)
    if x.device.type != "cpu" or x.shape[0] > _FEW_TOKENS or not rows.number_format.across:
        return None
    return product_on_cpu(rows.raw, rows.number_format, x)


def dequantise(rows: CompressedRows, out: torch.Tensor) -> None:
    """The same values by the fastest means there is."""
    own, kernels = rows.number_format, kernels_of(out.device)
    by_kernel = {
        Grouped: kernels.make_plain,
        ShortExponents: kernels.make_exponents_plain,
        MicroFloats: kernels.make_micro_plain,
        EightFloats: kernels.make_eights_plain,
        LevelFloats: kernels.make_levels_plain,
    }
    if (make_plain := by_kernel.get(type(own))) is not None:
        make_plain(rows.raw, own, out)
    elif out.device.type != "cpu" or not _by_loops(rows, out):
        dequantise_reference(rows, out)


def _by_loops(rows: CompressedRows, out: torch.Tensor) -> bool:
    """False where there are none."""
    own = rows.number_format
    if isinstance(own, Grouped):
        return dequantise_on_cpu(rows.raw, rows.columns, own, out)
    if isinstance(own, LevelFloats):
        return levels_on_cpu(rows.raw, own, out)
    loops = {
        ShortExponents: exponents_on_cpu,
        MicroFloats: micro_on_cpu,
        EightFloats: eights_on_cpu,
    }
    return loops[type(own)](rows.raw, rows.columns, out)
