"""How long the units of a layer take beside their arithmetic: threads are woken, steps begun."""

from __future__ import annotations

from typing import Final

import torch

from freight.kernels.paged import loops_attend
from freight.kernels.pages import Pages
from freight.kernels.products import scratch_values
from freight.model.batch import RowKey, RowSpan
from freight.model.config import ModelConfig, parse_config
from freight.model.decoder import build_programme
from freight.model.frame import Angles, Frame
from freight.model.kv_view import KVView, index_rows
from freight.model.layers import run_unit
from freight.model.workspace import Workspace
from freight.quantities import MIB
from freight.runtime.processor_probe import SMALL_ROWS, typical_s

__all__ = ["call_s"]

_SMALL: Final = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
_PAGE_TOKENS: Final = 16
_EARLIER_TOKENS: Final = 7


def call_s(dtype: torch.dtype, kept: torch.dtype, where: torch.device, flops_per_s: float) -> float:
    """What a unit takes beside its arithmetic, the mean of both units of a layer: a small one as it
    is run in a sweep, less its products at the rate of large ones of as many tokens. ``kept`` are
    the weights."""
    config = parse_config(_SMALL)
    units = [unit for unit in build_programme(config).units if unit.layer is not None]
    tokens, width = SMALL_ROWS, config.hidden_size
    scratch = scratch_values(width, dtype) * dtype.itemsize + 1 * MIB
    workspace = Workspace(torch.empty(scratch, dtype=torch.uint8, device=where))
    weights = {
        weight.name: [(0, torch.rand(weight.num_rows, weight.num_columns).to(where, kept))]
        for unit in units
        for weight in unit.weights
    }
    x = torch.rand(tokens, width, dtype=dtype, device=where)
    kv = [_keys(config, dtype, where)]
    angles = {rope: _angles(rope.rotary_dim // 2, dtype, where) for rope in config.rotations}

    def run(_: int) -> None:
        for unit in units:
            frame = Frame(
                weights=weights, workspace=workspace, values={"x": x}, angles=angles, kv=kv
            )
            run_unit(unit, frame)

    products_s = sum(unit.matmul_flops(tokens) for unit in units) / flops_per_s
    return max(0.0, typical_s(run, where) - products_s) / len(units)


def _keys(config: ModelConfig, dtype: torch.dtype, where: torch.device) -> tuple[Pages, KVView]:
    """Of rows with a page each, which bring one token."""
    heads, width = config.num_kv_heads, config.head_dim
    pages = Pages(
        raw=torch.rand(
            SMALL_ROWS, 2 * heads * _PAGE_TOKENS * width, dtype=dtype, device=where
        ).view(torch.uint8),
        num_heads=heads,
        page_tokens=_PAGE_TOKENS,
        width=width,
        dtype=dtype,
        number_format=None,
    )
    view = index_rows(
        [RowSpan(RowKey(i), i, 1, _EARLIER_TOKENS, ()) for i in range(SMALL_ROWS)],
        [[i] for i in range(SMALL_ROWS)],
        start=0,
        page_tokens=_PAGE_TOKENS,
        num_heads=config.num_heads,
        num_kv_heads=heads,
        head_dim=width,
        element_bytes=dtype.itemsize,
        device=where,
        by_loop=loops_attend(where, width, dtype, None),
    )
    return pages, view


def _angles(columns: int, dtype: torch.dtype, where: torch.device) -> Angles:
    turns = torch.full((SMALL_ROWS, columns), 0.5**0.5, dtype=dtype, device=where)
    return Angles(cos=turns, sin=turns)
