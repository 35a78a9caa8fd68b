"""The steps of attention over latents as functions of tensors."""

from __future__ import annotations

import torch

from freight.model.frame import Frame
from freight.model.latent_steps import AbsorbKeys, ExpandValues, JoinLatent, SplitLatent

__all__ = ["absorb_keys", "expand_values", "join_latent", "split_latent"]


def split_latent(step: SplitLatent, frame: Frame) -> None:
    x = frame.values[step.x]
    frame.new(step.latent, x, step.latent_width).copy_(x[:, : step.latent_width])
    frame.new(step.turned, x, step.turned_width).copy_(x[:, step.latent_width :])


def join_latent(step: JoinLatent, frame: Frame) -> None:
    latent, border = frame.values[step.x], step.turned_width
    out = frame.new(step.out, latent, border + step.latent_width)
    if step.turned is None:
        out[:, :border].zero_()
    else:
        out[:, :border].copy_(frame.values[step.turned])
    out[:, border:].copy_(latent)


def absorb_keys(step: AbsorbKeys, frame: Frame) -> None:
    x, heads, border = frame.values[step.x], step.num_heads, step.turned_width
    rank = step.weight.num_columns
    out = frame.new(step.out, x, heads * (border + rank)).view(len(x), heads, -1)
    queries = x.view(len(x), heads, -1)
    turned = queries[..., step.key_width :]
    if turned.shape[2]:
        out[..., :border].copy_(turned)
    else:
        out[..., :border].zero_()
    with frame.workspace.frame():
        rows = frame.plain(step.weight, x.dtype).view(heads, -1, rank)[:, : step.key_width]
        own = frame.workspace.take(heads, len(x), step.key_width, dtype=x.dtype)
        own.copy_(queries[..., : step.key_width].transpose(0, 1))
        found = frame.workspace.take(heads, len(x), rank, dtype=x.dtype)
        torch.bmm(own, rows, out=found)
        out[..., border:].copy_(found.transpose(0, 1))


def expand_values(step: ExpandValues, frame: Frame) -> None:
    x, heads, rank = frame.values[step.x], step.num_heads, step.weight.num_columns
    out = frame.new(step.out, x, heads * step.value_width).view(len(x), heads, -1)
    with frame.workspace.frame():
        rows = frame.plain(step.weight, x.dtype).view(heads, -1, rank)[:, step.key_width :]
        own = frame.workspace.take(heads, len(x), rank, dtype=x.dtype)
        own.copy_(x.view(len(x), heads, -1)[..., step.turned_width :].transpose(0, 1))
        found = frame.workspace.take(heads, len(x), step.value_width, dtype=x.dtype)
        torch.bmm(own, rows.transpose(1, 2), out=found)
        out.copy_(found.transpose(0, 1))
