"""Which way this CPU attends the queries of prompts faster: by our loop, or by torch's own kernel,
which has better products where there are tiles for them."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F

from freight.kernels.paged import attend_queries
from freight.kernels.pages import Pages
from freight.kernels.trial import best_times

__all__ = ["loop_attends_faster"]

_TOKENS: Final = 512
_HEADS: Final = 16
_SHARING: Final = 4
_WIDTH: Final = 64
_TRIES: Final = 5
_TIMES_SLOWER: Final = 1.1
"""That the loop may be: torch's kernel takes memory for keys of every head."""


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

    def by_loop(turn: int) -> bool:
        return attend_queries(q, pages, rows, zero, out, scale=1.0, softcap=None, window=None)

    def by_torch(turn: int) -> None:
        k, v = (pages.rows[0, kind].repeat_interleave(_SHARING, dim=0)[None] for kind in range(2))
        found = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)
        out.copy_(found[0].transpose(0, 1))

    if not by_loop(0):
        return False
    own, other = best_times((by_loop, by_torch), _TRIES)
    return own <= other * _TIMES_SLOWER
