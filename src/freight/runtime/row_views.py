"""Rows of a micro-batch indexed in a pool of pages, for each size that heads have in layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from freight.kernels.paged import loops_attend
from freight.memory.kv_cache import KVCache
from freight.model.attention import attends_without_scores
from freight.model.batch import RowKey, RowSpan
from freight.model.config import ModelConfig
from freight.model.heads import Heads
from freight.model.kv_view import KVView, Stem, index_rows, index_stem

__all__ = ["RowIndexer", "Views"]

Views = Mapping[Heads, KVView]
"""Of the same rows, for each size that heads have in layers; none where there is nothing."""


class RowIndexer:
    """``whole_heads`` are those of layers that keep all keys, ``window_heads`` those of layers that
    keep the last window of them, where any do."""

    def __init__(
        self, config: ModelConfig, kv_cache: KVCache, *, dtype: torch.dtype, page_tokens: int
    ) -> None:
        self._config = config
        self._kv = kv_cache
        self._dtype = dtype
        self._page_tokens = page_tokens
        rolls = kv_cache.windows is not None
        attending = [i for i in range(config.num_layers) if config.attends(i)]
        rolling = {i for i in attending if rolls and config.has_window(i)}
        self.whole_heads, self.window_heads = (
            [*dict.fromkeys(config.heads(i) for i in attending if (i in rolling) == rolled)]
            for rolled in (False, True)
        )

    def index(
        self,
        spans: Sequence[RowSpan],
        tables: Sequence[Sequence[int]],
        all_heads: Sequence[Heads],
        *,
        start: int,
        device: torch.device,
        copies: Sequence[tuple[int, RowSpan, Sequence[int]]] = (),
        stems: Mapping[RowKey, Sequence[RowSpan]] = MappingProxyType({}),
        stems_start: int = 0,
    ) -> Views:
        """Rows whose pages are ``tables``, as :func:`index_rows` has it; ``stems`` are the rows by
        what they begin with, and q begins with token ``stems_start`` of the micro-batch."""
        if not (spans or copies or stems):
            return {}
        config, dtype = self._config, self._dtype
        return {
            heads: index_rows(
                spans,
                tables,
                start=start,
                page_tokens=self._page_tokens,
                num_heads=config.most_query_heads,
                num_kv_heads=heads.num_kv,
                head_dim=heads.width,
                element_bytes=dtype.itemsize,
                device=device,
                copies=copies,
                stems=[
                    self._stem(key, own, stems_start, heads, device) for key, own in stems.items()
                ],
                share_of_keys=config.attended_share,
                by_loop=loops_attend(device, heads.width, dtype, config.kv_format),
                without_scores=attends_without_scores(device, dtype, heads.width),
            )
            for heads in all_heads
        }

    def _stem(
        self,
        prefix: RowKey,
        spans: Sequence[RowSpan],
        start: int,
        heads: Heads,
        device: torch.device,
    ) -> Stem:
        return index_stem(
            spans,
            self._kv.rows[prefix].pages,
            start=start,
            page_tokens=self._page_tokens,
            num_kv_heads=heads.num_kv,
            device=device,
        )
