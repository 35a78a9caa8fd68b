"""Rows of levels out of the ways in which others store them. References of the layouts: Model
Optimizer's ``nvfp4_tensor``, compressed-tensors' ``nvfp4``, bitsandbytes' ``functional``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from freight.kernels.eights import are_numbers
from freight.kernels.levels import join_level_rows, levels_of
from freight.model.number_format import LevelFloats
from freight.model.packed_levels import BITSANDBYTES, DIVIDED

__all__ = ["level_rows"]


def level_rows(
    codes: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    scheme: str,
    own: LevelFloats,
) -> torch.Tensor | None:
    """codes uint8 [n, columns / 2] of those ``rows`` of a matrix whose other parts are given whole,
    as uint8 [n, row bytes]; None where a scale is no number, or the levels are others."""
    if scheme == BITSANDBYTES:
        scales = _scales_of_blocks(parts, rows)
        are_known = torch.equal(parts["quant_map"].flatten(), levels_of(own.levels))
        if scales is None or not are_known or not bool(torch.isfinite(scales).all()):
            return None
        both = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)
        return join_level_rows(both, scales)
    scales = parts["scales"].view(torch.uint8)[rows]
    factor = parts["factor"].flatten()
    factor = 1.0 / factor if scheme == DIVIDED else factor
    if not are_numbers(scales) or not bool(torch.isfinite(factor).all()):
        return None
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return join_level_rows(both, scales, factor.expand(len(rows)))


def _scales_of_blocks(parts: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor | None:
    """[n, groups]; None where what is said of them cannot be read."""
    scales = parts["absmax"][rows]
    if "nested_absmax" not in parts:
        return scales
    try:
        state = json.loads(bytes(parts["state"].tolist()))
        size, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
        place = rows[:, None] * scales.shape[1] + torch.arange(scales.shape[1])
        factors = parts["nested_absmax"].flatten()[place // size]
        return parts["nested_quant_map"].flatten()[scales.int()] * factors + offset
    except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
        return None
