"""Attention of a micro-batch's new tokens over paged keys and values.

A pool of pages and a view that indexes it come in. With ``lse`` the log-sum-exp comes out too, so
that parts of one row's keys can be attended apart and merged. Single queries are attended by a
loop, or on devices by a kernel, that reads the pages where they are. Otherwise the keys and values
of some rows are put together first; torch's fused attention does the rest on the CPU where it can,
and scores are computed in the open where they are capped, where their sum is asked for, and on
devices. Compressed keys are used as they are kept, new ones too, so that it does not matter which
sweep brought them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from freight.kernels.paged import append_rows, attend_single_queries, gather_plain
from freight.kernels.pages import Pages
from freight.model.batch import QUERY_BLOCK
from freight.model.kv_view import KVCopy, KVView, RowGroup
from freight.model.programme import Attend
from freight.model.workspace import Workspace

__all__ = ["append", "attend", "merge"]


def append(pool: Pages, view: KVView, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write new keys and values k, v [T, K, H] into their pages."""
    own = KVCopy(start=view.start, token_pages=view.token_pages, token_places=view.token_places)
    for row in (own, *view.copies):
        tokens = slice(row.start, row.start + len(row.token_pages))
        append_rows(pool, row.token_pages, row.token_places, k[tokens], v[tokens])


def attend(
    step: Attend,
    q: torch.Tensor,
    pool: Pages,
    view: KVView,
    out: torch.Tensor,
    workspace: Workspace,
    lse: torch.Tensor | None = None,
) -> None:
    """out [T, N, H] = attention of q [T, N, H] over the view's keys; lse [T, N] where asked for.

    Only the view's tokens of q, out and lse are touched. Causal, with the step's sliding window.
    """
    is_fused = q.device.type == "cpu" and lse is None and step.softcap is None
    for group in view.groups:
        if _attend_in_place(step, q, pool, view.start, group, out, workspace, lse):
            continue
        with workspace.frame():
            keys = _gather(pool, group.key_rows, group, step, workspace)
            values = _gather(pool, group.value_rows, group, step, workspace)
            if is_fused and not _is_sparse(step, group):
                _attend_fused(step, q, keys, values, view.start, group, out)
                continue
            for block in range(0, group.num_queries, QUERY_BLOCK):
                with workspace.frame():
                    _attend_block(
                        step, q, keys, values, view.start, group, block, out, workspace, lse
                    )


def _is_sparse(step: Attend, group: RowGroup) -> bool:
    return group.num_queries == 1 and group.is_made and step.share < 1


def _attend_in_place(
    step: Attend,
    q: torch.Tensor,
    pool: Pages,
    view_start: int,
    group: RowGroup,
    out: torch.Tensor,
    workspace: Workspace,
    lse: torch.Tensor | None,
) -> bool:
    """Single queries, by a loop that reads the pages; False where there is none."""
    if group.num_queries != 1:
        return False
    tokens = slice(view_start + group.start, view_start + group.start + group.num_rows)
    return attend_single_queries(
        q[tokens],
        pool,
        group.key_rows,
        group.kv_lens,
        out[tokens],
        scale=step.scale,
        softcap=step.softcap,
        window=step.window,
        share_of_keys=step.share if group.is_made else 1.0,
        lse=None if lse is None else lse[tokens],
        workspace=workspace,
    )


def _attend_fused(
    step: Attend,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view_start: int,
    group: RowGroup,
    out: torch.Tensor,
) -> None:
    """All queries of a group by torch's own kernel, which holds no scores."""
    R, N, K, H = group.num_rows, step.num_heads, step.num_kv_heads, step.head_dim
    tokens = slice(view_start + group.start, view_start + group.start + R * group.num_queries)
    k_RKSH, v_RKSH = keys.view(R, K, -1, H), values.view(R, K, -1, H)
    if group.num_queries == 1:
        # The heads that share keys are rows of one product.
        found = F.scaled_dot_product_attention(
            q[tokens].view(R, K, N // K, H),
            k_RKSH,
            v_RKSH,
            attn_mask=_seen(group, 0, 1, step.window),
            scale=step.scale,
        )
        out[tokens].view(R, K, N // K, H).copy_(found)
        return
    q_RNQH = q[tokens].view(R, -1, N, H).transpose(1, 2)
    out_RNQH = out[tokens].view(R, -1, N, H).transpose(1, 2)
    whole = group.is_fresh and (step.window is None or step.window >= group.num_keys)
    size = group.num_queries if whole else QUERY_BLOCK
    for first in range(0, group.num_queries, size):
        last = min(first + size, group.num_queries)
        found = F.scaled_dot_product_attention(
            q_RNQH[:, :, first:last],
            k_RKSH,
            v_RKSH,
            attn_mask=None if whole else _seen(group, first, last - first, step.window),
            is_causal=whole,
            scale=step.scale,
            enable_gqa=True,
        )
        out_RNQH[:, :, first:last].copy_(found)


def _seen(group: RowGroup, block: int, num_queries: int, window: int | None) -> torch.Tensor | None:
    mask = _mask(group, block, num_queries, window)
    return None if mask is None else mask.logical_not_()


def _gather(
    pool: Pages, rows: torch.Tensor, group: RowGroup, step: Attend, workspace: Workspace
) -> torch.Tensor:
    """Keys or values of a group, [R·K, S, H]."""
    tokens = pool.page_tokens
    gathered = workspace.take(rows.numel(), tokens * step.head_dim, dtype=pool.dtype)
    with workspace.frame():
        size = 0 if pool.number_format is None else pool.token_bytes
        raw = workspace.take(rows.numel(), tokens, size, dtype=torch.uint8)
        gather_plain(pool, rows, gathered, raw)
    batch = group.num_rows * step.num_kv_heads
    return gathered.view(batch, -1, step.head_dim)[:, : group.num_keys]


def _attend_block(
    step: Attend,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view_start: int,
    group: RowGroup,
    block: int,
    out: torch.Tensor,
    workspace: Workspace,
    lse: torch.Tensor | None,
) -> None:
    """One block of Q queries per row, at ``block`` of the group's queries."""
    R, K, H = group.num_rows, step.num_kv_heads, step.head_dim
    G = step.num_heads // K
    Q = min(QUERY_BLOCK, group.num_queries - block)
    tokens = slice(view_start + group.start, view_start + group.start + R * group.num_queries)

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        """The block of x [T, N, ...] as [R, K, G, Q, ...]."""
        grouped = x[tokens].view(R, group.num_queries, K, G, *x.shape[2:])
        return grouped[:, block : block + Q].permute(0, 2, 3, 1, *range(4, grouped.dim()))

    q_RKGQH = workspace.take(R, K, G, Q, H, dtype=q.dtype)
    q_RKGQH.copy_(heads_first(q))
    scores = workspace.take(R * K, G * Q, group.num_keys, dtype=q.dtype)
    torch.baddbmm(
        scores,
        q_RKGQH.view(R * K, G * Q, H),
        keys.transpose(1, 2),
        beta=0,
        alpha=step.scale,
        out=scores,
    )
    if step.softcap is not None:
        scores.div_(step.softcap).tanh_().mul_(step.softcap)
    mask = _mask(group, block, Q, step.window)
    if mask is not None:
        scores.view(R, K * G, Q, -1).masked_fill_(mask, float("-inf"))
    if _is_sparse(step, group):
        _keep_highest(scores, step.share, group.kv_lens, step.window)
    if lse is not None:
        total = torch.logsumexp(scores.float(), dim=-1).view(R, K, G, Q)
        heads_first(lse).copy_(total)
    weights = workspace.take(*scores.shape, dtype=q.dtype)
    torch.softmax(scores, dim=-1, out=weights)
    torch.bmm(weights, values, out=q_RKGQH.view(R * K, G * Q, H))
    heads_first(out).copy_(q_RKGQH)


def _keep_highest(
    scores: torch.Tensor, share: float, kv_lens: torch.Tensor, window: int | None
) -> None:
    """Of the scores [R·K, G, S] the highest of each query stay, the rest is minus infinity."""
    seen = kv_lens + 1 if window is None else (kv_lens + 1).clamp(max=window)
    keep = (share * seen.double()).ceil().long().clamp(min=1)
    ranks = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    keep = keep.repeat_interleave(len(scores) // len(keep))[:, None, None]
    scores.masked_fill_(ranks >= keep, float("-inf"))


def _mask(group: RowGroup, block: int, num_queries: int, window: int | None) -> torch.Tensor | None:
    """True where a query must not see a key, [R, 1, Q, S]; None where all are seen."""
    if group.num_queries == 1 and not group.is_ragged and window is None:
        return None
    device = group.kv_lens.device
    keys = torch.arange(group.num_keys, device=device)
    queries = torch.arange(block, block + num_queries, device=device)
    places = (group.kv_lens[:, None] + queries)[:, None, :, None]  # [R, 1, Q, 1]
    mask = keys > places
    if window is not None:
        mask |= keys <= places - window
    return mask


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys: outs [T, N, H] with lses [T, N] (float32)."""
    stacked = torch.stack(tuple(lses))
    total = torch.logsumexp(stacked, dim=0)
    shares = torch.exp(stacked - total)[..., None]
    merged = (torch.stack(tuple(out.float() for out in outs)) * shares).sum(dim=0)
    return merged.to(outs[0].dtype), total
