"""The steps of attention over latents as functions of tensors."""

from __future__ import annotations

import torch

from freight.model.latent_steps import AbsorbKeys, ExpandValues, JoinLatent, SplitLatent
from freight.model.workspace import Workspace

__all__ = ["absorb_keys", "expand_values", "join_latent", "split_latent"]


def split_latent(
    step: SplitLatent, x: torch.Tensor, latent: torch.Tensor, turned: torch.Tensor
) -> None:
    latent.copy_(x[:, : step.latent_width])
    turned.copy_(x[:, step.latent_width :])


def join_latent(
    step: JoinLatent, latent: torch.Tensor, turned: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    border = step.turned_width
    k[:, :border].copy_(turned)
    k[:, border:].copy_(latent)
    v[:, :border].zero_()
    v[:, border:].copy_(latent)


def absorb_keys(
    step: AbsorbKeys,
    x: torch.Tensor,
    matrix: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """``matrix`` [N (P + U), C] is in x's type."""
    tokens, heads, border = x.shape[0], step.num_heads, step.turned_width
    queries, absorbed = x.view(tokens, heads, -1), out.view(tokens, heads, -1)
    absorbed[..., :border].copy_(queries[..., step.key_width :])
    rows = matrix.view(heads, -1, matrix.shape[1])[:, : step.key_width]
    with workspace.frame():
        own = workspace.take(heads, tokens, step.key_width, dtype=x.dtype)
        own.copy_(queries[..., : step.key_width].transpose(0, 1))
        found = workspace.take(heads, tokens, matrix.shape[1], dtype=x.dtype)
        torch.bmm(own, rows, out=found)
        absorbed[..., border:].copy_(found.transpose(0, 1))


def expand_values(
    step: ExpandValues,
    x: torch.Tensor,
    matrix: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Likewise."""
    tokens, heads, border = x.shape[0], step.num_heads, step.turned_width
    attended, values = x.view(tokens, heads, -1), out.view(tokens, heads, -1)
    rows = matrix.view(heads, -1, matrix.shape[1])[:, step.key_width :]
    with workspace.frame():
        own = workspace.take(heads, tokens, matrix.shape[1], dtype=x.dtype)
        own.copy_(attended[..., border:].transpose(0, 1))
        found = workspace.take(heads, tokens, step.value_width, dtype=x.dtype)
        torch.bmm(own, rows.transpose(1, 2), out=found)
        values.copy_(found.transpose(0, 1))
