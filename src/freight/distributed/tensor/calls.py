"""The rows of a batch, and a call of some of them as tensors: a rectangle, padded to what its way
can cut. Knows rotations, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from freight.distributed.tensor.attention import Rows
from freight.distributed.tensor.cache import KVCache
from freight.distributed.tensor.scoring import Scored
from freight.distributed.tensor.ways import Programmes, Way, Ways
from freight.model.rope import inverse_frequencies
from freight.model.switches import ModelConfig
from freight.quantities import align_up

__all__ = ["Batch", "Left", "ModelCall", "prepare"]


class Batch:
    """Rows that are computed together, and their keys. ``lengths`` [R] are tokens they have."""

    def __init__(self, num_rows: int, cache: KVCache) -> None:
        self.cache = cache
        self.lengths = torch.zeros(num_rows, dtype=torch.long)


class Left(NamedTuple):
    """What a call leaves on every rank: ``logits`` [R, V], ``states`` of scores [R, C, state]."""

    logits: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """``ids`` [B, L] of rows, of which the first ``num_rows`` are no padding. Rows of the batch
    have up to ``used`` tokens before, those of the call up to ``longest`` then. ``scored`` are
    tokens of theirs whose next ones are."""

    rows: Rows
    ids: torch.Tensor
    programmes: Programmes
    num_rows: int
    used: int
    longest: int
    to_logits: bool
    scored: Scored | None = None


def prepare(
    batch: Batch,
    tokens: Sequence[Sequence[int]],
    way: Way,
    seats: Sequence[int] | None,
    *,
    ways: Ways,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    to_logits: bool = True,
    scored: Scored | None = None,
) -> ModelCall:
    """The new ``tokens`` of each row, which the batch's rows have from now on. The rows are the
    batch's ``seats``, of each of its equal parts as many, in their order; or all of them. Where
    nobody wants what comes ``to_logits`` there are none."""
    width = align_up(max(map(len, tokens)), ways.token_parts(way))
    before = batch.lengths if seats is None else batch.lengths[list(seats)]
    ids = torch.zeros(len(before), width, dtype=torch.long)
    num_new = torch.zeros(len(ids), dtype=torch.long)
    for row, own in enumerate(tokens):
        ids[row, : len(own)] = torch.tensor(own, dtype=torch.long)
        num_new[row] = len(own)
    positions = before[:, None] + torch.arange(width)
    angles = {}
    for rope in config.rotations:
        frequencies, scale = inverse_frequencies(rope, 1, config.max_positions)
        turns = positions[:, :, None].float() * frequencies
        cos, sin = ((part * scale).to(dtype).to(device) for part in (turns.cos(), turns.sin()))
        angles[rope] = cos, sin
    rows = Rows(
        width=width,
        num_new=num_new.to(device),
        kv_lens=before.to(device),
        seats=None if seats is None else torch.tensor(seats, device=device),
        angles=angles,
        is_fresh=not bool(before[num_new > 0].any()),
    )
    used, after = int(batch.lengths.max()), before + num_new
    batch.lengths = batch.lengths.index_copy(0, _places(seats, len(before)), after)
    return ModelCall(
        rows=rows,
        ids=ids.to(device),
        programmes=ways.programmes(way, len(ids), width),
        num_rows=len(tokens),
        used=used,
        longest=int(after.max()),
        to_logits=to_logits,
        scored=scored,
    )


def _places(seats: Sequence[int] | None, count: int) -> torch.Tensor:
    return torch.arange(count) if seats is None else torch.tensor(seats)
