"""Attention of new tokens on what each rank has of their queries, and of the keys so far.

Rows are a rectangle here: each brings up to L tokens, what is behind its own is padding, which
nothing attends to and whose results nobody reads. Which rows and heads a rank has is read from the
layouts. Prompts are attended by torch's fused attention, which keeps no scores; single tokens, and
scores that are capped, in the open. Knows no mesh axis by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Final

import torch
import torch.nn.functional as F

from freight.distributed.tensor.cache import KVCache
from freight.distributed.tensor.moves import own_range
from freight.distributed.tensor.plain import wide
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.vectors import HeadNorm, Vectors
from freight.model.rope_config import RopeConfig
from freight.model.switches import ModelConfig
from freight.partition.layout import Layout
from freight.partition.sharded import Compute

__all__ = ["MOST_SCORES", "Attention", "Rows", "is_fused_attention"]

MOST_SCORES: Final = 1 << 23
"""Scores, or marks of what is hidden, that are there at once: rows, or queries of one row, are
attended in groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What the rows of a call bring: ``num_new`` [B] tokens of ``width`` after ``kv_lens`` [B]
    earlier ones; ``angles`` are cosines and sines [B, L, rotary/2] of each way in which positions
    are rotated. They are the rows ``seats`` [B] of the cache; None: all of them. ``is_fresh``: none
    has earlier tokens."""

    width: int
    num_new: torch.Tensor
    kv_lens: torch.Tensor
    seats: torch.Tensor | None = None
    angles: Mapping[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    is_fresh: bool = False

    def own(self, rows: range) -> Rows:
        """Some of them."""
        part = slice(rows.start, rows.stop)
        return replace(
            self,
            num_new=self.num_new[part],
            kv_lens=self.kv_lens[part],
            seats=None if self.seats is None else self.seats[part],
            angles={rope: (cos[part], sin[part]) for rope, (cos, sin) in self.angles.items()},
        )

    @property
    def real(self) -> torch.Tensor:
        """[B, L]: no padding."""
        places = torch.arange(self.width, device=self.num_new.device)
        return places < self.num_new[:, None]


class Attention:
    """Of one layer. Without a ``cache`` new tokens attend to each other only."""

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        rows: Rows,
        *,
        layer: int = 0,
        cache: KVCache | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._rows = rows
        self._layer = layer
        self._cache = cache

    def real(self, index: int, cut: str) -> torch.Tensor:
        """Which tokens of the rows that an own rank has are no padding."""
        return self._rows_of(self._ranks.own[index], cut).real

    def attend(self, step: Compute, queries: Parts, keys: Parts, vectors: Vectors) -> Parts:
        """Queries [B, L, H, D] over keys and values [B, L, J, K, D]; the result lies as the
        queries. ``vectors`` has norms of heads and their sinks."""
        made = []
        for index, rank in enumerate(self._ranks.own):
            rows = self._rows_of(rank, step.layouts[0].cut("B"))
            own, others = self._heads(rank, step.layouts)
            norms = {name: vectors.heads.get(name) for name in ("queries", "keys")}
            q, new = queries[index], keys[index].clone()
            if (limit := self._config.qkv_limit) is not None:
                q, new = q.clamp(-limit, limit), new.clamp_(-limit, limit)
            q = self._grown(self._turned(q, rows, norms["queries"], own), rows)
            new[:, :, 0] = self._turned(new[:, :, 0], rows, norms["keys"], others)
            heads = self._heads_of_keys(own, others)
            sinks = vectors.sinks
            sinks = None if sinks is None else sinks[own.start : own.stop]
            if self._cache is None:
                kept = new.permute(2, 0, 3, 1, 4)
            else:
                kept = self._cache.append(
                    self._layer, index, new, rows.kv_lens, rows.real, rows.seats
                )
            made.append(self._attended(q, kept, heads, rows, sinks))
        return made

    def _rows_of(self, rank: int, cut: str) -> Rows:
        return self._rows.own(own_range(self._ranks.mesh, rank, len(self._rows.num_new), cut))

    def _turned(
        self, x: torch.Tensor, rows: Rows, norm: HeadNorm | None, heads: range
    ) -> torch.Tensor:
        """Heads [B, L, H, D], which are those ``heads`` of all, normalised where the model does
        that, rotated by position."""
        c, rope = self._config, self._config.ropes[self._layer]
        own = None if norm is None else norm.of(heads)
        if own is not None and c.qk_norm != "per_rotated_head":
            x = _normed(c, x, own)
        if rope is not None:
            cos, sin = (angles[:, :, None] for angles in rows.angles[rope])
            x = _rotated(x, cos, sin, pairs=rope.pairs)
        if own is not None and c.qk_norm == "per_rotated_head":
            x = _normed(c, x, own)
        return _normed(c, x) if c.qk_norm == "rotated" and rope is not None else x

    def _grown(self, q: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Queries [B, L, H, D] by their positions, where these count."""
        own = self._config.query_growth
        if own is None or own.rate is None:
            return q
        places = rows.kv_lens[:, None] + torch.arange(rows.width, device=q.device)
        times = places.div(own.span, rounding_mode="floor").to(wide(q).dtype).log1p()
        return q * (1 + own.rate * times).to(q.dtype)[..., None, None]

    def _heads(self, rank: int, layouts: tuple[Layout, ...]) -> tuple[range, range]:
        """Those of queries and of keys that a rank has."""
        c, mesh = self._config, self._ranks.mesh
        return (
            own_range(mesh, rank, c.num_heads, layouts[0].cut("H")),
            own_range(mesh, rank, c.num_kv_heads, layouts[1].cut("K")),
        )

    def _heads_of_keys(self, heads: range, others: range) -> list[int]:
        """For each head of a rank's queries the head of its keys."""
        shared = self._config.num_heads // self._config.num_kv_heads
        return [head // shared - others.start for head in heads]

    def _attended(
        self,
        q: torch.Tensor,
        kept: torch.Tensor,
        heads: list[int],
        rows: Rows,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over ``kept`` [J, B, K, S, D], of which each row sees as many as it has."""
        out = torch.empty_like(q)
        if not len(q):
            return out
        used, count = sorted(set(heads)), len(heads)
        shared, rest = divmod(count, len(used))
        if not rest and all(heads[i] == used[i // shared] for i in range(count)):
            keys, values = kept[:, :, used[0] : used[-1] + 1]
        else:  # groups that are not equally large: each head gets its keys
            keys, values = kept[:, :, heads]
        width, length = q.shape[1], keys.shape[2]
        is_fused = is_fused_attention(self._config, width)
        if is_fused and rows.is_fresh and self._sees_all(length):
            return _fused(q, keys, values, self._config.attention_scale)
        attended = self._hiding if is_fused else partial(self._group, sinks=sinks)
        each = length if is_fused else count * length
        together = max(1, MOST_SCORES // (width * each))
        queries = max(1, min(width, MOST_SCORES // each))
        for first, begin in product(range(0, len(q), together), range(0, width, queries)):
            some, new = slice(first, first + together), slice(begin, begin + queries)
            out[some, new] = attended(
                q[some, new], keys[some], values[some], rows.kv_lens[some] + begin
            )
        return out

    def _sees_all(self, num_keys: int) -> bool:
        window = self._config.sliding_windows[self._layer]
        return window is None or window >= num_keys

    def _hidden(self, kv_lens: torch.Tensor, width: int, num_keys: int) -> torch.Tensor:
        """[R, L, S]: keys that new tokens behind ``kv_lens`` [R] earlier ones do not see."""
        places = kv_lens[:, None] + torch.arange(width, device=kv_lens.device)
        others = torch.arange(num_keys, device=kv_lens.device)
        hidden = others > places[..., None]
        window = self._config.sliding_windows[self._layer]
        if window is not None:
            hidden |= others <= places[..., None] - window
        return hidden

    def _hiding(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kv_lens: torch.Tensor
    ) -> torch.Tensor:
        seen = self._hidden(kv_lens, q.shape[1], keys.shape[2]).logical_not_()[:, None]
        return _fused(q, keys, values, self._config.attention_scale, seen)

    def _group(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_lens: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        R, L, H, D = q.shape
        K, S = keys.shape[1:3]
        grouped = q.view(R, L, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(R, K, -1, D)
        scores = (grouped * self._config.attention_scale) @ keys.transpose(2, 3)
        cap = self._config.attention_softcap
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        hidden = self._hidden(kv_lens, L, S)
        scores = scores.view(R, K, H // K, L, S)
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        if sinks is None:
            shares = torch.softmax(scores, dim=-1)
        else:
            shares = _shares_beside(scores, sinks.view(K, H // K, 1))
        found = shares.view(R, K, -1, S) @ values
        return found.view(R, K, H // K, L, D).permute(0, 3, 1, 2, 4).reshape(R, L, H, D)


def _shares_beside(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Of scores [R, K, H / K, L, S], in place, what a softmax makes of them and of a score of each
    head, [K, H / K, 1], that gives nothing."""
    top = torch.maximum(scores.amax(dim=-1), sinks.to(scores.dtype))
    scores.sub_(top[..., None]).exp_()
    total = scores.sum(dim=-1, dtype=wide(top).dtype) + torch.exp(sinks - wide(top))
    return scores.div_(total[..., None])


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, pairs: bool) -> torch.Tensor:
    """Heads [..., D] by angles [..., rotary/2]: neighbours together with ``pairs``, else an element
    of the first half with one of the second."""
    size = 2 * cos.shape[-1]
    own, rest = x[..., :size], x[..., size:]
    low, high = (own[..., ::2], own[..., 1::2]) if pairs else own.chunk(2, dim=-1)
    both = low * cos - high * sin, high * cos + low * sin
    made = torch.stack(both, dim=-1).flatten(-2) if pairs else torch.cat(both, dim=-1)
    return torch.cat((made, rest), dim=-1)


def _normed(config: ModelConfig, x: torch.Tensor, norm: HeadNorm | None = None) -> torch.Tensor:
    """Heads [..., H, D], each by itself; by its root mean square alone without a ``norm``."""
    numbers = wide(x)
    if norm is not None and config.has_centred_norms:
        numbers = numbers - numbers.mean(dim=-1, keepdim=True)
    mean = numbers.square().mean(dim=-1, keepdim=True)
    numbers = numbers * torch.rsqrt(mean + config.norm_eps)
    if norm is not None:
        numbers = numbers * norm.gain
        numbers = numbers if norm.bias is None else numbers + norm.bias
    return numbers.to(x.dtype)


def is_fused_attention(config: ModelConfig, width: int) -> bool:
    """Whether rows of ``width`` new tokens are attended without their scores being kept."""
    return width > 1 and config.attention_softcap is None and not config.attention_sinks


def _fused(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [R, L, H, D] over keys and values [R, K, S, D]; without ``seen`` [R, 1, L, S] each token
    sees those up to its own place."""
    shared = q.shape[2] // keys.shape[1]
    # On a device there is a kernel for heads that share keys of 16 bits without a mask, else none.
    is_grouped = q.device.type == "cpu" or (seen is None and q.dtype.itemsize == 2)
    if shared > 1 and not is_grouped:
        keys, values = (x.repeat_interleave(shared, dim=1) for x in (keys, values))
    found = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys,
        values,
        attn_mask=seen,
        is_causal=seen is None,
        scale=scale,
        enable_gqa=shared > 1 and is_grouped,
    )
    return found.transpose(1, 2)
