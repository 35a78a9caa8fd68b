"""The rings of slots that tensors pass through, and what is kept for a block's head and by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Buffers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Rings of uint8 slots, [slots, bytes] or for KV [slots, pages, page bytes]; ``picked``
    [K, B + S, columns], the residual stream of the tokens that the head needs; and what the head
    leaves: ``logits`` [K, B, V] float32, and ``scores``
    [K, S, ...] float32, the running state of S scored positions. ``delegated`` and its like on the
    host [K, bytes] hold queries, keys and values of rows that the CPU attends, then what it has
    attended; ``attended`` [K, bytes] that of all rows. ``recomputed_kv`` [pages, bytes] holds keys
    and values of a slot whose pages hold what came into attention; ``window_scratch`` [pages,
    bytes] those of prompts, while a layer that keeps a window of them is computed. In a stage of a
    pipeline ``embedding_rows`` [K, bytes] are received and ``departing_rows`` [K, bytes] sent."""

    weight_staging: torch.Tensor
    embedding_rows: torch.Tensor
    embedding_slot: torch.Tensor
    departing_rows: torch.Tensor
    departing_slot: torch.Tensor
    kv_slot: torch.Tensor
    recomputed_kv: torch.Tensor
    window_scratch: torch.Tensor
    kv_in: torch.Tensor
    kv_out: torch.Tensor
    delegated_kv: torch.Tensor
    delegated: torch.Tensor
    delegated_on_cpu: torch.Tensor
    attended: torch.Tensor
    activation_slot: torch.Tensor
    activations_in: torch.Tensor
    activations_out: torch.Tensor
    picked: torch.Tensor
    logits: torch.Tensor
    scores: torch.Tensor
