"""Keys and values of one layer in pages: how they lie in memory.

A page has the keys of all heads, then their values, unless these are the same; those of a head in
the order of its tokens: plain numbers, or integers in groups that lie within a head. What a page
has beyond is unused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freight.model.number_format import Grouped

__all__ = ["Pages"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """``raw`` is uint8 [pages, bytes of a page]. ``dtype`` is what is computed with, and what is
    kept where there is no ``number_format``. With ``keys_alone`` they are the values, too."""

    raw: torch.Tensor
    num_heads: int
    page_tokens: int
    width: int
    dtype: torch.dtype
    number_format: Grouped | None = None
    keys_alone: bool = False

    @property
    def num_parts(self) -> int:
        """Keys and values, or keys."""
        return 1 if self.keys_alone else 2

    @property
    def heads_to_values(self) -> int:
        """How many heads' keys lie between a head's keys and its values."""
        return 0 if self.keys_alone else self.num_heads

    @property
    def token_bytes(self) -> int:
        """Of one token's keys, or values, of one head."""
        if self.number_format is None:
            return self.width * self.dtype.itemsize
        return self.number_format.row_bytes(self.width)

    @property
    def rows(self) -> torch.Tensor:
        """[pages, parts, heads, tokens, numbers of a head], or bytes where they are compressed."""
        parts, heads = self.num_parts, self.num_heads
        used = self.raw[:, : parts * heads * self.page_tokens * self.token_bytes]
        kept = used.view(self.dtype) if self.number_format is None else used
        return kept.view(len(kept), parts, heads, self.page_tokens, -1)
