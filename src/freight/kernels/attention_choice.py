"""Which way this CPU attends the queries of prompts faster: by our loop, or by torch's own kernel,
which has better products where there are tiles for them."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from freight.kernels.paged import attend_queries
from freight.kernels.pages import Pages
from freight.kernels.trial import best_times

__all__ = ["loop_attends_faster"]


class _Heads(NamedTuple):
    """What is tried: so many tokens of heads that share keys, so wide."""

    tokens: int
    sharing: int
    width: int


_HEADS: Final = 16
_NARROW: Final = _Heads(tokens=512, sharing=4, width=64)
_WIDE: Final = _Heads(tokens=256, sharing=16, width=576)
"""Latents, of which there is one for all heads."""
_MOST_NARROW: Final = 256
_TRIES: Final = 5
_TIMES_SLOWER: Final = 1.1
"""That the loop may be: torch's kernel takes memory for keys of every head."""


def loop_attends_faster(dtype: torch.dtype, width: int) -> bool:
    """Whether ``attend_queries`` is faster for a row of queries, keys and values in a type, of
    heads that are so wide: tried on one thread. False where it has no loop."""
    return _is_faster(dtype, _NARROW if width <= _MOST_NARROW else _WIDE)


@cache
def _is_faster(dtype: torch.dtype, own: _Heads) -> bool:
    kv_heads = _HEADS // own.sharing
    numbers = 2 * kv_heads * own.tokens * own.width
    pages = Pages(
        raw=torch.zeros(1, numbers * dtype.itemsize, dtype=torch.uint8),
        num_heads=kv_heads,
        page_tokens=own.tokens,
        width=own.width,
        dtype=dtype,
    )
    q = torch.ones(own.tokens, _HEADS, own.width, dtype=dtype)
    out = torch.empty_like(q)
    rows, zero = torch.arange(kv_heads), torch.zeros(1, dtype=torch.long)

    def by_loop(turn: int) -> bool:
        return attend_queries(q, pages, rows, zero, out, scale=1.0, softcap=None, window=None)

    def by_torch(turn: int) -> None:
        k, v = (pages.rows[0, kind].repeat_interleave(own.sharing, 0)[None] for kind in range(2))
        found = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)
        out.copy_(found[0].transpose(0, 1))

    if not by_loop(0):
        return False
    ours, others = best_times((by_loop, by_torch), _TRIES)
    return ours <= others * _TIMES_SLOWER
