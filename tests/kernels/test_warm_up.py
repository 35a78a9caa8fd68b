"""Warming up: what a run uses is compiled by then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys

import numpy as np
import torch
from numba.core.runtime import rtsys

from freight.kernels import (
    append_loops,
    attention_loops,
    code_lines,
    exponent_lines,
    group_loops,
    group_product_loops,
    product_loops,
    recurrence_loops,
    stream_loops,
    token_loops,
)
from freight.kernels.few_pairs import SeveralRows
from freight.kernels.streams import collapse_streams, expand_streams, share_streams
from freight.kernels.sums import PUTS
from freight.kernels.grouped import CompressedRows, dequantise, small_product
from freight.kernels.recurrence import recur, convolve
from freight.kernels.state_heads import StateHeads
from freight.kernels.row_states import RowStates
from freight.kernels.paged import (
    _query_blocks,
    append_rows,
    attend_queries,
    attend_single_queries,
)
from freight.kernels.pages import Pages
from freight.kernels.products import Product, can_gate, multiply, scratch_values
from freight.kernels.threads import find_loops
from freight.kernels.tokens import normalise, rotate
from freight.kernels.warm_up import warm_up
from freight.model.number_format import Grouped, ShortExponents, fit_head
from freight.model.workspace import Workspace

dtype, pairs, tiles = getattr(torch, sys.argv[1]), find_loops().pairs, find_loops().tiles
few = find_loops().few_pairs
own = Grouped(bits=8, group_size=32, wide=True)
across = Grouped(bits=8, group_size=32, across=True)
kept = fit_head(4, 64, 96)
short = ShortExponents(spare=40)
names = ["bfloat16", own.name, across.name, short.name]
more = {"keeps_states": True, "has_experts": True, "has_streams": True}
warm_up(dtype, weights=names, kv_format=kept, **more)
warm_up(dtype, weights=["bfloat16"], kv_format=None)
wide = Grouped(bits=4, group_size=128)
warm_up(dtype, weights=["bfloat16"], kv_format=wide)
used = (
    group_loops.make_plain,
    group_product_loops.product_across,
    group_loops.make_plain_across,
    attention_loops.attend_heads,
    _query_blocks(find_loops(), dtype).attend_queries,
    append_loops.append_tokens,
    token_loops.normalise,
    token_loops.rotate,
    recurrence_loops.convolve,
    recurrence_loops.recur,
    stream_loops.collapse,
    stream_loops.share,
    stream_loops.expand,
)
# Only where they are faster than torch, or there are instructions for them.
certain = len(used)
used += (product_loops.few_tokens, product_loops.many_tokens)
used += (exponent_lines.lay_exponents, exponent_lines.lay_wide)
if pairs is not None:
    used += (code_lines.lay_codes, few.few_in_turns, pairs.lay_in_turns, pairs.many_in_turns)
    if tiles is None:
        used += (pairs.plain_in_turns, pairs.several_in_turns)
        used += (find_loops().code_queries.attend_heads,)
    used += (find_loops().pair_queries.attend_heads,)
if tiles is not None:
    used += (tiles.many_in_turns, find_loops().tile_blocks.many_in_turns)
compiled = [len(loop.signatures) for loop in used]
assert all(compiled[:certain]), compiled
def use():
    for one in (own, across):
        raw = torch.zeros(96, one.row_bytes(96), dtype=torch.uint8)
        rows = CompressedRows(raw=raw, columns=96, number_format=one)
        dequantise(rows, torch.empty(96, 96, dtype=dtype))
        assert (small_product(torch.zeros(3, 96), rows) is not None) == one.across
    many = torch.zeros(4096, own.row_bytes(128), dtype=torch.uint8)
    plain = torch.zeros(4096, 128, dtype=torch.bfloat16)
    scratch = torch.empty(scratch_values(128, dtype), dtype=dtype)
    packed = CompressedRows(raw=many, columns=128, number_format=own)
    many = torch.zeros(4096, short.row_bytes(128), dtype=torch.uint8)
    shortened = CompressedRows(raw=many, columns=128, number_format=short)
    dequantise(shortened, torch.empty(4096, 128, dtype=dtype))
    compressed = [(rows, n) for rows in (packed, shortened) for n in (3, 8, 40, 600)]
    for rows, count in (*compressed, *((plain, n) for n in (3, 40, 150, 700))):
        x, out = torch.zeros(count, 128, dtype=dtype), torch.empty(count, 4096, dtype=dtype)
        multiply(x, [Product(rows=rows, out=out)], lambda count: scratch[:count])
        pair = [Product(rows=rows, out=out), Product(rows=rows, out=out, gates=True)]
        if can_gate(x, pair):
            multiply(x, pair, lambda count: scratch[:count])
    raw = torch.zeros(3, 4 * 16 * kept.row_bytes(96), dtype=torch.uint8)
    pages = Pages(
        raw=raw, num_heads=2, page_tokens=16, width=96, dtype=dtype, number_format=kept
    )
    rows = SeveralRows.of([[(plain, None)]])
    if rows is not None and rows.takes(torch.zeros(64, 128, dtype=dtype), ()):
        x, out = torch.zeros(64, 128, dtype=dtype), torch.empty(64, 4096, dtype=dtype)
        one = np.ones(1, int)
        for count in (2, 40):
            rows.multiply(x, one - 1, one - 1, count * one, (out,), (PUTS,), are_few=count == 2)
    streams, shares = torch.zeros(9, 3 * 48, dtype=dtype), torch.zeros(9, 12, dtype=dtype)
    y, mapped, ones = torch.zeros(9, 48, dtype=dtype), torch.zeros(9, 15), torch.ones(15)
    weight = torch.zeros(15, 3 * 48)
    assert collapse_streams(streams, weight, ones, ones, y, mapped, eps=0.1, floor=0.1)
    sizes = {"magnitude": 2.0, "least_share": 0.0, "rounds": 3, "floor": 0.1}
    assert share_streams(mapped, shares, 3, **sizes)
    for mixed in (True, False):
        assert expand_streams(streams, y, shares, 3, mixed=mixed)
    places, k = torch.tensor([3, 4]), torch.zeros(2, 2, 96, dtype=dtype)
    append_rows(pages, torch.tensor([0, 2]), places, k, k)
    room = Workspace(torch.zeros(1 << 16, dtype=torch.uint8))
    x, gain = k.view(2, -1), torch.zeros(96)
    for centred, bias in ((True, None), (False, gain)):
        normalise(x, x, gain, bias, num_heads=2, eps=1e-5, centred=centred, workspace=room)
    angles = torch.zeros(7, 24, dtype=dtype)[5:]
    rotate(x, 2, angles, angles, room)
    heads = StateHeads(num_key_heads=2, num_heads=4, key_width=16, value_width=32)
    places = np.array([0, 3])
    rows = RowStates(starts=places, counts=places + 1, seats=places, is_new=places)
    x, memory = torch.zeros(7, 192, dtype=dtype), torch.zeros(5, 4, 16, 32)
    convolve(x, torch.zeros(192, 3, dtype=dtype), None, torch.zeros(5, 2, 192, dtype=dtype), rows)
    recur(
        x, x[:, :4], None, torch.zeros(4), torch.zeros(4), torch.zeros(4), memory,
        torch.zeros(7, 128, dtype=dtype), heads=heads, rows=rows,
    )
    places = torch.tensor([3, 4])
    q = torch.zeros(2, 6, 96, dtype=dtype)
    assert attend_single_queries(
        q, pages, torch.arange(8), places, q, scale=0.1, softcap=30.0, window=9, share_of_keys=0.5
    )
    q, lse = torch.zeros(6, 6, 96, dtype=dtype), torch.zeros(6, 6)
    assert attend_queries(
        q, pages, torch.arange(8), places, q, scale=0.1, softcap=30.0, window=9, lse=lse
    )
    pages = Pages(
        raw=torch.zeros(3, 4 * 16 * 64 * dtype.itemsize, dtype=torch.uint8),
        num_heads=2,
        page_tokens=16,
        width=64,
        dtype=dtype,
    )
    q = torch.zeros(2, 6, 64, dtype=dtype)
    assert attend_single_queries(
        q, pages, torch.arange(8), places, q, scale=0.1, softcap=30.0, window=9, share_of_keys=1.0
    )
    raw = torch.zeros(3, 4 * 16 * wide.row_bytes(256), dtype=torch.uint8)
    pages = Pages(
        raw=raw, num_heads=2, page_tokens=16, width=256, dtype=dtype, number_format=wide
    )
    q = torch.zeros(2, 6, 256, dtype=dtype)
    assert attend_single_queries(
        q, pages, torch.arange(8), places, q, scale=0.1, softcap=30.0, window=9, share_of_keys=1.0
    )


def held():
    made, freed, arrays, gone = rtsys.get_allocation_stats()
    return made - freed, arrays - gone

use()
assert [len(loop.signatures) for loop in used] == compiled
before = held()
for _ in range(2):
    use()
assert held() == before, (held(), before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_left_to_compile(dtype: str) -> None:
    """For scales in float32, too; in a process that has compiled nothing else. Nor is anything kept
    by loops that count references, or call those that do not."""
    command = [sys.executable, "-c", SCRIPT, dtype]
    counts = {**os.environ, "NUMBA_NRT_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=counts)
    assert done.returncode == 0, done.stderr


CHOICES = """
import torch

from freight.kernels import pairs, products
from freight.kernels.products import Product, multiply
from freight.kernels.warm_up import warm_up

warm_up(torch.bfloat16, weights=["bfloat16"], kv_format=None)
choices = products.loops_are_faster, pairs._times
tried = [own.cache_info().misses for own in choices]
rows, room = torch.zeros(4096, 1024).bfloat16(), torch.zeros(1 << 20).bfloat16()
for count in (1, 12, 40, 128, 150, 600):
    x, out = torch.zeros(count, 1024).bfloat16(), torch.empty(count, 4096).bfloat16()
    multiply(x, [Product(rows=rows, out=out)], lambda size: room[:size])
assert [own.cache_info().misses for own in choices] == tried
"""


def test_nothing_is_left_to_try() -> None:
    """Trying takes tens of megabytes, which a run in a budget has no room for."""
    done = subprocess.run([sys.executable, "-c", CHOICES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
