"""Which way this CPU attends the queries of prompts faster: by our loop, or by torch's own kernel,
which has better products where there are tiles for them."""

from __future__ import annotations

import time
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F

from freight.kernels.paged import attend_queries
from freight.kernels.pages import Pages

__all__ = ["loop_attends_faster"]

_TOKENS: Final = 256
_HEADS: Final = 8
_SHARING: Final = 4
_WIDTH: Final = 64
_TRIES: Final = 5


@cache
def loop_attends_faster(dtype: torch.dtype) -> bool:
    """Whether ``attend_queries`` is faster for a row of queries, keys and values in a type: tried
    on one thread. False where it has no loop."""
    kv_heads = _HEADS // _SHARING
    numbers = 2 * kv_heads * _TOKENS * _WIDTH
    pages = Pages(
        raw=torch.zeros(1, numbers * dtype.itemsize, dtype=torch.uint8),
        num_heads=kv_heads,
        page_tokens=_TOKENS,
        width=_WIDTH,
        dtype=dtype,
    )
    q = torch.ones(_TOKENS, _HEADS, _WIDTH, dtype=dtype)
    out = torch.empty_like(q)
    rows, zero = torch.arange(kv_heads), torch.zeros(1, dtype=torch.long)

    def by_loop() -> bool:
        return attend_queries(q, pages, rows, zero, out, scale=1.0, softcap=None, window=None)

    def by_torch() -> bool:
        k, v = (pages.rows[0, kind].repeat_interleave(_SHARING, dim=0)[None] for kind in range(2))
        found = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)
        out.copy_(found[0].transpose(0, 1))
        return True

    best = [float("inf")] * 2
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if not by_loop():
            return False
        for _ in range(_TRIES):
            for number, way in enumerate((by_loop, by_torch)):
                started_s = time.perf_counter()
                way()
                best[number] = min(best[number], time.perf_counter() - started_s)
    finally:
        torch.set_num_threads(num_threads)
    return best[0] < best[1]
