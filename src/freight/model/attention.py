"""Attention of a micro-batch's new tokens over paged keys and values.

A pool of pages and a view that indexes it come in. With ``lse`` the log-sum-exp comes out too, so
that parts of one row's keys can be attended apart and merged. Loops on the CPU, and on devices a
kernel for single queries, read the pages where they are. Otherwise keys and values are put together
first; torch's fused attention does the rest on the CPU where
it can, and on devices for whole prompts in 16 bits; else scores are computed in the open.
Compressed keys are used as they are kept, new ones too, so that it does not matter which sweep
brought them.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from freight.kernels.attention_choice import loop_attends_faster
from freight.kernels.paged import (
    append_rows,
    attend_queries,
    attend_single_queries,
    gather_plain,
)
from freight.kernels.pages import Pages
from freight.model.batch import QUERY_BLOCK
from freight.model.kv_view import KVCopy, KVView, Prompts, RowGroup, Stem
from freight.model.programme import Attend
from freight.model.workspace import Workspace

__all__ = [
    "append",
    "attend",
    "attends_without_scores",
    "fused",
    "gather_both",
    "is_fused",
    "score",
    "sink",
]

_MOST_FUSED: Final = 256
"""Numbers of a head that torch's kernel for devices takes."""


def append(pool: Pages, view: KVView, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write new keys and values k, v [T, K, H] into their pages."""
    own = KVCopy(start=view.start, token_pages=view.token_pages, token_places=view.token_places)
    for row in (own, *view.copies):
        tokens = slice(row.start, row.start + len(row.token_pages))
        if len(row.token_pages):
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
    """out [T, N, H] = attention of q [T, N, H] over the keys of the view's groups; lse [T, N],
    float32, where asked for.

    Only the view's tokens of q, out and lse are touched. Causal, with the step's sliding window.
    """
    fuses = is_fused(step, q.device)
    attended: set[int] = set()
    for prompts in view.prompts:
        if _attend_by_loop(step, q, pool, view.start, prompts, out, lse):
            attended.update(range(prompts.first, prompts.last))
    for number, group in enumerate(view.groups):
        if number in attended:
            continue
        if _attend_in_place(step, q, pool, view.start, group, out, workspace, lse):
            continue
        has_no_scores = fuses and not _is_sparse(step, group)
        if has_no_scores or _is_fused_on_device(step, q, group, lse):
            with workspace.frame():
                keys, values = gather_both(step, pool, group, workspace)
                _attend_fused(step, q, keys, values, view.start, group, out, lse)
            continue
        for part in group.parts():
            with workspace.frame():
                keys, values = gather_both(step, pool, part, workspace)
                for block in range(0, part.num_queries, QUERY_BLOCK):
                    with workspace.frame():
                        _attend_block(
                            step, q, keys, values, view.start, part, block, out, workspace, lse
                        )


def attends_without_scores(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a device has a kernel for whole prompts with heads of this width that holds none:
    torch's, for 16 bits."""
    is_suited = head_dim <= _MOST_FUSED and head_dim % 8 == 0
    return device.type == "cuda" and dtype.itemsize == 2 and is_suited


def is_fused(step: Attend, device: torch.device) -> bool:
    return device.type == "cpu" and step.softcap is None


def _is_fused_on_device(
    step: Attend, q: torch.Tensor, group: RowGroup, lse: torch.Tensor | None
) -> bool:
    """Whether torch's kernel for whole prompts takes them."""
    return (
        attends_without_scores(q.device, q.dtype, step.head_dim)
        and step.softcap is None
        and lse is None
        and group.num_queries > 1
        and _is_whole(step, group)
    )


def _is_whole(step: Attend, group: RowGroup) -> bool:
    """Whether queries see all keys up to their own, which are those that came with them."""
    return group.is_fresh and (step.window is None or step.window >= group.num_keys)


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
    """By a loop that reads the pages; False where there is none."""
    if group.num_queries != 1:
        return _attend_by_loop(step, q, pool, view_start, group, out, lse)
    first = view_start + group.start
    tokens = slice(first, first + group.num_rows)
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


def _attend_by_loop(
    step: Attend,
    q: torch.Tensor,
    pool: Pages,
    view_start: int,
    rows: RowGroup | Prompts,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> bool:
    """Several queries of each row; False where there is no loop for it, or torch's is faster."""
    if is_fused(step, q.device) and not loop_attends_faster(q.dtype, step.head_dim):
        return False
    first = view_start + rows.start
    tokens = slice(first, first + rows.num_tokens)
    return attend_queries(
        q[tokens],
        pool,
        rows.key_rows,
        rows.kv_lens,
        out[tokens],
        scale=step.scale,
        softcap=step.softcap,
        window=step.window,
        lse=None if lse is None else lse[tokens],
        num_new=rows.num_new if isinstance(rows, Prompts) else None,
    )


def _attend_fused(
    step: Attend,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view_start: int,
    group: RowGroup,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """All queries of a group by torch's own kernel, which holds no scores."""
    R, N, K, H = group.num_rows, step.num_heads, step.num_kv_heads, step.head_dim
    tokens = slice(view_start + group.start, view_start + group.start + R * group.num_queries)
    k_RKSH, v_RKSH = keys.view(R, K, -1, H), values.view(R, K, -1, H)
    sums = None if lse is None else lse[tokens]
    if group.num_queries == 1:
        # The heads that share keys are rows of one product.
        seen = _seen(group, 0, 1, step.window)
        queries, own_out = (x[tokens].view(R, K, N // K, H) for x in (q, out))
        own_sums = None if sums is None else sums.view(R, K, N // K)
        _fuse(queries, k_RKSH, v_RKSH, step.scale, own_out, own_sums, seen=seen)
        return
    q_RNQH, out_RNQH = (x[tokens].view(R, -1, N, H).transpose(1, 2) for x in (q, out))
    if q.device.type == "cuda":
        found = F.scaled_dot_product_attention(
            q_RNQH, k_RKSH, v_RKSH, is_causal=True, scale=step.scale, enable_gqa=N > K
        )
        out_RNQH.copy_(found)
        return
    k_RNSH, v_RNSH = (x.repeat_interleave(N // K, dim=1) for x in (k_RKSH, v_RKSH))
    sums_RNQ = None if sums is None else sums.view(R, -1, N).transpose(1, 2)
    whole = _is_whole(step, group)
    size = group.num_queries if whole else QUERY_BLOCK
    for first in range(0, group.num_queries, size):
        own = slice(first, min(first + size, group.num_queries))
        seen = None if whole else _seen(group, first, own.stop - first, step.window)
        queries, own_out = q_RNQH[:, :, own], out_RNQH[:, :, own]
        own_sums = None if sums_RNQ is None else sums_RNQ[:, :, own]
        _fuse(queries, k_RNSH, v_RNSH, step.scale, own_out, own_sums, seen=seen, is_causal=whole)


def _fuse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    *,
    seen: torch.Tensor | None,
    is_causal: bool = False,
) -> None:
    """out [R, N, Q, H] = attention of q over k, v [R, N, S, H]; sums [R, N, Q] where asked for."""
    if sums is None:
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=is_causal, scale=scale
        )
    else:
        found, total = fused(q, k, v, scale, seen, is_causal=is_causal)
        sums.copy_(total)
    out.copy_(found)


def fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [R, N, Q, H] over k, v [R, N, S, H] and its log-sum-exp [R, N, Q]: what
    ``scaled_dot_product_attention`` calls on the CPU, which keeps the second to itself."""
    mask = None
    if seen is not None:
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    found: tuple[torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    )
    return found


def _seen(group: RowGroup, block: int, num_queries: int, window: int | None) -> torch.Tensor | None:
    mask = _mask(group, block, num_queries, window)
    return None if mask is None else mask.logical_not_()


def gather_both(
    step: Attend, pool: Pages, group: RowGroup | Stem, workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of a group, or of a stem."""
    keys = _gather(pool, group.key_rows, group.num_keys, step, workspace)
    if pool.keys_alone:
        return keys, keys
    return keys, _gather(pool, group.value_rows, group.num_keys, step, workspace)


def _gather(
    pool: Pages, rows: torch.Tensor, num_keys: int, step: Attend, workspace: Workspace
) -> torch.Tensor:
    """Keys or values of R rows, or of a stem, [R·K, S, H]: of each row so many pages in ``rows``
    as ``num_keys`` tokens fill."""
    tokens = pool.page_tokens
    gathered = workspace.take(rows.numel(), tokens * step.head_dim, dtype=pool.dtype)
    with workspace.frame():
        size = 0 if pool.number_format is None else pool.token_bytes
        raw = workspace.take(rows.numel(), tokens, size, dtype=torch.uint8)
        gather_plain(pool, rows, gathered, raw)
    batch = rows.numel() // -(-num_keys // tokens)
    return gathered.view(batch, -1, step.head_dim)[:, :num_keys]


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
    scores = score(step, q_RKGQH.view(R * K, G * Q, H), keys, workspace)
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


def score(step: Attend, q: torch.Tensor, keys: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Scores [B, Q, S] of q [B, Q, H] and keys [B, S, H], scaled and capped."""
    scores = workspace.take(*q.shape[:2], keys.shape[1], dtype=q.dtype)
    torch.baddbmm(scores, q, keys.transpose(1, 2), beta=0, alpha=step.scale, out=scores)
    if step.softcap is not None:
        scores.div_(step.softcap).tanh_().mul_(step.softcap)
    return scores


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


def sink(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Take a score of each head, sinks [N], whose value is zero, into out [T, N, H] with lse
    [T, N], float32, which is not wanted again."""
    out.mul_(lse.sub_(sinks.float()).sigmoid_()[..., None].to(out.dtype))
