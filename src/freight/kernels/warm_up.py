"""Everything that numba compiles, loaded or made before it is wanted: it takes seconds, and memory
that a plan must know of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import torch

from freight.kernels.attention_choice import loop_attends_faster
from freight.kernels.few_pairs import SeveralRows
from freight.kernels.grouped import CompressedRows
from freight.kernels.integer_tiles import multiply_in_tiles
from freight.kernels.paged import append_rows, attend_queries, attend_single_queries
from freight.kernels.pages import Pages
from freight.kernels.pairs import most_of_each
from freight.kernels.plain_rows import (
    eights_on_cpu,
    exponents_on_cpu,
    levels_on_cpu,
    micro_on_cpu,
)
from freight.kernels.products import Product, loops_are_faster, multiply, scratch_values
from freight.kernels.recurrence import convolve, recur
from freight.kernels.row_states import RowStates
from freight.kernels.sharing import team_threads, without_team
from freight.kernels.state_heads import StateHeads
from freight.kernels.streams import collapse_streams, expand_streams, share_streams
from freight.kernels.sums import PUTS
from freight.kernels.threads import dequantise_on_cpu, product_on_cpu, quantise_on_cpu, scale_on_cpu
from freight.kernels.tokens import activate, normalise, rotate
from freight.model.number_format import (
    DTYPE_BYTES,
    PAIR_COLUMNS,
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    PerRow,
    ShortExponents,
    find_compressed,
    integer_scratch,
)
from freight.model.workspace import Workspace

__all__ = ["warm_up"]

_FORMAT: Final = Grouped(bits=4, group_size=64)
_OTHER_SIZE: Final = 48
"""Of a group that some loops do not take."""
_LEVEL_SIZE: Final = 16
_COLUMNS: Final = 192
_ROWS: Final = 8192
_KEYS: Final = 520
"""Enough for two threads."""
_SHARING: Final = 8
_PAGE_TOKENS: Final = 16
_TEAM_SHARES: Final = 2


def warm_up(
    dtype: torch.dtype,
    *,
    weights: Iterable[str],
    kv_format: Grouped | None,
    widths: Iterable[int] = (),
    keeps_states: bool = False,
    has_experts: bool = False,
    has_streams: bool = False,
    cpu_computes: bool = True,
) -> None:
    """For a model that computes with ``dtype`` and keeps its weights, by the names of their
    formats, keys and values so, in heads of some ``widths``, in some layers states; that has
    experts, or a residual stream that is several. Where not ``cpu_computes``, it attends single
    queries at most. A process that has done so for a model like it does nothing."""
    asked = _Asked(
        dtype=dtype,
        names=frozenset(weights),
        kv_format=kv_format,
        widths=frozenset(widths),
        keeps_states=keeps_states,
        has_experts=has_experts,
        has_streams=has_streams,
        cpu_computes=cpu_computes,
    )
    _warm_up_once(asked, torch.get_num_threads())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What ``warm_up`` is for."""

    dtype: torch.dtype
    names: frozenset[str]
    kv_format: Grouped | None
    widths: frozenset[int]
    keeps_states: bool
    has_experts: bool
    has_streams: bool
    cpu_computes: bool


@cache
def _warm_up_once(asked: _Asked, num_threads: int) -> None:
    """With so many threads of torch's: others may take other loops."""
    if team_threads(_TEAM_SHARES, is_short=True):
        with without_team():
            _call_all(asked)
    _call_all(asked)


def _call_all(asked: _Asked) -> None:
    dtype, kv_format = asked.dtype, asked.kv_format
    if asked.cpu_computes:
        _warm_up_arithmetic(dtype, asked.names, kv_format)
        _warm_up_prompts(dtype, None if kv_format is None else _FORMAT, asked.widths)
        if asked.keeps_states:
            _warm_up_states(dtype)
        if asked.has_experts:
            _warm_up_several(dtype)
        if asked.has_streams:
            _warm_up_streams(dtype)
    _warm_up_single_queries(dtype, None if kv_format is None else _FORMAT)


def _warm_up_arithmetic(
    dtype: torch.dtype, names: frozenset[str], kv_format: Grouped | None
) -> None:
    kinds = set(map(find_compressed, names))
    grouped = [own for own in (*kinds, kv_format) if isinstance(own, Grouped)]
    for own in {_alike(each) for each in grouped}:
        _warm_up_products(dtype, own)
    _warm_up_plain_rows(dtype, {getattr(torch, name) for name in names & DTYPE_BYTES.keys()})
    if any(isinstance(own, ShortExponents) for own in kinds):
        _warm_up_exponents(dtype)
    if MicroFloats() in kinds:
        _warm_up_floats(dtype, MicroFloats(), micro_on_cpu)
    if EightFloats() in kinds:
        _warm_up_floats(dtype, EightFloats(), eights_on_cpu)
    for levels in kinds:
        if isinstance(levels, LevelFloats):
            _warm_up_levels(dtype, levels)
    if PerRow() in kinds:
        _warm_up_integers(dtype)
    _warm_up_tokens(dtype)


def _alike(own: Grouped) -> Grouped:
    """A format for which the same loops are compiled."""
    is_taken = PAIR_COLUMNS % own.group_size == 0
    size = _FORMAT.group_size if is_taken or own.across else _OTHER_SIZE
    bits = own.code_bits
    return replace(_FORMAT, bits=bits, group_size=size, wide=own.wide, across=own.across)


def _warm_up_products(dtype: torch.dtype, own: Grouped) -> None:
    rows = own.rows_together
    raw = torch.zeros(rows, own.row_bytes(_COLUMNS), dtype=torch.uint8)
    dequantise_on_cpu(raw, _COLUMNS, own, torch.empty(rows, _COLUMNS, dtype=dtype))
    if own.across:
        product_on_cpu(raw, own, torch.zeros(1, _COLUMNS))
    if dtype in (torch.float32, torch.bfloat16) and not own.across:
        raw = torch.zeros(_ROWS, own.row_bytes(_COLUMNS), dtype=torch.uint8)
        _multiply_by(CompressedRows(raw=raw, columns=_COLUMNS, number_format=own), dtype)


def _warm_up_plain_rows(dtype: torch.dtype, kept: Iterable[torch.dtype]) -> None:
    if dtype not in (torch.float32, torch.bfloat16):
        return
    scratch = torch.empty(scratch_values(1024, dtype), dtype=dtype)
    for own, count in itertools.product(kept, (1, 8, 16, 64, 512)):
        # Trying takes memory, too: every choice by the number of tokens is made here.
        if own != dtype and not loops_are_faster(own, dtype):
            continue
        x, out = torch.zeros(count, 1024, dtype=dtype), torch.empty(count, 2048, dtype=dtype)
        product = Product(rows=torch.zeros(2048, 1024, dtype=own), out=out)
        multiply(x, [product], lambda size: scratch[:size])


def _warm_up_exponents(dtype: torch.dtype) -> None:
    own = ShortExponents(spare=0)
    raw = torch.zeros(_ROWS, own.row_bytes(_COLUMNS), dtype=torch.uint8)
    exponents_on_cpu(raw, _COLUMNS, torch.empty(_ROWS, _COLUMNS, dtype=dtype))
    _multiply_by(CompressedRows(raw=raw, columns=_COLUMNS, number_format=own), dtype)


def _warm_up_floats(
    dtype: torch.dtype,
    own: MicroFloats | EightFloats,
    make_plain: Callable[[torch.Tensor, int, torch.Tensor], bool],
) -> None:
    raw = torch.zeros(_ROWS, own.row_bytes(_COLUMNS), dtype=torch.uint8)
    make_plain(raw, _COLUMNS, torch.empty(_ROWS, _COLUMNS, dtype=dtype))
    _multiply_by(CompressedRows(raw=raw, columns=_COLUMNS, number_format=own), dtype)


def _warm_up_levels(dtype: torch.dtype, own: LevelFloats) -> None:
    own = replace(own, group_size=_LEVEL_SIZE)  # the loops are the same for all
    raw = torch.zeros(_ROWS, own.row_bytes(_COLUMNS), dtype=torch.uint8)
    levels_on_cpu(raw, own, torch.empty(_ROWS, _COLUMNS, dtype=dtype))
    _multiply_by(CompressedRows(raw=raw, columns=_COLUMNS, number_format=own), dtype)


def _multiply_by(many: CompressedRows, dtype: torch.dtype) -> None:
    scratch = torch.empty(scratch_values(_COLUMNS, dtype), dtype=dtype)
    for count in (2, 8, 32, 128):
        x = torch.zeros(count, _COLUMNS, dtype=dtype)
        product = Product(rows=many, out=torch.empty(count, _ROWS, dtype=dtype))
        multiply(x, [product], lambda size: scratch[:size])


def _warm_up_integers(dtype: torch.dtype) -> None:
    codes, scales = torch.zeros(1, 4, dtype=torch.int8), torch.zeros(1)
    x, sums = torch.zeros(1, 4, dtype=dtype), torch.zeros(1, 4, dtype=torch.int32)
    quantise_on_cpu(x, codes, scales, 1.0)
    scale_on_cpu(sums, scales, torch.zeros(4), None, x, adds=False)
    raw = torch.zeros(32, 68, dtype=torch.uint8)
    for count in (16, 1024):
        codes, scales = torch.zeros(count, 64, dtype=torch.int8), torch.zeros(count)
        out = torch.zeros(count, 32, dtype=dtype)
        room = torch.zeros(integer_scratch(count, 32, 64), dtype=torch.int32)
        multiply_in_tiles(codes, scales, raw, None, out, room, adds=False)


def _warm_up_tokens(dtype: torch.dtype) -> None:
    x, angles, ones = *torch.ones(2, 1, 32, dtype=dtype), torch.ones(32)
    room = Workspace(torch.empty(1024, dtype=torch.uint8))
    normalise(x, x, ones, None, num_heads=1, eps=1.0, centred=False, workspace=room)
    for pairs in (False, True):
        rotate(x, 1, angles[:, :16], angles[:, :16], room, pairs=pairs)
    activate(x, "gelu_tanh")
    activate(x, "silu", x.clone())


def _warm_up_states(dtype: torch.dtype) -> None:
    x, one = torch.zeros(1, 64, dtype=dtype), np.zeros(1, np.int64)
    rows = RowStates(starts=one, counts=one + 1, seats=one, is_new=one)
    columns = torch.zeros(1, 3, 64, dtype=dtype)
    convolve(x, torch.zeros(64, 4), None, columns, rows)
    heads = StateHeads(num_key_heads=1, num_heads=1, key_width=16, value_width=32)
    rate, number, out = x[:, :1], torch.zeros(1), torch.zeros(1, 32, dtype=dtype)
    memory = torch.zeros(1, 1, 16, 32)
    recur(x, rate, rate, number, number, None, memory, out, heads=heads, rows=rows)


def _warm_up_several(dtype: torch.dtype) -> None:
    """Of plain rows: other ones are met by loops that take one set as well."""
    own, x = torch.zeros(32, 64, dtype=dtype), torch.zeros(32, 64, dtype=dtype)
    rows, one = SeveralRows.of([[(own, None)]]), np.ones(1, np.int64)
    if rows is not None and rows.takes(x, (x,)) and most_of_each(rows):
        rows.multiply(
            x, one - 1, one - 1, 32 * one, (torch.empty_like(own),), (PUTS,), are_few=False
        )


def _warm_up_streams(dtype: torch.dtype) -> None:
    x, y, shares = (torch.zeros(1, size, dtype=dtype) for size in (16, 16, 2))
    mapped, ones = torch.zeros(1, 3), torch.ones(3)
    collapse_streams(x, torch.zeros(3, 16), ones, ones, y, mapped, eps=1.0, floor=0.0)
    given = {"magnitude": 1.0, "least_share": 0.0, "rounds": 1, "floor": 0.0}
    share_streams(mapped, shares, 1, **given)  # type: ignore[arg-type]
    expand_streams(x, y, shares, 1, mixed=True)


def _width(kv_format: Grouped | None) -> int:
    """Of a head: a whole group at least."""
    return 64 if kv_format is None else max(64, kv_format.group_size)


def _one_page(dtype: torch.dtype, kv_format: Grouped | None, page_tokens: int = 1) -> Pages:
    width = _width(kv_format)
    token_bytes = width * dtype.itemsize if kv_format is None else kv_format.row_bytes(width)
    return Pages(
        raw=torch.zeros(1, 2 * page_tokens * token_bytes, dtype=torch.uint8),
        num_heads=1,
        page_tokens=page_tokens,
        width=width,
        dtype=dtype,
        number_format=kv_format,
    )


def _warm_up_single_queries(dtype: torch.dtype, kv_format: Grouped | None) -> None:
    pages, width = _one_page(dtype, kv_format), _width(kv_format)
    zero, x = torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, width, dtype=dtype)
    append_rows(pages, zero, zero, x, x)
    # The same page again and again; one query, and as many as fill registers of tiles.
    table, lens = torch.zeros(_KEYS, dtype=torch.long), torch.full((1,), _KEYS - 1)
    for count, page_tokens in ((1, 1), (_SHARING, _PAGE_TOKENS)):
        pages = _one_page(dtype, kv_format, page_tokens)
        q = x.expand(1, count, width).contiguous()
        attend_single_queries(
            q, pages, table, lens, q, scale=1.0, softcap=None, window=None, share_of_keys=1.0
        )


def _warm_up_prompts(dtype: torch.dtype, kv_format: Grouped | None, widths: Iterable[int]) -> None:
    pages, width = _one_page(dtype, kv_format), _width(kv_format)
    zeros, x = torch.zeros(2, dtype=torch.long), torch.zeros(2, 1, width, dtype=dtype)
    attend_queries(x, pages, zeros, zeros, x, scale=1.0, softcap=None, window=None)
    for own in {_width(None), *widths}:
        loop_attends_faster(dtype, own)
