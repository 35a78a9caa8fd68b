"""Attention over what rows begin with alike: the keys are read once for all of their tokens, and
what is found is merged with what each row finds behind them (by log-sum-exps, as in Cascade
inference, FlashInfer).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from freight.kernels.attention_choice import loop_attends_faster
from freight.kernels.paged import attend_queries, loop_takes_queries
from freight.kernels.pages import Pages
from freight.model.attention import fused, gather_both, is_fused, score
from freight.model.batch import GROUP_BYTES, QUERY_BLOCK, STEM_BYTES
from freight.model.kv_view import KVView, Stem
from freight.model.programme import Attend
from freight.model.workspace import Workspace

__all__ = ["attend_stems", "merge"]

_HIDDEN: Final = -1e30
"""A score that no other comes near, but a number: a query may see nothing of a stem."""


def attend_stems(
    step: Attend,
    q: torch.Tensor,
    pool: Pages,
    view: KVView,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Take the stems of a view into out [T, N, H], whose log-sum-exps are lse [T, N]: the keys that
    rows share, attended once by all of their tokens."""
    for stem in view.stems:
        with workspace.frame():
            gathered = None
            if _is_cut(step, stem) or not _has_loop(step, q, pool):
                gathered = gather_both(step, pool, stem, workspace)
            for tokens, positions in _stem_blocks(step, stem, q.element_size(), q.device):
                with workspace.frame():
                    _attend_stem(
                        step, q, pool, stem, tokens, positions, gathered, out, lse, workspace
                    )


def _has_loop(step: Attend, q: torch.Tensor, pool: Pages) -> bool:
    """Whether the loop that attends prompts is there, and the fastest way."""
    is_fastest = not is_fused(step, q.device) or loop_attends_faster(q.dtype, step.head_dim)
    return loop_takes_queries(q, pool) and is_fastest


def _stem_blocks(
    step: Attend, stem: Stem, size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens that attend a stem at once, and their positions."""
    most = STEM_BYTES // (step.num_heads * step.head_dim * size)
    if not is_fused(step, device) or _is_cut(step, stem):
        scores = GROUP_BYTES // (step.num_heads * stem.num_keys * size)
        most = min(most, scores, QUERY_BLOCK * stem.num_rows)
    most = max(1, most)
    for first in range(0, len(stem.tokens), most):
        yield stem.tokens[first : first + most], stem.positions[first : first + most]


def _is_cut(step: Attend, stem: Stem) -> bool:
    """Whether some do not see all of it."""
    return step.window is not None and step.window <= stem.last_position


def _attend_stem(
    step: Attend,
    q: torch.Tensor,
    pool: Pages,
    stem: Stem,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    gathered: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: Workspace,
) -> None:
    """The queries of T ``tokens`` over the stem's keys and values, where they lie or ``gathered``,
    as rows of one product for each head of keys."""
    T, K, H = len(tokens), step.num_kv_heads, step.head_dim
    G = step.num_heads // K
    chosen = workspace.take(T, K, G, H, dtype=q.dtype)
    torch.index_select(q, 0, tokens, out=chosen.view(T, -1, H))
    folded = workspace.take(K, T * G, H, dtype=q.dtype)
    folded.view(K, T, G, H).copy_(chosen.transpose(0, 1))
    found, sums = (
        workspace.take(K, T * G, H, dtype=q.dtype),
        workspace.take(K, T * G, dtype=torch.float32),
    )
    if gathered is None:
        _attend_in_place(step, folded, pool, stem, found, sums)
    else:
        hidden = None
        if _is_cut(step, stem):
            assert step.window is not None
            places = positions[:, None] - step.window
            hidden = torch.arange(stem.num_keys, device=q.device) <= places
        _attend_gathered(step, folded, *gathered, hidden, found, sums, workspace)
    torch.index_select(out, 0, tokens, out=chosen.view(T, -1, H))
    merged = workspace.take(T, K, G, H, dtype=torch.float32)
    merged.copy_(chosen)
    total = lse.index_select(0, tokens)
    merge(
        merged,
        total.view(T, K, G),
        found.view(K, T, G, H).transpose(0, 1),
        sums.view(K, T, G).transpose(0, 1),
    )
    out.index_copy_(0, tokens, chosen.copy_(merged).view(T, -1, H))
    lse.index_copy_(0, tokens, total)


def _attend_in_place(
    step: Attend,
    folded: torch.Tensor,
    pool: Pages,
    stem: Stem,
    found: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """found [K, T·G, H] and their log-sum-exps sums [K, T·G] by the loop that attends prompts, for
    which all queries are heads of one token that follows all but the last key."""
    num_heads, H = folded.shape[0] * folded.shape[1], folded.shape[2]
    is_done = attend_queries(
        folded.view(1, num_heads, H),
        pool,
        stem.key_rows,
        torch.tensor([stem.num_keys - 1]),
        found.view(1, num_heads, H),
        scale=step.scale,
        softcap=step.softcap,
        window=None,
        lse=sums.view(1, num_heads),
    )
    assert is_done, "there was a loop"


def _attend_gathered(
    step: Attend,
    folded: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    found: torch.Tensor,
    sums: torch.Tensor,
    workspace: Workspace,
) -> None:
    """The same over keys and values [K, S, H]; ``hidden`` [T, S] is true where a token must not see
    a key."""
    if is_fused(step, folded.device) and hidden is None:
        (made,), (logs,) = fused(folded[None], keys[None], values[None], step.scale)
        found.copy_(made)
        sums.copy_(logs)
        return
    scores = score(step, folded, keys, workspace)
    if hidden is not None:
        T, G = len(hidden), step.num_heads // step.num_kv_heads
        scores.view(len(keys), T, G, -1).masked_fill_(
            hidden[:, None], max(_HIDDEN, torch.finfo(scores.dtype).min)
        )
    top = scores.amax(dim=-1, keepdim=True)
    scores.sub_(top).exp_()
    weight = scores.sum(dim=-1, keepdim=True, dtype=torch.float32)
    torch.bmm(scores, values, out=found).div_(weight)
    sums.copy_((top + weight.log())[..., 0])


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Take attention over other keys into out [..., H] with lse [...], both float32."""
    share = torch.sigmoid(other_lse - lse)[..., None]
    out.mul_(1 - share).addcmul_(other, share)
    torch.logaddexp(lse, other_lse, out=lse)
