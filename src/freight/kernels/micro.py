"""MXFP4 as tensors: rows out of what checkpoints have, and made plain. The reference of all faster
versions; a row is as ``model.number_format`` has it.
"""

from __future__ import annotations

from typing import Final

import torch

from freight.model.number_format import MICRO_COLUMNS, MicroFloats

__all__ = ["MAGNITUDES", "join_micro_blocks", "join_micro_rows", "make_micro_plain_reference"]

MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MANTISSA_BITS: Final = 23
_SMALLEST: Final = 1 << 22
"""The bits of 2^-127, which has no exponent of its own in float32."""


def join_micro_rows(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [rows, columns / 2], neighbours in a byte, the lower half first, and exponents
    uint8 [rows, groups], as uint8 [rows, row bytes]."""
    rows, groups = exponents.shape
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(rows, groups, MICRO_COLUMNS)
    low, high = codes.chunk(2, dim=-1)
    return torch.cat([(low | high << 4).view(rows, -1), exponents], dim=1)


def join_micro_blocks(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, groups, 17], of each group its exponent and then its codes as they lie here (the
    MXFP4 of ggml), as uint8 [rows, row bytes]."""
    return torch.cat([raw[..., 1:].flatten(1), raw[..., 0]], dim=1)


def make_micro_plain_reference(raw: torch.Tensor, own: MicroFloats, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], of any type: exact, but where that has no
    such exponent."""
    rows, columns = out.shape
    border = own.code_bytes(columns)
    codes = raw[:, :border].reshape(rows, -1, MICRO_COLUMNS // 2)
    codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    numbers = torch.tensor((*MAGNITUDES, *(-own for own in MAGNITUDES)), device=raw.device)
    exponents = raw[:, border:].int() << _MANTISSA_BITS
    scale = exponents.clamp_(min=_SMALLEST).view(torch.float32)
    values = numbers[codes.int()] * scale[..., None]
    out.copy_(values.view(rows, columns))
