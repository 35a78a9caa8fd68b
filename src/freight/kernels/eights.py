"""Floats of 8 bits in groups that share a scale, as tensors: rows made, and made plain. The
reference of all faster versions; a row is as ``model.number_format`` has it.
"""

from __future__ import annotations

import torch

from freight.model.number_format import EIGHT_COLUMNS, EightFloats

__all__ = ["are_numbers", "join_eight_rows", "make_eights_plain_reference"]

_NO_NUMBER = 0x7F
"""Of a float of 8 bits without its sign."""


def are_numbers(codes: torch.Tensor) -> bool:
    """Whether all floats of 8 bits, uint8, are numbers."""
    return not bool(((codes & _NO_NUMBER) == _NO_NUMBER).any())


def join_eight_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes uint8 [rows, columns] and scales float32 [rows, groups] as uint8 [rows, row bytes]."""
    return torch.cat([codes, scales.contiguous().view(torch.uint8)], dim=1)


def make_eights_plain_reference(raw: torch.Tensor, own: EightFloats, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], computed in float32 and rounded once."""
    columns = out.shape[1]
    codes = raw[:, :columns].contiguous().view(torch.float8_e4m3fn).float()
    scales = raw[:, columns:].contiguous().view(torch.float32)
    out.copy_(codes * scales.repeat_interleave(EIGHT_COLUMNS, dim=1)[:, :columns])
