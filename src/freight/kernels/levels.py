"""Codes of 4 bits that stand for the levels of a table, as tensors: rows made, and made plain. The
reference of all faster versions; a row is as ``model.float_formats`` has it.
"""

from __future__ import annotations

from functools import cache

import torch

from freight.model.float_formats import LEVEL_COLUMNS, LEVELS, LevelFloats

__all__ = ["join_level_rows", "levels_of", "make_levels_plain_reference"]


@cache
def levels_of(name: str) -> torch.Tensor:
    """The sixteen levels of that name, float32."""
    return torch.tensor(LEVELS[name])


def join_level_rows(
    codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """codes uint8 [rows, columns], and scales float32 [rows, groups], or as bytes with factors
    float32 [rows], as uint8 [rows, row bytes]."""
    rows = len(codes)
    low, high = codes.view(rows, -1, 2, LEVEL_COLUMNS // 2).unbind(dim=2)
    parts = [(low | high << 4).reshape(rows, -1), scales.contiguous().view(torch.uint8)]
    if factors is not None:
        parts.append(factors.contiguous().view(torch.uint8).view(rows, 4))
    return torch.cat(parts, dim=1)


def make_levels_plain_reference(raw: torch.Tensor, own: LevelFloats, out: torch.Tensor) -> None:
    """raw uint8 [rows, row bytes] to out [rows, columns], computed in float32 and rounded once."""
    rows, columns = out.shape
    border = own.code_bytes(columns)
    codes = raw[:, :border].reshape(rows, -1, LEVEL_COLUMNS // 2)
    codes = torch.cat([codes & 15, codes >> 4], dim=-1).view(rows, -1, own.group_size)
    values = levels_of(own.levels).to(raw.device)[codes.int()]
    out.copy_((values * _scales(raw[:, border:], own)[..., None]).view(rows, columns))


def _scales(behind: torch.Tensor, own: LevelFloats) -> torch.Tensor:
    """[rows, groups] of what stands behind the codes."""
    if not own.in_bytes:
        return behind.contiguous().view(torch.float32)
    scales = behind[:, :-4].contiguous().view(torch.float8_e4m3fn).float()
    return scales * behind[:, -4:].contiguous().view(torch.float32)
