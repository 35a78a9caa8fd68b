"""The CPU's loops beside the best that plain torch has for the same: medians of alternating turns.

    GOMP_SPINCOUNT=10000 python benchmarks/kernels.py [--turns 30] [--part products]

Attention: 32 rows, 8 heads of keys of 128, 4 queries each, 1024 tokens or 128 to 998. The loops
read keys and values in pages; torch is given them side by side, which costs it nothing here.
Queries: single ones, each row's over so many keys from memory, by registers of sixteen by sixteen
where there are such, and by vectors; what is read of keys and values in a second is said.
Prompts: rows of so many tokens, each of which sees those before it, 32 heads for 32, 8 or 4 heads
of keys; which way a run takes is said.
Products: tokens of 2048 numbers times 5632 rows, which come from memory, in float32 but where it is
said; whether a run uses the loops for them is said, too.
Integers: tokens and rows in 8 bits, each with a scale, of 2048 numbers times 5632 rows and the
other way round, from codes to results in bfloat16.
Exponents: tokens of either type times rows of bfloat16 of those sizes, plain and with short
exponents. Floats: tokens in bfloat16 times rows of 2880 and of 1152 numbers, plain, in MXFP4, FP8
and 4-bit integers. Helpers: a hundred calls of so many threads that have nothing to do, beside a
pool of futures. Threads: attention, and products of tokens in bfloat16, on so many threads, by
Python's and by OpenMP's. Blocks: tokens of 2048 numbers times a gate of 5632 rows and as many more,
as a run has it, and without the loops that lay rows in blocks. The last line is one JSON object, in
milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from freight.kernels import recurrence, sharing
from freight.kernels.attention_choice import loop_attends_faster
from freight.kernels.eights import join_eight_rows
from freight.kernels.exponents import most_spared, shorten
from freight.kernels.grouped import (
    CompressedRows,
    dequantise,
    dequantise_reference,
    quantise,
)
from freight.kernels.integers import (
    IntegerRows,
    IntegerTokens,
    integer_product,
    quantise_rows,
    quantise_tokens,
)
from freight.kernels.levels import join_level_rows
from freight.kernels.micro import join_micro_rows
from freight.kernels.paged import append_rows, attend_queries, attend_single_queries
from freight.kernels.pages import Pages
from freight.kernels.products import Product, can_gate, loops_are_faster, multiply, scratch_values
from freight.kernels.recurrence import convolve, recur
from freight.kernels.row_states import RowStates
from freight.kernels.state_heads import StateHeads
from freight.kernels.team import work_together
from freight.kernels.threads import find_loops
from freight.kernels.tokens import activate
from freight.memory.tier import host_arena
from freight.model.number_format import (
    EIGHT_COLUMNS,
    MICRO_COLUMNS,
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    RowFormat,
    ShortExponents,
    integer_scratch,
)

PARTS = (
    *("dequantise", "attention", "queries", "prompts", "products", "integers"),
    *("exponents", "floats", "states", "helpers", "threads", "blocks"),
)
ROWS, KV_HEADS, SHARING, WIDTH, PAGE = 32, 8, 4, 128, 16
FOUR_BITS = Grouped(bits=4, group_size=64)
SCALE = WIDTH**-0.5
TOKENS = (1, 4, 8, 16, 32, 64, 256, 1024)
EXPONENT_TOKENS = (1, 16, 64, 256, 512, 1024)
FLOAT_TOKENS = (1, 2, 4, 16, 64, 256)
SPREAD_TOKENS = (1, 16, 64, 512)
INTEGER_TOKENS = (16, 64, 256, 512, 1024, 2048)
KINDS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
)
QUERIES = (
    # rows, heads of keys, queries of each, width of a head, tokens
    (64, 4, 8, 64, 136),
    (64, 4, 8, 64, 1024),
    (64, 4, 4, 64, 1024),
    (64, 4, 2, 64, 1024),
    (64, 4, 1, 64, 1024),
    (32, 8, 4, 128, 1024),
    (16, 8, 8, 128, 2048),
    (16, 8, 2, 128, 2048),
    (16, 8, 1, 128, 2048),
    (16, 2, 16, 128, 4096),
)
PROMPTS = (
    # rows, tokens, heads of keys, width of a head
    (16, 128, 4, 64),
    (16, 128, 32, 64),
    (4, 512, 4, 64),
    (4, 512, 8, 128),
    (1, 2048, 8, 128),
)
PROMPT_HEADS = 32
CALLS = 100
Turns = Mapping[str, Callable[[], object]]


def timed(turns: Turns, count: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turn; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(count + 1):
        for name, work in turns.items():
            started_s = time.perf_counter()
            work()
            if number:
                seconds[name].append(time.perf_counter() - started_s)
    return {name: 1e3 * statistics.median(own) for name, own in seconds.items()}


def dequantising() -> Turns:
    """4096 by 4096 from 4 bits to bfloat16."""
    size = 4096
    raw = quantise(torch.randn(size, size), FOUR_BITS)
    rows = CompressedRows(raw=raw, columns=size, number_format=FOUR_BITS)
    outs = [torch.empty(size, size, dtype=torch.bfloat16) for _ in range(3)]
    codes = raw[:, : size // 2].view(size, size // 64, 32)
    factors = raw[:, size // 2 :].view(torch.float16).bfloat16().view(size, 2, size // 64, 1)
    scale, lowest = factors[:, 0].contiguous(), factors[:, 1].contiguous()
    halves = outs[2].view(size, size // 64, 2, 32)

    def in_place() -> None:
        """The best of plain torch: each half of a group written where it belongs."""
        halves[:, :, 0].copy_(codes & 15).mul_(scale).add_(lowest)
        halves[:, :, 1].copy_(codes >> 4).mul_(scale).add_(lowest)

    return {
        "dequantise: loop": lambda: dequantise(rows, outs[0]),
        "dequantise: torch, halves in place": in_place,
        "dequantise: torch reference": lambda: dequantise_reference(rows, outs[1]),
    }


class Attention:
    """Rows of so many tokens, in pages of both kinds and side by side."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = torch.from_numpy(lengths)
        self.is_ragged = len(set(lengths.tolist())) > 1
        longest = int(lengths.max())
        self.num_pages = -(-longest // PAGE)
        self.q = torch.randn(ROWS, KV_HEADS * SHARING, WIDTH).bfloat16()
        shape = (ROWS, KV_HEADS, self.num_pages * PAGE, WIDTH)
        self.k, self.v = (torch.randn(shape).bfloat16() for _ in range(2))
        self.plain, self.codes = (self._pages(kept) for kept in (None, FOUR_BITS))
        table = torch.arange(ROWS * self.num_pages).view(ROWS, 1, -1) * 2 * KV_HEADS
        self.key_rows = (table + torch.arange(KV_HEADS)[:, None]).flatten()
        places = torch.arange(self.num_pages * PAGE)
        self.hidden = (places >= self.lengths[:, None])[:, None, None]

    def _pages(self, kept: Grouped | None) -> Pages:
        size = 2 * WIDTH if kept is None else kept.row_bytes(WIDTH)
        page_bytes = 2 * KV_HEADS * PAGE * size
        arena = host_arena(ROWS * self.num_pages * page_bytes)
        raw = arena.take(ROWS * self.num_pages * page_bytes, "pages").view(-1, page_bytes)
        pages = Pages(
            raw=raw,
            num_heads=KV_HEADS,
            page_tokens=PAGE,
            width=WIDTH,
            dtype=torch.bfloat16,
            number_format=kept,
        )
        tokens = torch.arange(self.num_pages * PAGE)
        for row in range(ROWS):
            own = row * self.num_pages + tokens // PAGE
            k, v = (x[row].transpose(0, 1) for x in (self.k, self.v))
            append_rows(pages, own, tokens % PAGE, k, v)
        return pages

    def loop(self, pages: Pages, share: float = 1.0) -> torch.Tensor:
        out = torch.empty_like(self.q)
        assert attend_single_queries(
            self.q,
            pages,
            self.key_rows,
            self.lengths - 1,
            out,
            scale=SCALE,
            softcap=None,
            window=None,
            share_of_keys=share,
        )
        return out

    def products(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = ROWS * KV_HEADS
        scores = torch.bmm(self.q.view(batch, SHARING, WIDTH), k.flatten(0, 1).transpose(1, 2))
        scores.mul_(SCALE)
        if self.is_ragged:
            scores.view(ROWS, KV_HEADS, SHARING, -1).masked_fill_(self.hidden, float("-inf"))
        found = torch.bmm(torch.softmax(scores, -1), v.flatten(0, 1))
        return found.view(ROWS, KV_HEADS * SHARING, WIDTH)

    def fused(self) -> torch.Tensor:
        q = self.q.view(ROWS, KV_HEADS, SHARING, WIDTH)
        mask = ~self.hidden if self.is_ragged else None
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask).flatten(1, 2)

    def plain_first(self) -> torch.Tensor:
        """All of it made plain by torch, then the products."""
        kept = self.codes.rows.view(ROWS, self.num_pages, 2, KV_HEADS, PAGE, -1)
        parts = []
        for place in range(2):
            raw = kept[:, :, place].transpose(1, 2).reshape(-1, kept.shape[-1])
            plain = torch.empty(len(raw), WIDTH, dtype=torch.bfloat16)
            rows = CompressedRows(raw=raw, columns=WIDTH, number_format=FOUR_BITS)
            dequantise_reference(rows, plain)
            parts.append(plain.view(self.k.shape))
        return self.products(*parts)

    def turns(self, name: str) -> Turns:
        torch.testing.assert_close(
            self.loop(self.plain), self.products(self.k, self.v), rtol=0.05, atol=0.01
        )
        torch.testing.assert_close(self.loop(self.codes), self.plain_first(), rtol=0.05, atol=0.01)
        return {
            f"{name}: loop, bfloat16": lambda: self.loop(self.plain),
            f"{name}: loop, 4 bits": lambda: self.loop(self.codes),
            f"{name}: loop, 4 bits, a tenth": lambda: self.loop(self.codes, 0.1),
            f"{name}: torch, products": lambda: self.products(self.k, self.v),
            f"{name}: torch, fused": self.fused,
            f"{name}: torch, 4 bits made plain first": self.plain_first,
        }


def attending_queries(rows: int, kv_heads: int, sharing: int, width: int, tokens: int) -> Turns:
    """Single queries of each row over keys that lie in pages, in no order, in such memory as a run
    has."""
    num_pages, page_bytes = -(-tokens // PAGE), 4 * kv_heads * PAGE * width
    raw = host_arena(rows * num_pages * page_bytes).take(rows * num_pages * page_bytes, "KV cache")
    raw.view(torch.bfloat16).normal_()
    pages = Pages(
        raw=raw.view(rows * num_pages, page_bytes),
        num_heads=kv_heads,
        page_tokens=PAGE,
        width=width,
        dtype=torch.bfloat16,
    )
    order = torch.randperm(rows * num_pages).view(rows, 1, -1) * 2 * kv_heads
    key_rows = (order + torch.arange(kv_heads)[:, None]).flatten()
    q = torch.randn(rows, kv_heads * sharing, width).bfloat16()
    earlier, outs = torch.full((rows,), tokens - 1), torch.empty(2, *q.shape, dtype=q.dtype)
    loops = find_loops()
    tiles = None if loops is None else loops.pair_queries

    def attend(out: torch.Tensor, least: int) -> None:
        with ExitStack() as stack:
            if tiles is not None:
                stack.enter_context(patch.object(tiles, "LEAST_QUERIES", least))
            assert attend_single_queries(
                *(q, pages, key_rows, earlier, out),
                scale=width**-0.5,
                softcap=None,
                window=None,
                share_of_keys=1.0,
            )

    attend(outs[0], 1)
    attend(outs[1], sharing + 1)
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.02)
    name = f"{rows} rows, {kv_heads} x {sharing} queries of {width}, {tokens} keys"
    return {
        f"{name}: registers of sixteen": lambda: attend(outs[0], 1),
        f"{name}: vectors": lambda: attend(outs[1], sharing + 1),
    }


def attending_prompts(
    rows: int, tokens: int, kv_heads: int, width: int, dtype: torch.dtype
) -> Turns:
    """Prompts' attention by the loop, over pages, and by torch, over keys side by side."""
    num_pages, scale = -(-tokens // PAGE), width**-0.5
    size = 2 * kv_heads * PAGE * width * dtype.itemsize
    pages = Pages(
        raw=torch.zeros(rows * num_pages, size, dtype=torch.uint8),
        num_heads=kv_heads,
        page_tokens=PAGE,
        width=width,
        dtype=dtype,
    )
    q = torch.randn(rows * tokens, PROMPT_HEADS, width).to(dtype)
    k, v = (torch.randn(rows * tokens, kv_heads, width).to(dtype) for _ in range(2))
    places = torch.arange(tokens).repeat(rows)
    own = torch.arange(rows).repeat_interleave(tokens) * num_pages + places // PAGE
    append_rows(pages, own, places % PAGE, k, v)
    table = torch.arange(rows * num_pages).view(rows, 1, -1) * 2 * kv_heads
    key_rows = (table + torch.arange(kv_heads)[:, None]).flatten()
    earlier, outs = torch.zeros(rows, dtype=torch.long), torch.empty(2, *q.shape, dtype=dtype)

    def loop() -> None:
        assert attend_queries(
            q, pages, key_rows, earlier, outs[0], scale=scale, softcap=None, window=None
        )

    def fused() -> None:
        wide, *both = (x.view(rows, tokens, -1, width).transpose(1, 2) for x in (q, k, v))
        own = [x.repeat_interleave(PROMPT_HEADS // kv_heads, dim=1) for x in both]
        found = F.scaled_dot_product_attention(wide, *own, is_causal=True, scale=scale)
        outs[1].view(rows, tokens, -1, width).copy_(found.transpose(1, 2))

    loop()
    fused()
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.02)
    name = f"{rows} x {tokens} tokens, {kv_heads} heads of {width}, {str(dtype)[6:]}"
    return {f"{name}: loop": loop, f"{name}: torch, fused": fused}


def pack(rows: torch.Tensor, bits: int) -> CompressedRows:
    own = Grouped(bits=bits, group_size=64)
    return CompressedRows(raw=quantise(rows, own), columns=rows.shape[1], number_format=own)


def multiplying(num_tokens: int) -> Turns:
    """Tokens times rows that no cache holds: eight matrices in turn."""
    columns, num_rows, copies = 2048, 5632, 8
    wide = [torch.randn(num_rows, columns) for _ in range(copies)]
    narrow = [rows.bfloat16() for rows in wide]
    x, out = torch.randn(num_tokens, columns), torch.empty(num_tokens, num_rows)
    x_narrow, out_narrow = x.bfloat16(), out.bfloat16()
    packed = {bits: [pack(rows, bits) for rows in wide] for bits in (4, 8)}
    scratch, turn = torch.empty(scratch_values(columns, x.dtype)), itertools.count()
    scratch_narrow = torch.empty(scratch_values(columns, x_narrow.dtype), dtype=x_narrow.dtype)

    def by_loops(matrices: list[torch.Tensor]) -> None:
        own = matrices[next(turn) % copies]
        multiply(x, [Product(rows=own, out=out)], lambda size: scratch[:size])

    def by_codes(bits: int) -> None:
        own = Product(rows=packed[bits][next(turn) % copies], out=out)
        multiply(x, [own], lambda size: scratch[:size])

    def narrow_by_loops() -> None:
        own = Product(rows=narrow[next(turn) % copies], out=out_narrow)
        multiply(x_narrow, [own], lambda size: scratch_narrow[:size])

    def by_torch() -> None:
        torch.mm(x, wide[next(turn) % copies].t(), out=out)

    def all_narrow() -> None:
        torch.mm(x_narrow, narrow[next(turn) % copies].t(), out=out_narrow)

    turns: dict[str, Callable[[], object]] = {
        "a run's way": lambda: by_loops(wide),
        "a run's way, rows in bfloat16": lambda: by_loops(narrow),
        "a run's way, all in bfloat16": narrow_by_loops,
        "a run's way, rows in 4 bits": lambda: by_codes(4),
        "a run's way, rows in 8 bits": lambda: by_codes(8),
        "torch": by_torch,
    }
    if num_tokens <= 256:
        turns["torch, all in bfloat16"] = all_narrow
    return {f"{num_tokens} tokens: {name}": work for name, work in turns.items()}


def multiplying_integers(num_tokens: int, columns: int, num_rows: int) -> Turns:
    """Likewise of tokens and rows as 8-bit integers, twelve matrices in turn."""
    copies, turn = 12, itertools.count()
    wide = torch.randn(num_rows, columns)
    raw, narrow = quantise_rows(wide), wide.bfloat16()
    matrices = [IntegerRows(raw=raw.clone(), columns=columns) for _ in range(copies)]
    plain = [narrow.clone() for _ in range(copies)]
    x, out = (
        torch.randn(num_tokens, columns).bfloat16(),
        torch.empty(num_tokens, num_rows).bfloat16(),
    )
    tokens = IntegerTokens(
        codes=torch.empty(x.shape, dtype=torch.int8), scales=torch.empty(num_tokens)
    )
    quantise_tokens(x, tokens)
    sums = torch.empty(integer_scratch(num_tokens, num_rows, columns), dtype=torch.int32)
    scratch = torch.empty(scratch_values(columns, x.dtype), dtype=x.dtype)

    def by_integers() -> None:
        integer_product(tokens, matrices[next(turn) % copies], None, out, sums, adds=False)

    def by_torch() -> None:
        with patch("freight.kernels.integers.multiply_in_tiles", lambda *_, **__: False):
            by_integers()

    def in_bfloat16() -> None:
        own = Product(rows=plain[next(turn) % copies], out=out)
        multiply(x, [own], lambda size: scratch[:size])

    name = f"{num_tokens} tokens, {columns} x {num_rows}"
    return {
        f"{name}: integers, a run's way": by_integers,
        f"{name}: integers, torch": by_torch,
        f"{name}: bfloat16, a run's way": in_bfloat16,
    }


def gating(num_tokens: int) -> Turns:
    """Tokens times a gate's rows and as many more, with the gate's silu: eight matrices in turn, in
    memory as a run has them."""
    columns, num_rows, copies, dtype = 2048, 5632, 8, torch.bfloat16

    def lying(*shape: int) -> torch.Tensor:
        size = 2 * math.prod(shape)
        return host_arena(size).take(size, "values").view(dtype).view(shape)

    plain = [lying(num_rows, columns).copy_(torch.randn(num_rows, columns)) for _ in range(copies)]
    kinds: dict[str, Sequence[torch.Tensor | CompressedRows]] = {
        "plain": plain,
        "4 bits": [pack(rows.float(), 4) for rows in plain],
        "short exponents": [short_rows(rows)["short"] for rows in plain],
    }
    x = lying(num_tokens, columns).copy_(torch.randn(num_tokens, columns))
    outs = [lying(num_tokens, num_rows) for _ in range(2)]
    scratch, turn = lying(scratch_values(columns, dtype)), itertools.count()

    def two(rows: Sequence[torch.Tensor | CompressedRows]) -> list[Any]:
        number = 2 * next(turn)
        return [rows[number % copies], rows[(number + 1) % copies]]

    def a_run(rows: Sequence[torch.Tensor | CompressedRows]) -> None:
        gate, other = two(rows)
        own = [Product(rows=gate, out=outs[0]), Product(rows=other, out=outs[0], gates=True)]
        if can_gate(x, own):
            multiply(x, own, lambda size: scratch[:size])
            return
        own[1] = Product(rows=other, out=outs[1])
        multiply(x, own, lambda size: scratch[:size])
        activate(outs[0], "silu", outs[1])

    def without_blocks(rows: Sequence[torch.Tensor | CompressedRows]) -> None:
        loops = find_loops()
        assert loops is not None
        with patch("freight.kernels.pairs.find_loops", lambda: replace(loops, tile_blocks=None)):
            a_run(rows)

    def by_torch() -> None:
        for rows, out in zip(two(plain), outs, strict=True):
            torch.mm(x, rows.t(), out=out)
        F.silu(outs[0], inplace=True).mul_(outs[1])

    name = f"{num_tokens} tokens, gated"
    found: dict[str, Callable[[], object]] = {f"{name}: plain, torch": by_torch}
    for kind, rows in kinds.items():
        found[f"{name}: {kind}, a run's way"] = partial(a_run, rows)
        found[f"{name}: {kind}, without blocks"] = partial(without_blocks, rows)
    return found


def short_rows(rows: torch.Tensor) -> dict[str, CompressedRows]:
    """With short exponents."""
    own = ShortExponents(spare=most_spared(rows))
    raw = shorten(rows, own)
    return {"short": CompressedRows(raw=raw, columns=rows.shape[1], number_format=own)}


def float_rows(rows: torch.Tensor) -> dict[str, CompressedRows]:
    """As many numbers in MXFP4, FP8, NVFP4 and NF4, of any size near one; and in 4 bits."""
    count, columns = rows.shape
    fours = torch.randint(0, 256, (count, columns // 2), dtype=torch.uint8)
    exponents = torch.randint(118, 126, (count, columns // MICRO_COLUMNS), dtype=torch.uint8)
    eights = torch.randn(count, columns).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(count, -(-columns // EIGHT_COLUMNS))
    codes = torch.randint(0, 16, (count, columns), dtype=torch.uint8)
    sixteens = LevelFloats(levels="e2m1", group_size=16, in_bytes=True)
    blocks = LevelFloats(levels="nf4", group_size=64)
    bytes_ = torch.rand(count, columns // 16).to(torch.float8_e4m3fn).view(torch.uint8)
    kept: tuple[tuple[RowFormat, torch.Tensor], ...] = (
        (sixteens, join_level_rows(codes, bytes_, torch.rand(count))),
        (blocks, join_level_rows(codes, torch.rand(count, columns // 64))),
        (MicroFloats(), join_micro_rows(fours, exponents)),
        (EightFloats(), join_eight_rows(eights, scales)),
    )
    found = {
        own.name: CompressedRows(raw=raw, columns=columns, number_format=own) for own, raw in kept
    }
    return {**found, "4 bits": pack(rows.float(), 4)}


def multiplying_kept(
    num_tokens: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    keep: Callable[[torch.Tensor], Mapping[str, CompressedRows]],
) -> Turns:
    """Plain rows, and what else they are kept as, twelve matrices of each in turn."""
    copies, turn, (columns, num_rows) = 12, itertools.count(), shape
    rows = torch.randn(num_rows, columns).bfloat16()
    kinds: dict[str, list[torch.Tensor | CompressedRows]] = {
        "plain": [rows.clone() for _ in range(copies)]
    }
    for kind, own in keep(rows).items():
        kinds[kind] = [replace(own, raw=own.raw.clone()) for _ in range(copies)]
    x = torch.randn(num_tokens, columns).to(dtype)
    out = torch.empty(num_tokens, num_rows, dtype=dtype)
    scratch = torch.empty(scratch_values(columns, dtype), dtype=dtype)

    def multiply_by(matrices: list[torch.Tensor | CompressedRows]) -> None:
        product = Product(rows=matrices[next(turn) % copies], out=out)
        multiply(x, [product], lambda size: scratch[:size])

    name = f"{num_tokens} tokens, {columns} x {num_rows}, {str(dtype)[6:]}"
    return {f"{name}: {kind}": partial(multiply_by, matrices) for kind, matrices in kinds.items()}


def changing_states(kind: str, counts: Sequence[int]) -> Turns:
    """Rows of so many tokens through the convolution and the states of a layer: by the gated delta
    rule with 32 heads of 128 by 128 numbers, or by a scan with 64 heads of 128 by 64."""
    is_delta = kind == "delta"
    num_heads, width, key_heads = (32, 128, 16) if is_delta else (64, 64, 1)
    heads = StateHeads(
        num_key_heads=key_heads, num_heads=num_heads, key_width=128, value_width=width
    )
    ends, tokens = np.cumsum(counts), sum(counts)
    rows = RowStates(
        starts=ends - counts,
        counts=np.array(counts),
        seats=np.arange(len(counts)),
        is_new=np.array([count > 1 for count in counts], np.int64),
    )
    columns = 2 * key_heads * 128 + num_heads * width
    x = torch.randn(tokens, columns).bfloat16()
    a, numbers = torch.randn(tokens, num_heads).bfloat16(), torch.randn(num_heads)
    b, skip = (a.flip(0), None) if is_delta else (None, numbers)
    weight, kept = torch.randn(columns, 4), torch.zeros(len(counts), 3, columns).bfloat16()
    memory = torch.zeros(len(counts), num_heads, 128, width)
    out = torch.empty(tokens, num_heads * width).bfloat16()

    def convolved() -> None:
        convolve(x, weight, None, kept, rows)
        x.clamp_(-3, 3)

    def changed() -> None:
        recur(x, a, b, numbers, numbers, skip, memory, out, heads=heads, rows=rows)

    def by_torch() -> None:
        with patch.object(recurrence, "find_loops", lambda: None):
            changed()

    told = f"{kind}, {len(counts)} rows of {counts[0]}"
    return {
        f"{told}: convolution": convolved,
        f"{told}: states by the loop": changed,
        f"{told}: states by torch": by_torch,
    }


def calling(helpers: int) -> Turns:
    """What it costs to hand work over."""
    pool = ThreadPoolExecutor(helpers)

    def nothing() -> None: ...

    def by_futures() -> None:
        for _ in range(CALLS):
            others = [pool.submit(nothing) for _ in range(helpers)]
            nothing()
            for other in others:
                if not other.cancel():
                    other.result()

    def by_team() -> None:
        for _ in range(CALLS):
            work_together(nothing, helpers)

    name = f"{CALLS} calls of {helpers} helpers"
    return {f"{name}: team": by_team, f"{name}: futures": by_futures}


def on_threads(count: int) -> Turns:
    """Of Python, and of OpenMP, which are given all that is worth two of them."""

    def run(work: Callable[[], object], is_team: bool) -> None:
        torch.set_num_threads(count)
        with ExitStack() as stack:
            stack.enter_context(patch.object(sharing, "_MOST_HELPERS", 0))
            if not is_team:
                stack.enter_context(sharing.without_team())
            work()

    found: dict[str, Callable[[], object]] = {}
    kinds = {
        f"{tokens} tokens": multiplying_kept(tokens, (2048, 5632), torch.bfloat16, lambda _: {})
        for tokens in SPREAD_TOKENS
    }
    works = {f"{count} threads, {name}": next(iter(own.values())) for name, own in kinds.items()}
    lengths = np.full(ROWS, 1024)
    works[f"{count} threads, attention"] = next(iter(Attention(lengths).turns("").values()))
    for name, work in works.items():
        found[f"{name}: Python"] = partial(run, work, False)
        found[f"{name}: OpenMP"] = partial(run, work, True)
    return found


def reading(size: int) -> Turns:
    """How fast this memory is read: the ceiling."""
    numbers = torch.ones(size // 4)
    return {"read": lambda: numbers.sum()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30, metavar="N")
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    turns, part = options.turns, options.part
    torch.manual_seed(0)
    found: dict[str, float] = {}
    if part in (None, "dequantise"):
        found |= timed(dequantising(), turns)
    if part in (None, "attention"):
        equal = Attention(np.full(ROWS, 1024))
        ragged = Attention(np.random.default_rng(0).integers(128, 999, ROWS))
        size = equal.plain.raw.numel()
        found |= timed({**equal.turns("equal"), **reading(size)}, turns)
        found |= timed(ragged.turns("ragged"), turns)
        print(f"reading {size / 2**20:.0f} MiB: {size / found['read'] / 1e6:.1f} GB/s")
    if part in (None, "queries"):
        for own in QUERIES:
            rows, kv_heads, _, width, tokens = own
            of_these = timed(attending_queries(*own), turns)
            num_bytes = 4 * rows * kv_heads * width * tokens
            for name, milliseconds in of_these.items():
                print(f"{name}: {num_bytes / milliseconds / 1e6:.1f} GB/s")
            found |= of_these
    if part in (None, "prompts"):
        for dtype in (torch.bfloat16, torch.float32):
            print(f"prompts in {dtype}: by the loop {loop_attends_faster(dtype)}")
            for shape in PROMPTS:
                found |= timed(attending_prompts(*shape, dtype), turns)
    if part in (None, "products"):
        for kept, own in KINDS:
            print(f"rows of {kept}, tokens of {own}: by loops {loops_are_faster(kept, own)}")
        for num_tokens in TOKENS:
            found |= timed(multiplying(num_tokens), min(turns, 3 + 2048 // num_tokens))
    if part in (None, "integers"):
        for num_tokens in INTEGER_TOKENS:
            for columns, num_rows in ((2048, 5632), (5632, 2048)):
                found |= timed(multiplying_integers(num_tokens, columns, num_rows), turns)
    if part in (None, "exponents"):
        shapes = (2048, 5632), (5632, 2048)
        for dtype, shape in itertools.product((torch.bfloat16, torch.float32), shapes):
            for num_tokens in EXPONENT_TOKENS:
                own = multiplying_kept(num_tokens, shape, dtype, short_rows)
                found |= timed(own, turns)
    if part in (None, "floats"):
        for size, num_tokens in itertools.product((2880, 1152), FLOAT_TOKENS):
            own = multiplying_kept(num_tokens, (size, size), torch.bfloat16, float_rows)
            found |= timed(own, turns)
    if part in (None, "states"):
        for kind, counts in itertools.product(("delta", "scan"), ([1] * 64, [512] * 4)):
            found |= timed(changing_states(kind, counts), min(turns, 9))
    if part in (None, "helpers"):
        for helpers in (1, 15):
            found |= timed(calling(helpers), turns)
    if part in (None, "threads"):
        most = torch.get_num_threads()
        for count in sorted({1 << n for n in range(1, most.bit_length())} | {most}):
            found |= timed(on_threads(count), turns)
        torch.set_num_threads(most)
    if part in (None, "blocks"):
        for num_tokens in (512, 1024, 2048):
            found |= timed(gating(num_tokens), min(turns, 12))
    for name, milliseconds in found.items():
        print(f"{name:<62}{milliseconds:8.2f} ms")
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
